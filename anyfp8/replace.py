"""Walks and swaps: names of modules and tensors in a module tree, seen through wrappers. Knows nn.Module only."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from anyfp8.errors import AnyFP8Error
from anyfp8.folding import join
from anyfp8.layers import DecodedParameter, FP8Layer, is_hf_conv1d
from anyfp8.layers.storage import STORED

#: child names that torch's wrappers put between a module and its own names
_ALWAYS_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_MODULE_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
#: of a module's __dict__, what holds its own tensors and children
_TENSORS = ("_parameters", "_buffers", "_modules")
_SEGMENT = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


#: why a layer can't be swapped while something is bound to the old one
HOOKED = "its forward was replaced on the instance (a hook of accelerate?): remove that first"


@dataclass(eq=False)
class Slot:
    """One place in the tree where a tensor of a checkpoint can go.

    names: every name it has (shared modules have several), wrappers left out. owner/leaf: where it is stored.
    tensor: what is there now. fp8: what holds its codes, if it is quantized already (`tensor` is the codes then).
    """

    owner: nn.Module
    leaf: str
    tensor: Tensor
    is_buffer: bool
    fp8: FP8Layer | DecodedParameter | None = None
    names: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def transposed(self) -> bool:
        """Is it the weight of a layer that keeps it [in, out]?"""
        if isinstance(self.fp8, FP8Layer):
            return self.fp8.transposed
        return self.leaf == "weight" and is_hf_conv1d(self.owner)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values as a plain tensor."""
        if self.fp8 is None:
            return tuple(self.tensor.shape)
        return self.fp8.weight_shape[::-1] if self.transposed else self.fp8.weight_shape

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """Shape of the values as codes, [out, in, ...]."""
        return self.shape[::-1] if self.transposed else self.shape


class ModuleTree:
    """An index of a model: names → modules and tensors, with the wrappers of torch seen through.

    modules: canonical path → module. parents: id(module) → every (parent, child name) that holds it.
    slots: name → Slot, under canonical names. meta_buffers: non-persistent buffers that are on the meta device.
    meta_attributes: plain attributes that hold tensors (parameters aside) on the meta device.
    lazy: parameters and buffers without a shape yet (LazyLinear before its first call).
    """

    def __init__(self, root: nn.Module) -> None:
        if scripted := [name for name, m in root.named_modules() if isinstance(m, torch.jit.ScriptModule)]:
            raise AnyFP8Error(
                f"{scripted[0] or type(root).__name__} is a TorchScript module, whose layers can't be swapped"
            )
        self.root = root
        self.modules: dict[str, nn.Module] = {}
        self.parents: dict[int, list[tuple[nn.Module, str]]] = {}
        self.slots: dict[str, Slot] = {}
        self.meta_buffers: dict[str, tuple[nn.Module, str]] = {}
        self.meta_attributes: dict[str, tuple[nn.Module, str]] = {}
        self.lazy: list[str] = []
        self._by_place: dict[tuple[int, str], Slot] = {}
        self._walk(root, "", [])

    def _walk(self, module: nn.Module, path: str, above: list[int]) -> None:
        if id(module) in above:  # a module that contains itself (a back reference registered by mistake)
            return
        self.modules.setdefault(path, module)
        for found in _slots(module):
            leaf = found.leaf
            if nn.parameter.is_lazy(found.tensor):
                self.lazy.append(join(path, leaf))
                continue
            slot = self._by_place.setdefault((id(module), leaf), found)
            name = join(path, leaf)
            slot.names.append(name)
            self.slots[name] = slot
        for leaf in module._non_persistent_buffers_set:
            buffer = module._buffers.get(leaf)
            if buffer is not None and buffer.is_meta:
                self.meta_buffers[join(path, leaf)] = (module, leaf)
        computed = _computed(module)
        for key, value in module.__dict__.items():
            if key not in (*_TENSORS, *computed) and any(tensor.is_meta for tensor in tensors_in(value)):
                self.meta_attributes[join(path, key)] = (module, key)
        for name, child in module._modules.items():
            if child is None or (name == "parametrizations" and _decoders(module)):
                continue
            self.parents.setdefault(id(child), [])
            if (module, name) not in self.parents[id(child)]:
                self.parents[id(child)].append((module, name))
            inside = path if _is_wrapper(module, name) else join(path, name)
            self._walk(child, inside, [*above, id(module)])

    def find(self, name: str) -> Slot | None:
        """The slot of a tensor name, which may still carry wrapper segments."""
        return self.slots.get(name) or self.slots.get(strip_wrappers(name))

    def unique_slots(self) -> Iterator[Slot]:
        """Every slot once, whatever the number of its names."""
        return iter(self._by_place.values())

    def tied(self) -> list[list[Slot]]:
        """Slots grouped by the memory they hold (on meta: by the tensor); tied weights share a group."""
        groups: dict[tuple[object, ...], list[Slot]] = {}
        for slot in self.unique_slots():
            tensor, key = slot.tensor, cast(tuple[object, ...], (id(slot.tensor),))
            if tensor.numel() and not tensor.is_meta:
                key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            groups.setdefault(key, []).append(slot)
        return list(groups.values())


def tensors_in(value: Any, depth: int = 2) -> Iterator[Tensor]:
    """The tensors (parameters aside) that an attribute holds: itself, in lists, tuples and dicts, or as attributes of
    an object that is no module."""
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1)
    elif depth and not isinstance(value, (nn.Module, type)) and not callable(value):
        for item in getattr(value, "__dict__", {}).values():
            yield from tensors_in(item, 0)


def _computed(module: nn.Module) -> set[str]:
    """Attributes that a pre-hook computes anew at each call: the weight under torch's older weight norm, spectral norm
    and pruning."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils.")]
    return {str(getattr(hook, "name", getattr(hook, "_tensor_name", ""))) for hook in hooks}


def _slots(module: nn.Module) -> Iterator[Slot]:
    hidden = set(module._non_persistent_buffers_set)
    decoders: dict[str, FP8Layer | DecodedParameter] = dict(_decoders(module))
    if isinstance(module, FP8Layer):
        hidden |= set(STORED)
        decoders["weight"] = module
    for leaf, storage in decoders.items():
        yield Slot(module, leaf, storage.weight_codes, True, storage)
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield Slot(module, leaf, parameter, False)
    for leaf, buffer in module._buffers.items():
        if buffer is not None and leaf not in hidden:
            yield Slot(module, leaf, buffer, True)


def _decoders(module: nn.Module) -> dict[str, DecodedParameter]:
    """The parameters of this module that are FP8 codes behind a parametrization."""
    chains = module._modules.get("parametrizations")
    if chains is None:
        return {}
    return {name: chain[0] for name, chain in chains._modules.items() if isinstance(chain[0], DecodedParameter)}  # type: ignore[index]


def _is_wrapper(parent: nn.Module, child: str) -> bool:
    return child in _ALWAYS_WRAPPERS or (child == "module" and isinstance(parent, _MODULE_WRAPPERS))


def strip_wrappers(name: str) -> str:
    """The name without the segments that torch's wrappers add.

    >>> strip_wrappers("module.blocks.0._orig_mod.fc.weight")
    'blocks.0.fc.weight'
    """
    return _SEGMENT.sub("", name)


def swap(tree: ModuleTree, twins: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Put each new module wherever its old one is; returns the root, which is new if it was swapped itself.

    Parents may also hold a module outside of their children (`self.stages = [self.conv1, self.conv2]`): those
    references are swapped too. The old layers lose their weight, so that one that is still called somewhere fails
    instead of computing with values that were not loaded.
    """
    for old, new in twins.items():
        for parent, name in tree.parents.get(id(old), []):
            parent._modules[name] = new
            if name == "_orig_mod" and hasattr(parent, "_initialize"):
                parent._initialize()  # type: ignore[operator]  # torch.compile's wrapper is bound to the old forward
    for module in {id(m): m for m in (*tree.modules.values(), *twins.values())}.values():
        for key, value in module.__dict__.items():
            if key not in _TENSORS:
                module.__dict__[key] = _swapped(value, twins)
    for new in twins.values():
        hooks: dict[int, Any] = cast(Any, new._load_state_dict_pre_hooks)
        for hook in hooks.values():  # bound to the old layer, weakly
            if getattr(hook, "with_module", False):
                hook.module = weakref.ref(new)
    for old in twins:
        for name in ("weight", "weight_codes"):
            if name in old._parameters:
                old._parameters[name] = None
            if name in old._buffers:
                old._buffers[name] = None
    return twins.get(tree.root, tree.root)


def _swapped(value: Any, twins: Mapping[nn.Module, nn.Module], depth: int = 2) -> Any:
    if isinstance(value, nn.Module):
        return twins.get(value, value)
    if depth and type(value) is list:
        value[:] = [_swapped(v, twins, depth - 1) for v in value]
    elif depth and type(value) is tuple:
        return tuple(_swapped(v, twins, depth - 1) for v in value)
    elif depth and type(value) is dict:
        value.update({k: _swapped(v, twins, depth - 1) for k, v in value.items()})
    return value
