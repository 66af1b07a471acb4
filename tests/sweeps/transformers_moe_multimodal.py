"""Mixtures of experts and multimodal models of transformers."""

from tests.sweeps.transformers_cases import SEQ2SEQ, TINY, VISION, Case, tiny

MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "head_dim": 8,
}
MLA = MOE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

EXPERTS: dict[str, Case] = {
    "mixtral": tiny("MixtralForCausalLM", "long", **MOE),
    "mixtral (experts one by one)": tiny("MixtralForCausalLM", "long", **MOE, experts_implementation="eager"),
    "mixtral (batched)": tiny("MixtralForCausalLM", "long", **MOE, experts_implementation="batched_mm"),
    "qwen2_moe": tiny("Qwen2MoeForCausalLM", "long", **MOE),
    "qwen3_moe": tiny("Qwen3MoeForCausalLM", "long", **MOE),
    "deepseek_v2": tiny("DeepseekV2ForCausalLM", "long", **MLA | {"n_group": 1}),
    "deepseek_v3": tiny("DeepseekV3ForCausalLM", "long", **MLA),
    "gpt_oss": tiny("GptOssForCausalLM", "long", **MOE, sliding_window=8),
    "olmoe": tiny("OlmoeForCausalLM", "long", **MOE),
    "flex_olmo": tiny("FlexOlmoForCausalLM", "long", **MOE),
    "phimoe": tiny("PhimoeForCausalLM", "long", **MOE),
    "llama4_text": tiny("Llama4ForCausalLM", "long", **MOE, intermediate_size_mlp=48, attention_chunk_size=16),
    "granitemoe": tiny("GraniteMoeForCausalLM", "long", **MOE),
    "granitemoeshared": tiny("GraniteMoeSharedForCausalLM", "long", **MOE, shared_intermediate_size=24),
    "jetmoe": tiny("JetMoeForCausalLM", "long", **MOE | {"num_attention_heads": None}, kv_channels=8),
    "dbrx": Case(
        "DbrxForCausalLM",
        "long",
        {
            "vocab_size": 99,
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "ernie4_5_moe": tiny("Ernie4_5_MoeForCausalLM", "long", **MOE, moe_num_experts=4, moe_k=2),
    "glm4_moe": tiny("Glm4MoeForCausalLM", "long", **MOE, first_k_dense_replace=1),
    "minimax": tiny(
        "MiniMaxForCausalLM", "long", **MOE, block_size=8, layer_types=["linear_attention", "full_attention"]
    ),
    "minimax_m2": tiny("MiniMaxM2ForCausalLM", "long", **MOE, rotary_dim=4),
    "hunyuan_v1_moe": tiny("HunYuanMoEV1ForCausalLM", "long", **MOE, moe_topk=2),
    "dots1": tiny("Dots1ForCausalLM", "long", **MOE, first_k_dense_replace=1),
    "lfm2_moe": tiny("Lfm2MoeForCausalLM", "long", **MOE, layer_types=["conv", "full_attention"], num_dense_layers=1),
    "afmoe": tiny(
        "AfmoeForCausalLM",
        "long",
        **MOE,
        num_dense_layers=1,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
    ),
    "longcat_flash": tiny(
        "LongcatFlashForCausalLM",
        "long",
        **MLA,
        num_layers=1,
        ffn_hidden_size=48,
        moe_topk=2,
        zero_expert_num=2,
        expert_ffn_hidden_size=24,
    ),
    "solar_open": tiny("SolarOpenForCausalLM", "long", **MOE),
}

LLAMA = TINY | {"model_type": "llama"}
QWEN2 = TINY | {"model_type": "qwen2"}
CLIP = VISION | {"model_type": "clip_vision_model"}
SIGLIP = VISION | {"model_type": "siglip_vision_model"}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
QWEN_VISION = {
    "depth": 2,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
QWEN_TOKENS = {"image_token_id": 98, "video_token_id": 97, "vision_start_token_id": 96, "vision_end_token_id": 95}
CLIP_TEXT = TINY | {"projection_dim": 16}
IDS98 = {"image_token_id": 98, "image_token_index": 98}

WIDE = TINY | {"hidden_size": 64}
#: the numbers 0 to 15 with letters for digits
CODES = [*"ABCDEFGHIJ", *(f"B{letter}" for letter in "ABCDEF")]

MULTIMODAL: dict[str, Case] = {
    "clip": Case("CLIPModel", "clip", {"text_config": CLIP_TEXT, "vision_config": VISION, "projection_dim": 16}),
    "siglip": Case("SiglipModel", "clip", {"text_config": TINY | {"projection_size": 32}, "vision_config": VISION}),
    "siglip2": Case(
        "Siglip2Model",
        "clip patches",
        {"text_config": TINY | {"projection_size": 32}, "vision_config": VISION | {"num_patches": 16}},
    ),
    "metaclip_2": Case(
        "MetaClip2Model", "clip", {"text_config": CLIP_TEXT, "vision_config": VISION, "projection_dim": 16}
    ),
    "chinese_clip": Case(
        "ChineseCLIPModel", "clip", {"text_config": CLIP_TEXT, "vision_config": VISION, "projection_dim": 16}
    ),
    "altclip": Case(
        "AltCLIPModel",
        "clip",
        {"text_config": TINY | {"project_dim": 32}, "vision_config": VISION, "projection_dim": 16},
    ),
    "x-clip": Case(
        "XCLIPModel",
        "clip video",
        {
            "text_config": CLIP_TEXT,
            "vision_config": VISION
            | {"mit_hidden_size": 32, "mit_intermediate_size": 48, "mit_num_attention_heads": 4, "num_frames": 2},
            "projection_dim": 32,
            "prompt_num_attention_heads": 4,
        },
    ),
    "groupvit": Case(
        "GroupViTModel",
        "clip",
        {
            "text_config": CLIP_TEXT,
            "vision_config": VISION
            | {"depths": [1, 1, 1], "num_group_tokens": [8, 4, 0], "num_output_groups": [8, 4, 4]},
            "projection_dim": 16,
            "projection_intermediate_dim": 24,
        },
    ),
    "clipseg": Case(
        "CLIPSegForImageSegmentation",
        "clip",
        {
            "text_config": CLIP_TEXT,
            "vision_config": VISION | {"num_hidden_layers": 3},
            "projection_dim": 16,
            "extract_layers": [0, 1],
            "reduce_dim": 16,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 32,
        },
    ),
    "owlvit": Case(
        "OwlViTForObjectDetection", "owl", {"text_config": CLIP_TEXT, "vision_config": VISION, "projection_dim": 32}
    ),
    "blip": Case(
        "BlipForConditionalGeneration",
        "clip",
        {"text_config": TINY | {"encoder_hidden_size": 32}, "vision_config": VISION, "projection_dim": 16},
    ),
    "blip-2": Case(
        "Blip2ForConditionalGeneration",
        "image tokens 4",
        {
            "text_config": TINY | {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32},
            "vision_config": VISION,
            "qformer_config": TINY | {"encoder_hidden_size": 32},
            "num_query_tokens": 4,
            **IDS98,
        },
    ),
    "instructblip": Case(
        "InstructBlipForConditionalGeneration",
        "instructblip",
        {
            "text_config": TINY | {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32},
            "vision_config": VISION,
            "qformer_config": TINY | {"encoder_hidden_size": 32},
            "num_query_tokens": 4,
            **IDS98,
        },
    ),
    "git": Case("GitForCausalLM", "clip", TINY | {"vision_config": VISION}),
    "vilt": Case("ViltModel", "clip", TINY | VISION),
    "flava": Case(
        "FlavaModel",
        "clip",
        {
            "text_config": TINY,
            "image_config": VISION,
            "multimodal_config": TINY,
            "hidden_size": 32,
            "projection_dim": 16,
            "init_codebook": False,
        },
        ("image_projection", "text_projection"),
    ),
    "bridgetower": Case(
        "BridgeTowerModel",
        "clip",
        WIDE | {"text_config": WIDE, "vision_config": VISION | {"hidden_size": 64}},
        ("text_model.pooler.dense",),
    ),
    "visual_bert": Case("VisualBertModel", "regions", TINY | {"visual_embedding_dim": 16}),
    "lxmert": Case(
        "LxmertModel",
        "lxmert",
        TINY
        | {
            "l_layers": 1,
            "r_layers": 1,
            "x_layers": 1,
            "visual_feat_dim": 16,
            "visual_pos_dim": 4,
            "num_hidden_layers": None,
        },
    ),
    "llava": Case(
        "LlavaForConditionalGeneration",
        "image tokens 16",
        {"text_config": LLAMA, "vision_config": CLIP, **IDS98, "vision_feature_layer": -1},
    ),
    "vipllava": Case(
        "VipLlavaForConditionalGeneration",
        "image tokens 16",
        {"text_config": LLAMA, "vision_config": CLIP, **IDS98, "vision_feature_layers": [-1, -2]},
    ),
    "llava_next": Case(
        "LlavaNextForConditionalGeneration",
        "llava next",
        {
            "text_config": LLAMA,
            "vision_config": CLIP,
            **IDS98,
            "image_grid_pinpoints": [[32, 32]],
            "vision_feature_layer": -1,
        },
    ),
    "llava_onevision": Case(
        "LlavaOnevisionForConditionalGeneration",
        "llava next",
        {
            "text_config": QWEN2,
            "vision_config": SIGLIP | {"vision_use_head": False},
            **IDS98,
            "image_grid_pinpoints": [[32, 32]],
            "vision_feature_layer": -1,
        },
    ),
    "mistral3": Case(
        "Mistral3ForConditionalGeneration",
        "image sizes",
        {
            "text_config": TINY | {"model_type": "mistral", "head_dim": 8},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
            **IDS98,
            "spatial_merge_size": 2,
        },
    ),
    "paligemma": Case(
        "PaliGemmaForConditionalGeneration",
        "image tokens 16",
        {
            "text_config": TINY | {"model_type": "gemma", "head_dim": 8},
            "vision_config": SIGLIP | {"vision_use_head": False},
            **IDS98,
            "projection_dim": 32,
        },
    ),
    "gemma3": Case(
        "Gemma3ForConditionalGeneration",
        "image tokens 4",
        {
            "text_config": TINY | {"head_dim": 8, "sliding_window": 8},
            "vision_config": SIGLIP | {"vision_use_head": False},
            **IDS98,
            "mm_tokens_per_image": 4,
        },
    ),
    "qwen2_vl": Case(
        "Qwen2VLForConditionalGeneration",
        "qwen vl",
        {
            "text_config": TINY | MROPE,
            "vision_config": QWEN_VISION | {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
            **QWEN_TOKENS,
        },
    ),
    "qwen2_5_vl": Case(
        "Qwen2_5_VLForConditionalGeneration",
        "qwen vl",
        {
            "text_config": TINY | MROPE,
            "vision_config": QWEN_VISION
            | {
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **QWEN_TOKENS,
        },
    ),
    "qwen3_vl": Case(
        "Qwen3VLForConditionalGeneration",
        "qwen vl",
        {
            "text_config": TINY | MROPE | {"head_dim": 8},
            "vision_config": QWEN_VISION
            | {
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            **QWEN_TOKENS,
        },
    ),
    "qwen3_vl_moe": Case(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen vl",
        {
            "text_config": TINY | MOE | MROPE,
            "vision_config": QWEN_VISION
            | {
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            **QWEN_TOKENS,
        },
    ),
    "idefics": Case(
        "IdeficsForVisionText2Text",
        "idefics",
        TINY
        | {
            "additional_vocab_size": 4,
            "cross_layer_interval": 1,
            "alpha_initializer": "ones",
            "vision_config": VISION | {"embed_dim": 32},
            "use_resampler": True,
            "perceiver_config": {
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
            },
        },
    ),
    "idefics2": Case(
        "Idefics2ForConditionalGeneration",
        "images tokens 4",
        {
            "text_config": TINY | {"model_type": "mistral"},
            "vision_config": VISION,
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            },
            **IDS98,
        },
    ),
    "idefics3": Case(
        "Idefics3ForConditionalGeneration",
        "images tokens 4",
        {"text_config": LLAMA, "vision_config": VISION, "scale_factor": 2, **IDS98},
    ),
    "smolvlm": Case(
        "SmolVLMForConditionalGeneration",
        "images tokens 4",
        {"text_config": LLAMA, "vision_config": VISION, "scale_factor": 2, **IDS98},
    ),
    "internvl": Case(
        "InternVLForConditionalGeneration",
        "image tokens 4",
        {"text_config": QWEN2, "vision_config": VISION | {"image_size": [32, 32], "patch_size": [8, 8]}, **IDS98},
    ),
    "aya_vision": Case(
        "AyaVisionForConditionalGeneration",
        "image tokens 4",
        {
            "text_config": TINY | {"model_type": "cohere2", "sliding_window": 8},
            "vision_config": SIGLIP | {"vision_use_head": False},
            **IDS98,
            "downsample_factor": 2,
            "vision_feature_layer": -1,
        },
    ),
    "got_ocr2": Case(
        "GotOcr2ForConditionalGeneration",
        "got",
        {
            "text_config": QWEN2,
            "vision_config": {
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 128,
                "patch_size": 16,
                "mlp_dim": 48,
                "window_size": 4,
                "global_attn_indexes": [1],
            },
            **IDS98,
        },
    ),
    "mllama": Case(
        "MllamaForConditionalGeneration",
        "mllama",
        {
            "text_config": TINY
            | {
                "num_hidden_layers": 3,
                "cross_attention_layers": [1],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 4,
                "intermediate_size": 48,
                "vision_output_dim": 64,
                "image_size": 32,
                "patch_size": 8,
                "max_num_tiles": 2,
                "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1], [1, 2]],
            },
            **IDS98,
        },
    ),
    "kosmos-2": Case(
        "Kosmos2ForConditionalGeneration",
        "kosmos",
        {
            "text_config": {
                "vocab_size": 99,
                "max_position_embeddings": 64,
                "embed_dim": 32,
                "layers": 2,
                "ffn_dim": 48,
                "attention_heads": 4,
            },
            "vision_config": VISION,
            "latent_query_num": 4,
        },
    ),
    "chameleon": Case(
        "ChameleonForConditionalGeneration",
        "image tokens 16",
        TINY
        | {
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 16,
                "latent_channels": 8,
                "resolution": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1, 1],
                "num_res_blocks": 1,
            },
            "vocabulary_map": {"<image>": 98} | {f"IMGIMG{code}Z": 50 + i for i, code in enumerate(CODES)},
        },
        ("model.vqmodel.post_quant_conv",),
    ),
    "fuyu": Case(
        "FuyuForCausalLM",
        "fuyu",
        TINY | {"patch_size": 4, "image_token_id": 98, "text_config": TINY | {"model_type": "persimmon"}},
    ),
    "florence2": Case(
        "Florence2ForConditionalGeneration",
        "florence",
        {
            "text_config": SEQ2SEQ | {"model_type": "bart"},
            "vision_config": {
                "depths": [1, 1, 1, 1],
                "embed_dim": [8, 16, 16, 32],
                "num_heads": [1, 2, 2, 4],
                "num_groups": [1, 2, 2, 4],
                "window_size": 4,
                "projection_dim": 32,
                "mlp_ratio": 2.0,
            },
            **IDS98,
        },
    ),
    "pix2struct": Case(
        "Pix2StructForConditionalGeneration",
        "pix2struct",
        {
            "text_config": TINY | {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
            "vision_config": {
                "hidden_size": 32,
                "patch_embed_hidden_size": 48,
                "d_ff": 48,
                "d_kv": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "seq_len": 16,
            },
        },
    ),
    "vision-encoder-decoder": Case(
        "VisionEncoderDecoderModel",
        "image to text",
        {
            "encoder": VISION | {"model_type": "vit"},
            "decoder": SEQ2SEQ | {"model_type": "trocr", "is_decoder": True, "add_cross_attention": True},
        },
    ),
    "vision-text-dual-encoder": Case(
        "VisionTextDualEncoderModel",
        "clip",
        {
            "vision_config": VISION | {"model_type": "vit"},
            "text_config": TINY | {"model_type": "bert"},
            "projection_dim": 16,
        },
    ),
    "speech-encoder-decoder": Case(
        "SpeechEncoderDecoderModel",
        "speecht5",
        {
            "encoder": {
                "model_type": "wav2vec2",
                **TINY,
                "conv_dim": [16, 16],
                "conv_kernel": [10, 3],
                "conv_stride": [5, 4],
                "num_feat_extract_layers": 2,
                "num_conv_pos_embeddings": 8,
                "num_conv_pos_embedding_groups": 2,
            },
            "decoder": TINY | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        },
    ),
    "layoutlmv3": Case(
        "LayoutLMv3Model",
        "layoutlmv3",
        TINY
        | {"input_size": 32, "patch_size": 8, "coordinate_size": 6, "shape_size": 4, "max_2d_position_embeddings": 128},
    ),
    "qwen2_audio": Case(
        "Qwen2AudioForConditionalGeneration",
        "qwen audio",
        {
            "text_config": QWEN2,
            "audio_config": {
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
                "d_model": 32,
                "max_source_positions": 20,
            },
            "audio_token_index": 98,
        },
    ),
    "voxtral": Case(
        "VoxtralForConditionalGeneration",
        "voxtral",
        {
            "text_config": LLAMA,
            "audio_config": TINY
            | {
                "num_mel_bins": 16,
                "max_source_positions": 20,
                "hidden_size": 32,
                "intermediate_size": 128,
                "head_dim": 8,
            },
            "audio_token_id": 98,
        },
    ),
    "grounding-dino": Case(
        "GroundingDinoForObjectDetection",
        "grounding",
        {
            "backbone_config": {
                "model_type": "swin",
                "image_size": 64,
                "patch_size": 4,
                "embed_dim": 16,
                "depths": [1, 1, 1, 1],
                "num_heads": [1, 2, 2, 4],
                "window_size": 2,
                "out_features": ["stage2", "stage3", "stage4"],
            },
            "text_config": TINY | {"model_type": "bert"},
            "d_model": 32,
            "num_queries": 5,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_text_len": 24,
            "num_feature_levels": 4,
        },
    ),
}
