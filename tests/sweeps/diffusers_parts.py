"""Models that live beside the pipelines of diffusers (text, audio and image conditioners, decoders), small."""

import torch

from tests.sweeps.diffusers_cases import UNCALLED, at, case, ints, ones, randn
from tests.sweeps.diffusers_unets import CROSS

ACE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 2,
}
ACE_MODULE = "pipelines.ace_step.modeling_ace_step"
DEPRECATED = "pipelines.deprecated"
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
VOCODER = {
    "in_channels": 8,
    "hidden_channels": 16,
    "out_channels": 2,
    "upsample_kernel_sizes": [8, 4],
    "upsample_factors": [4, 2],
    "resnet_kernel_sizes": [3],
    "resnet_dilations": [[1, 3]],
}

RESIDUES = 5


def residues():
    """What is known of five residues of a protein, as both of its models want it."""
    return {
        "is_in_context_conditioning": torch.zeros(1, RESIDUES).bool(),
        "supports_local_latent": ones(1, RESIDUES).bool(),
        "condition_secondary-structure_1_residue": ints(4, 1, RESIDUES),
        "condition_cath-label_1_residue": ints(5, 1, RESIDUES, 3),
        "token_bond_path_length": ints(4, 1, RESIDUES, RESIDUES),
        "element": ints(9, 1, RESIDUES, 37),
        "ground_truth_element": ints(9, 1, RESIDUES, 37),
        "charge": ints(2, 1, RESIDUES, 37),
    }


def proteina(m):
    return m(
        randn(1, RESIDUES, 3),
        randn(1, RESIDUES, 4),
        at(0.5),
        at(0.5),
        ones(1, RESIDUES).bool(),
        ints(4, 1, RESIDUES),
        ones(1, RESIDUES, 37).bool(),
        residues(),
        recycle_depth=2,
    )


def proteina_autoencoder(m):
    known = {
        "padding_mask": ones(1, RESIDUES).bool(),
        "token_type": ints(4, 1, RESIDUES),
        "atom37_mask": ones(1, RESIDUES, 37).bool(),
        "conditioning": residues(),
    }
    coded = m.encode(coords_nm=randn(1, RESIDUES, 37, 3), **known)
    decoded = m(z_latent=coded.mean, ca_coors_nm=randn(1, RESIDUES, 3), **known)
    return coded.mean, coded.log_scale, decoded.coordinates


def shape_views(m):
    """Twenty small pictures of a shape, of networks whose weights are made from the latents."""
    return m.decode_to_image(randn(1, 16, 16), "cpu", 4, ray_batch_size=320, n_coarse_samples=4, n_fine_samples=4)


PARTS = dict(
    [
        case(
            "AnimaTextConditioner",
            lambda m: m(randn(1, 7, 24), ints(10, 1, 5), ones(1, 5).bool(), ones(1, 7).bool()),
            source_dim=24,
            target_dim=16,
            model_dim=32,
            num_layers=1,
            num_attention_heads=2,
            target_vocab_size=10,
            min_sequence_length=8,
        ),
        case(
            "MiniMaxMusic3ConditionEncoder",
            lambda m: m(randn(1, 5, 32)),
            condition_hidden_dim=16,
            num_condition_layers=2,
            out_dim=8,
        ),
        case(
            f"{ACE_MODULE}.AceStepAudioTokenDetokenizer",
            lambda m: m(randn(1, 3, 32)),
            **ACE,
            audio_acoustic_hidden_dim=4,
            num_attention_pooler_hidden_layers=2,
        ),
        case(
            f"{ACE_MODULE}.AceStepAudioTokenizer",
            lambda m: m(randn(1, 3, 5, 4)),
            **ACE,
            audio_acoustic_hidden_dim=4,
            fsq_dim=32,
            num_attention_pooler_hidden_layers=2,
        ),
        case(
            f"{ACE_MODULE}.AceStepConditionEncoder",
            lambda m: m(
                randn(1, 7, 24), ones(1, 7), randn(1, 5, 24), ones(1, 5), randn(1, 6, 4), torch.zeros(1).long()
            ),
            **ACE,
            text_hidden_dim=24,
            timbre_hidden_dim=4,
            num_lyric_encoder_hidden_layers=2,
            num_timbre_encoder_hidden_layers=2,
        ),
        case(
            f"{ACE_MODULE}.AceStepLyricEncoder",
            lambda m: m(randn(1, 5, 24), ones(1, 5)),
            **ACE,
            text_hidden_dim=24,
            num_lyric_encoder_hidden_layers=2,
        ),
        case(
            f"{ACE_MODULE}.AceStepTimbreEncoder",
            lambda m: m(randn(1, 6, 4), torch.zeros(1).long()),
            **ACE,
            timbre_hidden_dim=4,
            num_timbre_encoder_hidden_layers=2,
        ),
        case(
            "AudioLDM2ProjectionModel",
            lambda m: m(randn(1, 5, 24), randn(1, 7, 40), ones(1, 5), ones(1, 7)),
            text_encoder_dim=24,
            text_encoder_1_dim=40,
            langauge_model_dim=32,
        ),
        case(
            "AudioLDM2UNet2DConditionModel",
            lambda m: m(
                randn(1, 4, 8, 8),
                5,
                randn(1, 7, 32),
                encoder_attention_mask=ones(1, 7),
                encoder_hidden_states_1=randn(1, 5, 24),
                encoder_attention_mask_1=ones(1, 5),
            ),
            **{**CROSS, "cross_attention_dim": ([None, 32, 24], [None, 32, 24])},
        ),
        case(
            f"{DEPRECATED}.unclip.text_proj.UnCLIPTextProjModel",
            lambda m: m(
                image_embeddings=randn(1, 24),
                prompt_embeds=randn(2, 24),
                text_encoder_hidden_states=randn(2, 7, 24),
                do_classifier_free_guidance=True,
            ),
            clip_extra_context_tokens=2,
            clip_embeddings_dim=24,
            time_embed_dim=16,
            cross_attention_dim=32,
        ),
        case(
            "UniDiffuserTextDecoder",
            lambda m: m(ints(10, 1, 5), randn(1, 3, 24)),
            prefix_length=3,
            prefix_inner_dim=24,
            prefix_hidden_dim=16,
            vocab_size=10,
            n_positions=16,
            n_embd=32,
            n_layer=1,
            n_head=2,
        ),
        case(
            f"{DEPRECATED}.unidiffuser.modeling_uvit.UTransformer2DModel",
            lambda m: m(randn(1, 4, 8, 8)),
            **HEADS,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=8,
            use_patch_pos_embed=True,
            norm_num_groups=8,
        ),
        case(
            "UniDiffuserModel",
            lambda m: m(randn(1, 4, 8, 8), randn(1, 1, 24), randn(1, 7, 40), 5, 9),
            leave={"transformer.pos_embed.proj": UNCALLED},  # it is given what is embedded already
            **HEADS,
            text_dim=40,
            clip_img_dim=24,
            num_text_tokens=7,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            sample_size=8,
            patch_size=2,
            norm_num_groups=8,
            use_data_type_embedding=True,
            use_timestep_embedding=True,
        ),
        case(
            f"{DEPRECATED}.versatile_diffusion.modeling_text_unet.UNetFlatConditionModel",
            lambda m: m(randn(1, 4, 4, 1), 5, randn(1, 7, 32)),
            **{k: v for k, v in CROSS.items() if not k.endswith("block_types")},
            down_block_types=("CrossAttnDownBlockFlat", "DownBlockFlat"),
            up_block_types=("UpBlockFlat", "CrossAttnUpBlockFlat"),
        ),
        case(
            f"{DEPRECATED}.wuerstchen.modeling_paella_vq_model.PaellaVQModel",
            lambda m: m(randn(1, 3, 16, 16)),
            bottleneck_blocks=1,
            embed_dim=32,
            num_vq_embeddings=16,
        ),
        case(
            f"{DEPRECATED}.wuerstchen.modeling_wuerstchen_diffnext.WuerstchenDiffNeXt",
            lambda m: m(randn(1, 4, 16, 16), at(0.5), randn(1, 4, 4, 4), randn(1, 5, 24)),
            c_r=8,
            c_cond=32,
            c_hidden=[16, 32],
            nhead=[-1, 2],
            blocks=[1, 1],
            level_config=["CT", "CTA"],
            inject_effnet=[False, True],
            effnet_embd=4,
            clip_embd=24,
        ),
        case(
            f"{DEPRECATED}.wuerstchen.modeling_wuerstchen_prior.WuerstchenPrior",
            lambda m: m(randn(1, 4, 8, 8), at(0.5), randn(1, 7, 24)),
            c_in=4,
            c=32,
            c_cond=24,
            c_r=8,
            depth=1,
            nhead=2,
        ),
        case(
            "RFD4ProteinaTransformer",
            proteina,
            nlayers=2,
            token_dim=32,
            nheads=2,
            dim_cond=16,
            pair_repr_dim=16,
            latent_dim=4,
            token_type_emb_dim=8,
            cath_emb_dim=8,
            t_emb_dim=16,
            seq_sep_dim=4,
            xt_pair_dist_dim=4,
            feats_seq=("xt_bb_ca", "xt_local_latents", "token_type", "secondary_structure", "atomic_element"),
            feats_cond_seq=("time_emb_bb_ca", "time_emb_local_latents", "cath_code", "recycle_remaining"),
            feats_pair_repr=("xt_bb_ca_pair_dists", "token_bond_path_length"),
            feats_pair_cond=("time_emb_bb_ca", "time_emb_local_latents"),
            tri_mult_c=16,
            num_sequence_classes=8,
        ),
        case(
            "RFD4ProteinaAutoencoder",
            proteina_autoencoder,
            atom37_mask=[[True] * 37] * 8,
            allowed_residue_types=[[True] * 8] * 7,
            latent_dim=4,
            n_residue_types=8,
            nlayers=1,
            token_dim=32,
            nheads=2,
            dim_cond=16,
            pair_repr_dim=16,
            token_type_emb_dim=8,
            encoder_feats_seq=("token_type", "x1_a37coors_nm", "atom37_element_charge_embedding"),
        ),
        case("ReduxImageEncoder", lambda m: m(randn(1, 5, 24)), redux_dim=24, txt_in_features=32),
        case("Ideogram4PromptEnhancerHead", lambda m: m(randn(1, 5, 32)), hidden_size=32, vocab_size=48),
        case(
            "pipelines.ltx.modeling_latent_upsampler.LTXLatentUpsamplerModel",
            lambda m: m(randn(1, 4, 2, 4, 4)),
            in_channels=4,
            mid_channels=32,
            num_blocks_per_stage=1,
        ),
        case(
            "pipelines.ltx2.latent_upsampler.LTX2LatentUpsamplerModel",
            lambda m: m(randn(1, 4, 2, 4, 4)),
            in_channels=4,
            mid_channels=32,
            num_blocks_per_stage=1,
        ),
        case(
            "pipelines.ltx2.connectors.LTX2TextConnectors",
            lambda m: m(randn(1, 8, 96), ones(1, 8)),
            caption_channels=32,
            text_proj_in_factor=3,
            video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=16,
            video_connector_num_layers=1,
            video_connector_num_learnable_registers=4,
            audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=16,
            audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=4,
            connector_rope_base_seq_len=16,
        ),
        case(
            "pipelines.ltx2.duration_head.LTX2DurationHead",
            lambda m: m(randn(1, 7, 32), randn(1, 7, 24)),
            video_cross_attention_dim=32,
            audio_cross_attention_dim=24,
            pooler_hidden_dim=16,
            num_pooler_heads=2,
            mlp_hidden_dim=16,
        ),
        case("pipelines.ltx2.vocoder.LTX2Vocoder", lambda m: m(randn(1, 2, 6, 4)), **VOCODER),
        case(
            "pipelines.ltx2.vocoder.LTX2VocoderWithBWE",
            lambda m: m(randn(1, 2, 6, 4)),
            **VOCODER,
            **{f"bwe_{name}": value for name, value in VOCODER.items()},
            filter_length=16,
            hop_length=4,
            window_length=16,
            num_mel_channels=4,
            output_sampling_rate=32000,
        ),
        case(
            "pipelines.shap_e.renderer.MLPNeRSTFModel",
            lambda m: vars(m(position=randn(1, 5, 3), direction=randn(1, 5, 3), ts=randn(1, 5, 1))),
            d_hidden=16,
            n_hidden_layers=2,
            insert_direction_at=1,
        ),
        case(
            "pipelines.shap_e.renderer.ShapEParamsProjModel",
            lambda m: m(randn(1, 24, 16)),
            param_names=("nerstf.mlp.0.weight", "nerstf.mlp.1.weight"),
            param_shapes=((8, 93), (16, 8)),
            d_latent=16,
        ),
        case(
            "pipelines.shap_e.renderer.ShapERenderer",
            shape_views,
            leave={"mlp.*": "each call writes its weights anew, through state_dict()"},
            param_names=("nerstf.mlp.0.weight",),
            param_shapes=((16, 93),),
            d_latent=16,
            d_hidden=16,
            n_hidden_layers=2,
            insert_direction_at=1,
        ),
        case(
            "StableAudioProjectionModel",
            lambda m: m(randn(1, 7, 24), at(1), at(9)),
            text_encoder_dim=24,
            conditioning_dim=32,
            min_value=0,
            max_value=16,
        ),
        case("StableAudio3DurationEmbedder", lambda m: m(at(9)), output_dim=24, fourier_dim=16),
        case(
            "pipelines.stable_diffusion.clip_image_project_model.CLIPImageProjection",
            lambda m: m(randn(1, 24)),
            hidden_size=24,
        ),
    ]
)
