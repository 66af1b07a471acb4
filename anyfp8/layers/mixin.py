"""`FP8Layer`: what all FP8 layers share. Each subclasses the float layer it replaces, in a small file of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from anyfp8.backends import Backend, DeviceInfo, select
from anyfp8.errors import BackendError
from anyfp8.layers.readonly import read_only, refuse_write
from anyfp8.layers.storage import STORED, FP8Storage
from anyfp8.numerics import FORMATS, quantize_tiled
from anyfp8.scheme import QuantizationScheme

L = TypeVar("L", bound="FP8Layer")

#: what of a module's __dict__ is its own and not taken over by its twin (torch's compiled call is bound to the old one)
_OWN = (
    "_parameters",
    "_buffers",
    "_modules",
    "scheme",
    "compute_dtype",
    "float_type",
    "backend",
    "refusals",
    "_compiled_call_impl",
)


def leaf_in_fx(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let torch.fx trace an FP8 layer's forward as one `call_module`, as it does with torch's own layers."""

    @wraps(forward)
    def traced(self: FP8Layer, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, Proxy):
            tracer: Any = x.tracer
            node: Tensor = tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
            return node
        return forward(self, *args, **kwargs)

    return traced


class FP8Layer(FP8Storage):
    """Mixin before `nn.Linear`, `nn.Conv2d` ...: codes in place of `weight`, which becomes a read-only property.

    Instances come from `from_codes` or `from_float`, never from the constructor.
    """

    #: True if the float layer's weight is [in, out]; codes and scales are [out, in] all the same
    transposed: ClassVar[bool] = False
    #: exactly the type that it replaced
    float_type: type[nn.Module]
    backend: Backend
    #: backends that were tried before the chosen one, and why they were not taken
    refusals: dict[str, str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Called as the float layer's constructor, it is that: PEFT makes LoRA convolutions as `type(layer)(...)`."""
        if not args and not kwargs:
            return super().__new__(cls)
        return next(t for t in cls.__mro__ if not issubclass(t, FP8Storage))(*args, **kwargs)

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is made from a float layer: use .from_float(...) or .from_codes(...)")

    @classmethod
    def from_codes(
        cls: type[L],
        module: nn.Module,
        scheme: QuantizationScheme,
        values: Mapping[str, Tensor | None],
        *,
        dtype: torch.dtype | None = None,
    ) -> L:
        """An FP8 twin of `module` (strides, bias, hooks, mode and other attributes are taken over, not copied).

        values: `weight_codes` (uint8, [out, in, ...], packed for FP6 and FP4), `weight_scale` (float32, shape
        `grid_shape(shape, scheme.tile)`), and as the scheme needs them `input_scale` (float32 (1,)),
        `weight_zero_point`, `input_zero_point`, `output_scale`. dtype: what `weight` decodes to; default the module's.
        """
        self = cast(L, cls.__new__(cls))
        nn.Module.__init__(self)
        _take_over(self, module)
        self.float_type = module.float_type if isinstance(module, FP8Layer) else type(module)
        if dtype is None:  # an FP8 layer may itself be loaded over
            dtype = module.compute_dtype if isinstance(module, FP8Layer) else module.get_parameter("weight").dtype
        self._store(scheme, values, dtype)
        self.select_backend("auto")
        return self

    @classmethod
    def from_float(cls: type[L], module: nn.Module, scheme: QuantizationScheme, input_scale: Tensor | None = None) -> L:
        """Quantize a float layer's weight with one scale per tile; `input_scale` (float32) is needed if static."""
        weight: Tensor = module.get_parameter("weight")
        scheme = scheme.for_rank(weight.dim())
        if scheme.needs_input_scale == (input_scale is None):
            raise ValueError("a static scheme needs an input_scale, and only a static one does")
        weight = weight.t() if cls.transposed else weight
        codes, scale = quantize_tiled(weight, scheme.weight_dtype, scheme.tile)
        static = None if input_scale is None else input_scale.detach().float().reshape(1)
        values = {"weight_codes": codes.view(torch.uint8), "weight_scale": scale, "input_scale": static}
        return cls.from_codes(module, scheme, values)

    def to_float(self, weight: Tensor) -> nn.Module:
        """The ordinary layer that this one replaced, with this float weight; shares bias and hooks."""
        plain = self.float_type.__new__(self.float_type)
        nn.Module.__init__(plain)
        plain.register_parameter("weight", weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight))
        _take_over(plain, self)
        return plain

    def select_backend(self, name: str) -> None:
        """Choose how this layer computes; raises BackendError, with the reason, if it can't compute that way."""
        backend, refusals = self.candidate(name)
        if backend is None:
            raise BackendError(f"backend {name!r} can't run this layer", {type(self).__name__: refusals[name]})
        self.backend, self.refusals = backend, refusals

    def candidate(self, name: str) -> tuple[Backend | None, dict[str, str]]:
        """What `select_backend` would choose, or None, and the refusals on the way."""
        return select(name, self.scheme, self.weight_shape, DeviceInfo.of(self.weight_codes.device))

    @property
    def weight(self) -> Tensor:
        """The decoded weight in the compute dtype: a fresh copy at each read, and read-only."""
        decoded = self.decoded(self.compute_dtype)
        return read_only(decoded.t() if self.transposed else decoded)

    @weight.setter
    def weight(self, value: Any) -> None:
        raise refuse_write("Assigning this weight")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's, but a float `weight` is refused."""
        if name == "weight":
            raise refuse_write("Assigning this weight")
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Refused: a quantized layer has no weights to initialise."""
        raise refuse_write("reset_parameters() on this layer")

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The torch dtype that the codes are in."""
        return FORMATS[self.scheme.weight_dtype].dtype

    def extra_repr(self) -> str:
        """The float layer's, then the scheme and the backend."""
        return f"{super().extra_repr()}, {self.scheme}, backend={self.backend.name}"


def is_own_forward(module: nn.Module, forward: Any) -> bool:
    """Is it the bound method `type(module).forward` of this very module?"""
    return getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) is type(module).forward


def _take_over(twin: nn.Module, module: nn.Module) -> None:
    """Everything of `module` but its weight: attributes, hooks, bias, and what else was registered on it."""
    twin.__dict__.update({k: v for k, v in module.__dict__.items() if k not in _OWN})
    if is_own_forward(module, twin.__dict__.get("forward")):  # it would run the old module
        del twin.__dict__["forward"]
    twin._parameters.update({k: v for k, v in module._parameters.items() if k not in ("weight", *STORED)})
    twin._buffers.update({k: v for k, v in module._buffers.items() if k not in ("weight", *STORED)})
    twin._modules.update(module._modules)
