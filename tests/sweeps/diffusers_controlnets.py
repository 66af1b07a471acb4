"""ControlNets and adapters of diffusers, small."""

import torch

from tests.sweeps.diffusers_cases import Case, at, case, family, ints, model_class, ones, randn
from tests.sweeps.diffusers_images import (
    FLUX,
    HUNYUAN_DIT,
    IMAGES,
    QWEN,
    SANA,
    SD3,
    Z_IMAGE,
    hunyuan_texts,
    ids,
)
from tests.sweeps.diffusers_unets import CROSS, MOTION

CONTROL = {
    **{k: v for k, v in CROSS.items() if k != "up_block_types"},
    "conditioning_embedding_out_channels": (8, 16),
}
ADAPTER = {"channels": [16, 32], "num_res_blocks": 1, "downscale_factor": 2}


CONTROLNETS = dict(
    [
        case("ControlNetModel", lambda m: m(randn(1, 4, 8, 8), 5, randn(1, 7, 32), randn(1, 3, 16, 16)), **CONTROL),
        case(
            "ControlNetUnionModel",
            lambda m: m(
                randn(1, 4, 8, 8), 5, randn(1, 7, 32), [randn(1, 3, 16, 16)], torch.tensor([[0, 1, 0, 0, 0, 0]]), [1]
            ),
            **CONTROL,
            num_trans_channel=32,
            num_trans_head=4,
            num_proj_channel=32,
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=48,
        ),
        case(
            "SparseControlNetModel",
            lambda m: m(
                randn(1, 4, 2, 8, 8),
                5,
                randn(2, 7, 32),
                randn(1, 4, 2, 8, 8),
                conditioning_mask=ones(1, 1, 2, 8, 8),
            ),
            **{k: v for k, v in MOTION.items() if k != "up_block_types"},
            conditioning_embedding_out_channels=(8, 16),
        ),
        case(
            "UNetControlNetXSModel",
            lambda m: m(randn(1, 4, 8, 8), 5, randn(1, 7, 32), randn(1, 3, 16, 16)),
            **{k: v for k, v in CROSS.items() if k not in ("layers_per_block", "attention_head_dim")},
            num_attention_heads=4,
            ctrl_conditioning_embedding_out_channels=(8, 16),
            ctrl_block_out_channels=(8, 16),
            ctrl_num_attention_heads=2,
            ctrl_max_norm_num_groups=4,
        ),
        case(
            "CosmosControlNetModel",
            lambda m: m(
                randn(1, 4, 1, 8, 8),
                randn(1, 4, 1, 8, 8),
                at(0.5),
                (randn(1, 7, 32), randn(1, 7, 32)),
                ones(1, 1, 1, 8, 8),
                padding_mask=ones(1, 1, 8, 8),
            ),
            n_controlnet_blocks=1,
            in_channels=14,
            latent_channels=6,
            model_channels=32,
            num_attention_heads=2,
            attention_head_dim=16,
            text_embed_dim=32,
            adaln_lora_dim=4,
            max_size=(4, 16, 16),
            img_context_dim_in=32,
            img_context_dim_out=32,
        ),
        case(
            "FluxControlNetModel",
            lambda m: m(
                randn(1, 16, 16),
                randn(1, 16, 16),
                ints(3, 1, 1),
                1.0,
                randn(1, 7, 32),
                randn(1, 24),
                at(0.5),
                ids(4),
                torch.zeros(7, 3),
                at(3.5),
            ),
            **FLUX,
            pooled_projection_dim=24,
            guidance_embeds=True,
            num_mode=4,
        ),
        case(
            "HunyuanDiT2DControlNetModel",
            lambda m: m(
                randn(2, 4, 8, 8),
                at(5, 9),
                randn(2, 4, 8, 8),
                **hunyuan_texts(),
            ),
            **HUNYUAN_DIT,
            transformer_num_layers=4,
        ),
        case(
            "QwenImageControlNetModel",
            lambda m: m(randn(1, 16, 16), randn(1, 16, 16), 1.0, randn(1, 7, 32), ones(1, 7), at(0.5), [[(1, 4, 4)]]),
            **QWEN,
        ),
        case(
            "SanaControlNetModel",
            lambda m: m(randn(1, 4, 8, 8), randn(1, 7, 24), at(5), randn(1, 4, 8, 8)),
            **SANA,
        ),
        case(
            "SD3ControlNetModel",
            lambda m: m(randn(1, 4, 8, 8), randn(1, 4, 8, 8), 1.0, randn(1, 7, 32), randn(1, 24), at(5)),
            **SD3,
        ),
    ]
)


def several(name, one, run, count=2):
    """A model that is a list of another case's models."""
    return family(name), Case(lambda: model_class(name)([CONTROLNETS[one].build() for _ in range(count)]), run)


def z_image_control():
    """It shares most of its modules with the transformer that it steers."""
    control = model_class("ZImageControlNetModel")(control_layers_places=[0], control_in_dim=4, **Z_IMAGE)
    return control.from_transformer(control, IMAGES["ZImageTransformer2DModel"].build())


def unions():
    kinds = torch.tensor([[0, 1, 0, 0, 0, 0]])
    return [[randn(1, 3, 16, 16)]] * 2, [kinds] * 2, [[1]] * 2, [1.0, 0.5]


CONTROLNETS |= dict(
    [
        (
            "ZImageControlNetModel",
            Case(z_image_control, lambda m: m([randn(4, 1, 8, 8)], at(0.5), [randn(7, 24)], [randn(4, 1, 8, 8)])),
        ),
        several(
            "MultiControlNetModel",
            "ControlNetModel",
            lambda m: m(
                randn(1, 4, 8, 8), 5, randn(1, 7, 32), [randn(1, 3, 16, 16)] * 2, [1.0, 0.5], return_dict=False
            ),
        ),
        several(
            "models.controlnets.multicontrolnet_union.MultiControlNetUnionModel",
            "ControlNetUnionModel",
            lambda m: m(randn(1, 4, 8, 8), 5, randn(1, 7, 32), *unions(), return_dict=False),
        ),
        several(
            "FluxMultiControlNetModel",
            "FluxControlNetModel",
            lambda m: m(
                randn(1, 16, 16),
                [randn(1, 16, 16)] * 2,
                [ints(3, 1)] * 2,
                [1.0, 0.5],
                randn(1, 7, 32),
                randn(1, 24),
                at(0.5),
                ids(4),
                torch.zeros(7, 3),
                at(3.5),
                return_dict=False,
            ),
        ),
        several(
            "HunyuanDiT2DMultiControlNetModel",
            "HunyuanDiT2DControlNetModel",
            lambda m: m(
                randn(2, 4, 8, 8),
                at(5, 9),
                [randn(2, 4, 8, 8)] * 2,
                [1.0, 0.5],
                **hunyuan_texts(),
                return_dict=False,
            ),
        ),
        several(
            "QwenImageMultiControlNetModel",
            "QwenImageControlNetModel",
            lambda m: m(
                randn(1, 16, 16),
                [randn(1, 16, 16)] * 2,
                [1.0, 0.5],
                randn(1, 7, 32),
                ones(1, 7),
                at(0.5),
                [[(1, 4, 4)]],
                return_dict=False,
            ),
            count=1,
        ),
        several(
            "SD3MultiControlNetModel",
            "SD3ControlNetModel",
            lambda m: m(
                randn(1, 4, 8, 8),
                [randn(1, 4, 8, 8)] * 2,
                [1.0, 0.5],
                randn(1, 24),
                randn(1, 7, 32),
                at(5),
                return_dict=False,
            ),
        ),
        case("T2IAdapter", lambda m: m(randn(1, 3, 16, 16)), **ADAPTER),
        case("T2IAdapter/light", lambda m: m(randn(1, 3, 16, 16)), **ADAPTER, adapter_type="light_adapter"),
    ]
)
CONTROLNETS |= dict([several("MultiAdapter", "T2IAdapter", lambda m: m([randn(1, 3, 16, 16)] * 2))])
