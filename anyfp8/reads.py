"""Which layers are never called, because the module around them reads their weight (`F.linear(x, self.qkv.weight)`).

Nobody can quantize the input of such a layer: it is served by decoding its weight. Each module's own forward is traced
with torch.fx, its children as leaves; where that fails (control flow on values), its source is read instead.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
import warnings
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import fx, nn

from anyfp8.layers import LAYERS, FP8Layer
from anyfp8.replace import ModuleTree

#: names of methods that merge branches (timm's reparameterised blocks), after which nothing of them is used any more
_MERGES = re.compile("reparam|fuse|merge|deploy")
#: what code asks a weight for without using its values
METADATA = {
    *(
        "__get__",
        "dtype",
        "device",
        "shape",
        "ndim",
        "is_cuda",
        "is_meta",
        "requires_grad",
        "layout",
        "__class__",
        "itemsize",
    ),
    *("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "get_device", "stride"),
}


def weight_readers(tree: ModuleTree) -> dict[nn.Module, str]:
    """Layer → why its input can't be quantized, for every layer whose weight is read and that is not called."""
    layers = {module for module in tree.modules.values() if isinstance(module, (FP8Layer, *LAYERS))}
    found: dict[nn.Module, str] = {}
    traced: dict[object, tuple[set[str], set[str]]] = {}
    for module in dict.fromkeys(tree.modules.values()):
        kind: Any = type(module)
        code = _code(kind)
        if module in layers or not (code.read or code.aliased):
            continue  # nearly every module: no trace is needed
        called, read = _resolved(module, traced, code)
        why = f"{type(module).__name__} reads its weight and never calls it"
        found |= dict.fromkeys(read - called & layers, why)
    return found


def _resolved(module: nn.Module, traced: dict[object, Any], code: _Code) -> tuple[set[nn.Module], set[nn.Module]]:
    """The modules below this one that its own forward calls, and those whose `weight` it reads the values of."""
    key = _alike(module)
    if key not in traced:
        try:
            with _as_it_was(module):
                traced[key] = _trace(module)
        except Exception:  # whatever code does when it meets a stand-in for a tensor
            traced[key] = code.called, code.read
    called, read = traced[key]
    return _below(module, called), _below(module, read)


def _alike(module: nn.Module) -> object:
    """Equal for modules whose forward takes the same way: of one class, with the same settings and children."""
    settings = {k: v for k, v in module.__dict__.items() if isinstance(v, (bool, int, float, str, type(None)))}
    tensors = {k: v is None for k, v in (*module._parameters.items(), *module._buffers.items())}
    children = {k: type(v) for k, v in module.named_modules() if k}
    return type(module), *(frozenset(found.items()) for found in (settings, tensors, children))


def _below(module: nn.Module, paths: Iterable[str]) -> set[nn.Module]:
    found = set()
    for path in paths:
        try:
            found.add(module.get_submodule(path))
        except AttributeError:
            continue
    return found


# --- by tracing ---
class _Tracer(fx.Tracer):
    """Traces one module's forward; everything below it is a leaf."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """All are."""
        return True


def _trace(module: nn.Module) -> tuple[set[str], set[str]]:
    tracer = _Tracer()

    def proxy(layer: FP8Layer) -> Any:
        return tracer.create_proxy("get_attr", tracer.path_of_module(layer) + ".weight", (), {})

    plain = FP8Layer.weight
    FP8Layer.weight = property(proxy)  # type: ignore[assignment,method-assign]
    try:
        nodes = tracer.trace(module).nodes
    finally:
        FP8Layer.weight = plain  # type: ignore[method-assign]
    called = {str(node.target) for node in nodes if node.op == "call_module"}
    used = (n for n in nodes if n.op == "get_attr" and any(_consumes(user, n) for user in n.users))
    return called, {str(node.target).removesuffix(".weight") for node in used if str(node.target).endswith(".weight")}


def _consumes(user: fx.Node, weight: fx.Node) -> bool:
    """Does this node use the weight's values, not only its dtype, device or shape?"""
    if user.op == "call_function" and user.target is getattr:
        return user.args[1] not in METADATA
    if user.op == "call_method":
        return user.target not in METADATA if user.args[0] is weight else user.target not in ("to", "type_as")
    return True


@contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """What the forward does to its module's attributes, buffers and the random numbers is undone."""
    attributes, buffers = dict(module.__dict__), dict(module._buffers)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        module.__dict__.clear()
        module.__dict__.update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)


# --- from the source ---
@dataclass(frozen=True)
class _Code:
    """What a class's forward (with the methods that it calls) says: paths `a.b` of `self.a.b(...)` and of
    `self.a.b.weight`; and whether a trace may find more: it names the weight of anything else, gives itself to a child
    (a processor), or can't be read at all."""

    called: frozenset[str]
    read: frozenset[str]
    aliased: bool


@cache
def _method(kind: type[nn.Module], name: str) -> tuple[ast.AST, ...] | None:
    """The syntax of one method of a class, () if it has none of this name, None if its source can't be read."""
    method = getattr(kind, name, None)
    if not inspect.isfunction(method):
        return ()
    try:
        return tuple(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method)))))
    except (OSError, TypeError, SyntaxError):
        return None


def attributes_used(tree: ModuleTree) -> Container[str]:
    """The attribute names that the model's public methods (forward may not be the one that is called), or methods that
    these call by whatever path, mention. Methods that merge a model's branches for good don't count."""
    kinds: set[Any] = {type(module) for module in tree.modules.values()}
    names: set[str] = set()
    public = {name for kind in kinds for name in dir(kind) if not name.startswith("_") and not hasattr(nn.Module, name)}
    todo, done = {"forward", *(name for name in public if not _MERGES.search(name))}, set[str]()
    while todo:
        done |= todo
        called: set[str] = set()
        for kind, method in itertools.product(kinds, todo):
            if kind.__module__.startswith("torch.nn."):
                continue
            nodes = _method(cast(Any, kind), method)
            if nodes is None:
                return _Everything()
            called |= {n.func.attr for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
            names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        todo = called - done
    return names


class _Everything(Container[str]):
    def __contains__(self, name: object) -> bool:
        return True


@cache
def _code(kind: type[nn.Module]) -> _Code:
    called: set[str] = set()
    read: set[str] = set()
    aliased = False
    todo, done = ["forward"], set()
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        nodes = _method(cast(Any, kind), name)
        if nodes is None:
            aliased = True
            continue
        above = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
        for node in nodes:
            if isinstance(node, ast.Call) and (path := _path(node.func)):
                called.add(path)
                todo.append(path)
                aliased |= any(isinstance(given, ast.Name) and given.id == "self" for given in node.args)
            elif isinstance(node, ast.Attribute) and node.attr == "weight" and not _asks(above.get(id(node))):
                path = _path(node.value)
                read |= {path} if path else set()
                aliased |= path is None
    return _Code(frozenset(called), frozenset(read), aliased)


def _asks(user: ast.AST | None) -> bool:
    return isinstance(user, ast.Attribute) and user.attr in METADATA


def _path(node: ast.expr) -> str | None:
    """`a.b` of `self.a.b`, "" of `self`; None for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed(parts)) if isinstance(node, ast.Name) and node.id == "self" else None
