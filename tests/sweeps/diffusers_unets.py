"""UNets of diffusers, small."""

from tests.sweeps.diffusers_cases import at, case, ints, ones, randn

SIZE = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}
CROSS = {
    **SIZE,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
SDXL = {
    **CROSS,
    "transformer_layers_per_block": (1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 32,
}
MOTION = {
    **SIZE,
    "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
    "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
    "cross_attention_dim": 32,
    "num_attention_heads": 4,
    "motion_num_attention_heads": 4,
}
VIDEO = {
    **SIZE,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}


def xl_conditions():
    return {"text_embeds": randn(1, 32), "time_ids": randn(1, 6)}


UNETS = dict(
    [
        case(
            "UNet1DModel",
            lambda m: m(randn(1, 2, 64), at(5)),
            block_out_channels=(32, 32, 64),
            sample_size=64,
            extra_in_channels=64,
        ),
        case(
            "UNet2DModel",
            lambda m: m(randn(1, 3, 16, 16), 5),
            **SIZE,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        case("UNet2DConditionModel", lambda m: m(randn(1, 4, 8, 8), 5, randn(1, 7, 32)), **CROSS),
        case(
            "UNet2DConditionModel/sdxl",
            lambda m: m(randn(1, 4, 8, 8), 5, randn(1, 7, 32), added_cond_kwargs=xl_conditions()),
            **SDXL,
        ),
        case("UNet3DConditionModel", lambda m: m(randn(1, 4, 2, 8, 8), 5, randn(1, 7, 32)), **VIDEO),
        case(
            "I2VGenXLUNet",
            lambda m: m(
                randn(1, 4, 2, 8, 8),
                5,
                at(8),
                randn(1, 4, 2, 8, 8),
                randn(1, 32),
                encoder_hidden_states=randn(1, 7, 32),
            ),
            **VIDEO,
        ),
        case("UNetMotionModel", lambda m: m(randn(1, 4, 2, 8, 8), 5, randn(2, 7, 32)), **MOTION),
        case(
            "UNetSpatioTemporalConditionModel",
            lambda m: m(randn(1, 2, 8, 8, 8), 5, randn(1, 1, 32), randn(1, 3)),
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            layers_per_block=1,
            cross_attention_dim=32,
            num_attention_heads=(4, 8),
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
        ),
        case(
            "Kandinsky3UNet",
            lambda m: m(randn(1, 4, 8, 8), 5, randn(1, 7, 32), ones(1, 7)),
            time_embedding_dim=32,
            groups=4,
            attention_head_dim=8,
            layers_per_block=2,
            block_out_channels=(16, 32, 32, 32),
            cross_attention_dim=32,
            encoder_hid_dim=32,
        ),
        case(
            "StableCascadeUNet",
            lambda m: m(randn(1, 16, 8, 8), at(0.5), randn(1, 1, 24)),
            conditioning_dim=32,
            block_out_channels=(32, 32),
            num_attention_heads=(4, 4),
            down_num_layers_per_block=(1, 1),
            up_num_layers_per_block=(1, 1),
            clip_text_pooled_in_channels=24,
        ),
        case(
            "UVit2DModel",
            lambda m: m(ints(64, 1, 8, 8), randn(1, 7, 24), randn(1, 16), randn(1, 5)),
            hidden_size=32,
            cond_embed_dim=16,
            micro_cond_encode_dim=8,
            micro_cond_embed_dim=40,
            encoder_hidden_size=24,
            vocab_size=66,
            codebook_size=64,
            in_channels=32,
            block_out_channels=32,
            num_res_blocks=1,
            downsample=True,
            upsample=True,
            block_num_heads=2,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            sample_size=8,
        ),
        case(
            "DreamLiteUNetModel",
            lambda m: m(randn(1, 4, 8, 8), 5, randn(1, 7, 32)),
            **SIZE,
            down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
            up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=8,
        ),
    ]
)
