"""timm's models in small: at least one of every module of `timm.models`, and one for each mechanism."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from timm.utils.model import reparameterize_model
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model by name, keywords that make it small, the side of its square input, and whether its branches are merged
    into the form that inference uses before it is quantized."""

    name: str
    size: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    merged: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, reparameterised" * self.merged or self.name

    @property
    def family(self) -> str:
        return timm.models._registry._model_to_module[self.name]

    def build(self) -> nn.Module:
        model = timm.create_model(self.name, **{"num_classes": 10} | self.kwargs)
        return reparameterize_model(model) if self.merged else model

    def run(self, model: nn.Module) -> Tensor:
        generator = torch.Generator().manual_seed(4)
        return model(torch.randn(2, self.kwargs.get("in_chans", 3), self.size, self.size, generator=generator))


def case(name: str, size: int = 64, *, merged: bool = False, **kwargs: Any) -> Case:
    return Case(name, size, kwargs, merged)


def sized(name: str, size: int = 64, **kwargs: Any) -> Case:
    """One whose constructor has to know the size."""
    return Case(name, size, {"img_size": size} | kwargs)


#: what a plain ViT is made small with
VIT: dict[str, Any] = {"embed_dim": 48, "depth": 2, "num_heads": 3}

#: plain transformers: fused qkv, weights that are only read (EVA, BEiT, Swin V2), position biases, poolings
TRANSFORMERS = [
    sized("beit_base_patch16_224", **VIT),
    sized("beitv2_base_patch16_224", **VIT),
    sized("cait_xxs24_224", **VIT),
    sized("coat_tiny", embed_dims=(24, 24, 24, 24), serial_depths=(1, 1, 1, 1)),
    sized("coat_lite_tiny", embed_dims=(16, 24, 32, 48), serial_depths=(1, 1, 1, 1)),
    sized("convit_tiny", embed_dim=48, num_heads=3, depth=3, local_up_to_layer=2),
    sized("crossvit_9_240", 120, embed_dim=(24, 48), num_heads=(3, 6), depth=((1, 1, 0), (1, 1, 0))),
    sized("crossvit_9_dagger_240", 120, embed_dim=(24, 48), num_heads=(3, 6), depth=((1, 1, 0), (1, 1, 0))),
    sized("deepseek_vit_412m", 84, embed_dim=48, depth=2, num_heads=3),
    sized("deepseek_vit_412m_align", 84, embed_dim=48, depth=2, num_heads=3),
    sized("deit_tiny_patch16_224", **VIT),
    sized("deit_tiny_distilled_patch16_224", **VIT),
    sized("deit3_small_patch16_224", **VIT),
    sized("eva02_tiny_patch14_224", 56, **VIT),
    sized("eva_giant_patch14_224", 56, **VIT),
    sized("vit_base_patch16_rope_mixed_224", **VIT),
    sized("vit_small_patch16_dinov3", **VIT),
    sized("vit_pe_core_tiny_patch16_384", **VIT),
    sized("gemma4_vit_167m", 96, embed_dim=48, depth=2, num_heads=3, head_dim=16, intermediate_size=96),
    sized("qwen3_vit_88m", embed_dim=48, depth=2, num_heads=3),
    sized("qwen3_vit_88m_merge", embed_dim=48, depth=2, num_heads=3),
    sized("naflexvit_base_patch16_gap", **VIT),
    sized("naflexvit_base_patch16_map", **VIT),
    sized("naflexvit_base_patch16_parfac_gap", **VIT),
    sized("pit_ti_224", base_dims=(16, 16, 16), depth=(1, 1, 1)),
    sized("pit_ti_distilled_224", base_dims=(16, 16, 16), depth=(1, 1, 1)),
    sized("tnt_s_patch16_224", embed_dim=48, inner_dim=12, depth=2, num_heads_outer=3),
    sized("test_vit"),
    sized("test_vit2"),
    sized("test_vit3"),
    sized("test_vit4"),
    sized("aimv2_large_patch14_224", 56, **VIT),
    sized("vit_base_patch16_18x2_224", **VIT),
    sized("vit_base_patch16_clip_224", **VIT),
    sized("vit_base_patch16_siglip_224", **VIT),
    sized("vit_small_patch14_reg4_dinov2", 56, **VIT),
    sized("vit_small_r26_s32_224", **VIT),
    sized("vit_base_mci_224", depth=1),
    sized("vit_tiny_r_s16_p8_224", **VIT),
    sized("test_vit_relpos"),
    sized("vit_relpos_small_patch16_rpn_224", **VIT),
    sized("vit_srelpos_small_patch16_224", **VIT),
    sized("samvit_base_patch16_224", **VIT, neck_chans=16, global_attn_indexes=(1,)),
    sized("samvit_base_patch16", **VIT, neck_chans=16, global_attn_indexes=(1,)),
    sized("xcit_nano_12_p16_224", embed_dim=48, depth=2, num_heads=4),
    sized("volo_d1_224"),
]

#: transformers in stages: windows, shifts, masks, biases and tables that no file holds
HIERARCHICAL = [
    case("davit_tiny", depths=(1, 1), embed_dims=(24, 48), num_heads=(2, 4)),
    case("davit_base_fl", depths=(1, 1), embed_dims=(24, 48), num_heads=(2, 4)),
    case("focalnet_tiny_srf"),
    case("focalnet_tiny_lrf", use_overlap_down=True, use_post_norm_in_modulation=True),
    sized("gcvit_xxtiny"),
    sized("hiera_tiny_224", embed_dim=24, stages=(1, 1, 1, 1)),
    sized("hiera_small_abswin_256", embed_dim=24, stages=(1, 1, 1, 1)),
    case("hieradet_small", embed_dim=24, stages=(1, 1, 1, 1)),
    case("sam2_hiera_tiny", embed_dim=24, stages=(1, 1, 1, 1)),
    sized("levit_128s"),
    sized("levit_conv_128s"),
    sized("levit_256d"),
    sized("test_coatnet"),
    sized("coatnext_nano_rw_224"),
    sized("coatnet_rmlp_nano_rw_224"),
    sized("test_maxvit"),
    sized("maxvit_rmlp_pico_rw_256"),
    sized("maxvit_tiny_tf_224"),
    sized("maxxvit_rmlp_nano_rw_256"),
    sized("maxxvitv2_nano_rw_256"),
    case("caformer_s18"),
    case("convformer_s18"),
    case("poolformer_s12"),
    case("poolformerv2_s12"),
    sized("mvitv2_tiny"),
    sized("mvitv2_small_cls"),
    sized("nest_tiny"),
    sized("nest_tiny_jx"),
    case("nextvit_small", depths=(1, 1, 5, 1)),
    case("pvt_v2_b0", depths=(1, 1, 1, 1)),
    case("pvt_v2_b2_li", depths=(1, 1, 1, 1), embed_dims=(16, 32, 80, 64)),
    sized("swin_tiny_patch4_window7_224", 56, embed_dim=24, depths=(2, 2), num_heads=(2, 4)),
    sized("swin_s3_tiny_224", embed_dim=24, depths=(1, 1, 1, 1), num_heads=(2, 2, 4, 4)),
    sized("swinv2_tiny_window8_256", embed_dim=32, depths=(2, 2), num_heads=(2, 4)),
    sized("swinv2_cr_tiny_224", embed_dim=24, depths=(2, 2), num_heads=(2, 4)),
    sized("swinv2_cr_tiny_ns_224", embed_dim=24, depths=(2, 2), num_heads=(2, 4)),
    case("tiny_vit_5m_224", depths=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32), num_heads=(1, 2, 2, 2)),
    sized("twins_pcpvt_small", embed_dims=(16, 32, 32, 64), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4)),
    sized("twins_svt_small", embed_dims=(16, 32, 32, 64), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4)),
    sized("visformer_tiny"),
    sized("vitamin_small_224"),
]

#: convolutions and attention mixed, for phones above all; merged: branches that become one convolution
HYBRIDS = [
    case("botnet26t_256", 128, img_size=128),
    case("halonet26t", 256),
    case("lambda_resnet26t", 128),
    case("sehalonet33ts", 256),
    case("lambda_resnet26rpt_256", 128, img_size=128),
    case("lamhalobotnet50ts_256", 128, img_size=128),
    case("cpubone_nano"),
    case("cpubone_b1_dwnorm"),
    case("csatv2", 128),
    case("edgenext_xx_small"),
    case("efficientformer_l1", 224, depths=(1, 1, 1, 2), embed_dims=(16, 24, 32, 48)),
    sized("efficientformerv2_s0"),
    case("efficientvim_m1"),
    case("efficientvim_m1_dist"),
    case("efficientvit_b0"),
    case("efficientvit_l1"),
    sized("efficientvit_m0"),
    case("fastvit_t8", layers=(1, 1, 1, 1)),
    case("fastvit_t8", layers=(1, 1, 1, 1), merged=True),
    case("fastvit_sa12", layers=(1, 1, 1, 1)),
    case("fastvit_mci0", layers=(1, 1, 1, 1)),
    case("fastvit_mci0", layers=(1, 1, 1, 1), merged=True),
    case("iformer_t"),
    case("iformer_m_distilled"),
    case("iformer_t", merged=True),
    case("lowformer_b0"),
    case("lowformer_e1"),
    case("mobilevit_xxs"),
    case("mobilevitv2_050"),
    case("repvit_m0_9"),
    case("repvit_m0_9", merged=True),
    case("repvit_m1"),
    case("sequencer2d_s", layers=(1, 1, 1, 1), embed_dims=(24, 48, 48, 48), hidden_sizes=(8, 12, 12, 12)),
    case("shvit_s1"),
    case("shvit_s1", merged=True),
    case("swiftformer_xs"),
]

#: convolutional networks
CONVOLUTIONAL = [
    case("test_byobnet"),
    case("bat_resnext26ts", 256),
    case("gcresnet33ts"),
    case("gernet_s"),
    case("mobileone_s0"),
    case("mobileone_s0", merged=True),
    case("regnetz_b16"),
    case("repvgg_a0"),
    case("repvgg_a0", merged=True),
    case("resnet50_clip", 64, img_size=64),
    case("resnet50_mlp"),
    case("convmixer_768_32", 28),
    case("test_convnext"),
    case("test_convnext2"),
    case("test_convnext3"),
    case("convnext_atto_rms", depths=(1, 1, 1, 1)),
    case("convnext_tiny_hnf", depths=(1, 1, 1, 1), dims=(16, 32, 48, 64)),
    case("convnextv2_atto", depths=(1, 1, 1, 1)),
    case("cspresnet50"),
    case("cs3darknet_focus_s"),
    case("darknet17"),
    case("cspnext_tiny"),
    case("densenet121", block_config=(2, 2, 2, 2)),
    case("densenetblur121d", block_config=(2, 2, 2, 2)),
    case("dla46_c"),
    case("dla60_res2net"),
    case("dpn48b"),
    case("dpn68"),
    case("test_efficientnet"),
    case("test_efficientnet_gn"),
    case("test_efficientnet_ln"),
    case("test_efficientnet_evos"),
    case("tf_efficientnet_lite0"),
    case("tf_efficientnetv2_b0"),
    case("efficientnet_cc_b0_4e"),
    case("efficientnet_es"),
    case("mixnet_s"),
    case("tf_mixnet_s"),
    case("mnasnet_small"),
    case("mobilenetv2_035"),
    case("fbnetc_100"),
    case("spnasnet_100"),
    case("tinynet_e"),
    case("mobilenet_edgetpu_v2_xs"),
    case("fasternet_t0"),
    case("ghostnet_050"),
    case("ghostnetv2_100"),
    case("ghostnetv3_050"),
    case("ghostnetv3_050", merged=True),
    case("hardcorenas_a"),
    case("hgnet_tiny"),
    case("hgnetv2_b0"),
    case("hrnet_w18_small"),
    case("inception_next_atto"),
    case("inception_resnet_v2", 96),
    case("inception_v3", 96),
    case("inception_v4", 96),
    case("lcnetv2_small"),
    case("lcnetv2_small", merged=True),
    case("test_mambaout"),
    case("mambaout_femto", depths=(1, 1, 1, 1)),
    sized("mixer_s32_224"),
    sized("gmixer_12_224"),
    sized("gmlp_ti16_224"),
    sized("resmlp_12_224"),
    case("mobilenetv3_small_050"),
    case("tf_mobilenetv3_small_minimal_100"),
    case("fbnetv3_b"),
    case("lcnet_035"),
    case("mobilenetv4_conv_small_035"),
    case("mobilenetv4_conv_blur_medium"),
    case("mobilenetv4_hybrid_medium_075"),
    case("mobilenetv5_base", channel_multiplier=0.25),
    case("nasnetalarge", 96, num_features=384, stem_size=16),
    case("test_nfnet"),
    case("nfnet_l0"),
    case("dm_nfnet_f0"),
    case("nf_regnet_b0"),
    case("nf_resnet26"),
    case("eca_nfnet_l0"),
    case("pnasnet5large", 96),
    case("rdnet_tiny", growth_rates=(16,) * 7, num_blocks_list=(1,) * 7, num_init_features=16),
    case("regnetx_002"),
    case("regnety_002"),
    case("regnetz_005"),
    case("regnetv_040"),
    case("repghostnet_050"),
    case("repghostnet_050", merged=True),
    case("res2net50_14w_8s"),
    case("resnest14d"),
    case("resnest50d_4s2x40d"),
    case("test_resnet"),
    case("resnet18"),
    case("ecaresnet26t"),
    case("seresnext26d_32x4d"),
    case("resnetblur18"),
    case("skresnet18"),
    case("resnetv2_18"),
    case("resnetv2_50x1_bit"),
    case("resnetv2_50d_evos", layers=(1, 1, 1, 1)),
    case("rexnet_100"),
    case("rexnetr_100"),
    case("selecsls42"),
    case("legacy_seresnet18"),
    case("legacy_seresnext26_32x4d"),
    case("starnet_s050"),
    case("tresnet_m"),
    case("vgg11", mlp_ratio=0.03125),
    case("vgg11_bn", mlp_ratio=0.03125),
    case("vovnet39a"),
    case("ese_vovnet19b_slim_dw"),
    case("legacy_xception"),
    case("xception41"),
    case("xception41p"),
]

CASES = [*TRANSFORMERS, *HIERARCHICAL, *HYBRIDS, *CONVOLUTIONAL]

#: models that can't be built or run at all, and why
NOT_RUN: dict[str, str] = {}
