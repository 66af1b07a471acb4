"""The FP8 layers and which float layer each one replaces."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from anyfp8.layers.conv import FP8Conv1d, FP8Conv2d, FP8Conv3d
from anyfp8.layers.embedding import FP8Embedding
from anyfp8.layers.linear import FP8Linear
from anyfp8.layers.mixin import FP8Layer, is_own_forward
from anyfp8.layers.parametrized import DecodedParameter, Part, parametrize_codes, quantized_part, unparametrize

__all__ = [
    "LAYERS",
    "DecodedParameter",
    "FP8Conv1d",
    "FP8Conv2d",
    "FP8Conv3d",
    "FP8Embedding",
    "FP8Layer",
    "FP8Linear",
    "Part",
    "is_hf_conv1d",
    "parametrize_codes",
    "quantized_part",
    "register_layer",
    "replacement",
    "unparametrize",
]

_REGISTRY: dict[type[nn.Module], type[FP8Layer]] = {
    nn.Linear: FP8Linear,
    NonDynamicallyQuantizableLinear: FP8Linear,  # torch's own subclass; it adds no forward
    nn.Conv1d: FP8Conv1d,
    nn.Conv2d: FP8Conv2d,
    nn.Conv3d: FP8Conv3d,
    nn.Embedding: FP8Embedding,
}
#: exact float type → its FP8 layer
LAYERS: Mapping[type[nn.Module], type[FP8Layer]] = MappingProxyType(_REGISTRY)


def register_layer(float_type: type[nn.Module], fp8_type: type[FP8Layer]) -> None:
    """Let `fp8_type` replace modules of exactly `float_type`; a type that is taken is a ValueError."""
    if float_type in _REGISTRY:
        raise ValueError(f"{float_type.__name__} already has {_REGISTRY[float_type].__name__}")
    _REGISTRY[float_type] = fp8_type


def is_hf_conv1d(module: nn.Module) -> bool:
    """Is it exactly transformers' Conv1D, whose weight is [in, out]? Told by its name: transformers isn't imported."""
    return (type(module).__module__, type(module).__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def forward_replaced(module: nn.Module) -> bool:
    """Was its forward replaced on the instance? (accelerate leaves the bound method there when its hooks go.)"""
    forward = module.__dict__.get("forward")
    return forward is not None and not is_own_forward(module, forward)


def replacement(module: nn.Module) -> tuple[type[FP8Layer] | None, str]:
    """The FP8 layer that can stand in for `module`, or None and the reason why none can."""
    if isinstance(module, FP8Layer):  # already FP8: loaded over
        return type(module), ""
    if forward_replaced(module):
        return None, "its forward was replaced on the instance"
    if is_hf_conv1d(module) and type(module) not in LAYERS:
        from anyfp8.layers.hf_conv1d import FP8HFConv1D

        register_layer(type(module), FP8HFConv1D)
    if type(module) not in LAYERS:
        base = next((t for t in type(module).__mro__ if t in LAYERS), None)
        if base is not None and type(module) is not base:
            own = type(module).__bases__[0] if parametrize.is_parametrized(module) else type(module)
            if own is base:
                return None, "its weight is computed, by weight norm or another parametrization"
            return None, f"{own.__name__} is a subclass of {base.__name__} that may compute something else"
        return None, f"{type(module).__name__} is no layer type that has an FP8 version"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return None, "an Embedding with max_norm rewrites its table at each call"
    return LAYERS[type(module)], ""
