"""`StackedWeight`: what reading a stack of FP8 experts gives; `weight[i]` decodes that expert alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from anyfp8.layers.readonly import asked, read_only

#: what is answered from shape, dtype and device, without decoding anything
_QUESTIONS = {
    *("size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex", "__len__"),
    *("element_size", "get_device", "__repr__", "ndimension", "shape", "dtype", "device", "ndim", "layout", "is_cuda"),
    *("is_meta", "requires_grad", "itemsize", "is_leaf"),
}


class Stack(Protocol):
    """What holds the codes."""

    @property
    def weight_codes(self) -> Tensor:
        """On the device that values shall be on."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """[experts, rows, columns]."""

    def decoded(self, dtype: torch.dtype, index: int | None = None) -> Tensor:
        """All values, or one expert's."""


class StackedWeight(Tensor):
    """A tensor [experts, rows, columns] that has no values until it is used, and then only those that are needed.

    `weight[i]` decodes one expert. Anything else decodes the whole stack. Writing to it raises.
    """

    _stack: Stack

    @staticmethod
    def __new__(cls: Any, stack: Stack, dtype: torch.dtype) -> StackedWeight:
        """A view of the stack in this dtype."""
        device = stack.weight_codes.device
        self = Tensor._make_wrapper_subclass(cls, stack.weight_shape, dtype=dtype, device=device)
        self._stack = stack
        return cast(StackedWeight, self)

    def __init__(self, stack: Stack, dtype: torch.dtype) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Answer what needs no values; decode one expert for an index; else decode all and go on with that."""
        if asked(func) in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[0], StackedWeight) and _is_index(args[1]):
            return read_only(args[0]._stack.decoded(args[0].dtype, int(args[1])))
        args, kwargs = pytree.tree_map_only(StackedWeight, StackedWeight.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """For what comes past `__torch_function__`: decode all."""
        args, kwargs = pytree.tree_map_only(StackedWeight, StackedWeight.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def whole(self) -> Tensor:
        """All experts, decoded; read-only."""
        return read_only(self._stack.decoded(self.dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain copy of all."""
        return self.whole().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, it is a plain tensor."""
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _is_index(index: Any) -> bool:
    """One expert's: a number, or a tensor that holds one (not a bool, which is a mask)."""
    if isinstance(index, Tensor):
        return index.dim() == 0 and index.dtype != torch.bool and not index.dtype.is_floating_point
    return isinstance(index, int) and not isinstance(index, bool)
