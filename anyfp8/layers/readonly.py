"""The tensor that `layer.weight` returns: reads like any tensor, raises on writes (they would be lost)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anyfp8.errors import ReadOnlyWeightError

_WRITES = {
    "__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__imatmul__",
}  # fmt: skip


def refuse_write(what: str) -> ReadOnlyWeightError:
    """The error for a write to a decoded weight."""
    return ReadOnlyWeightError(
        f"{what} would be lost: this is the decoded copy of an FP8 weight. "
        "Call anyfp8.dequantize(model) first to get ordinary layers with writable weights."
    )


class DecodedWeight(Tensor):
    """A decoded copy of an FP8 layer's weight. In-place operations on it, or on views of it, raise."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` on plain tensors; refuse it if it would write to a decoded weight."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        in_place = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        if (in_place and name != "requires_grad_" and args and isinstance(args[0], cls)) or _has(kwargs.get("out")):
            what = "Assigning to .data or .grad of this weight" if name == "__set__" else f"{name} on this weight"
            raise refuse_write(what)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if isinstance(out, Tensor) and not isinstance(out, DecodedWeight) and _shares_memory(out, args):
            return out.as_subclass(DecodedWeight)  # a view or .data: writing through it would be lost as well
        return out


def _has(out: Any) -> bool:
    return isinstance(out, DecodedWeight) or (isinstance(out, (tuple, list)) and any(map(_has, out)))


def _shares_memory(out: Tensor, args: Sequence[Any]) -> bool:
    def pointer(t: Tensor) -> int | None:
        return t.untyped_storage().data_ptr() if t.device.type != "meta" and t.numel() else None

    return any(isinstance(a, DecodedWeight) and pointer(a) is not None and pointer(a) == pointer(out) for a in args)


def read_only(weight: Tensor) -> Tensor:
    """Mark a freshly decoded weight as read-only; inside a compiled graph there is nobody to protect, so not there."""
    return weight if torch.compiler.is_compiling() else weight.as_subclass(DecodedWeight)
