"""The tensor that `layer.weight` returns: reads like any tensor, raises on writes (they would be lost)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
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


def asked(func: Any) -> str:
    """The name of a torch function, or of the tensor's property that is read (`T`, `dtype`)."""
    name = str(getattr(func, "__name__", ""))
    return str(getattr(getattr(func, "__self__", None), "__name__", "")) if name == "__get__" else name


class DecodedWeight(Tensor):
    """A decoded copy of an FP8 layer's weight. In-place operations on it, or on views of it, raise."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` on plain tensors; refuse it if it would write to a decoded weight."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__" and getattr(func, "__self__", None) is Tensor.requires_grad:
            return None  # nothing to freeze, nothing to lose
        in_place = (
            name in _WRITES or (name.endswith("_") and not name.endswith("__")) or _asks_in_place(func, args, kwargs)
        )
        target = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
        if (in_place and name != "requires_grad_" and _has(target)) or _has(kwargs.get("out")):
            what = "Assigning to .data or .grad of this weight" if name == "__set__" else f"{name} on this weight"
            raise refuse_write(what)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        return _marked(out, args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain copy."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, it is a plain tensor, so that `torch.load(weights_only=True)` reads it."""
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _asks_in_place(func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> bool:
    if "inplace" in kwargs:
        return bool(kwargs["inplace"])
    if getattr(func, "__module__", None) != "torch.nn.functional" or not inspect.isfunction(func):
        return False
    place = _inplace_position(func)
    return place is not None and place < len(args) and bool(args[place])


@cache  # a forward that reads the weight comes here each time
def _inplace_position(func: Callable[..., Any]) -> int | None:
    names = list(inspect.signature(func).parameters)
    return names.index("inplace") if "inplace" in names else None


def _marked(out: Any, args: Sequence[Any]) -> Any:
    """Views of a decoded weight are marked as well: writing through them would be lost."""
    if type(out) in (tuple, list):
        return type(out)(_marked(part, args) for part in out)
    if isinstance(out, Tensor) and not isinstance(out, DecodedWeight) and _shares_memory(out, args):
        return out.as_subclass(DecodedWeight)
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
