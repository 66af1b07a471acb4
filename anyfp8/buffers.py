"""What no checkpoint holds and a model on meta has lost: non-persistent buffers, and tensors kept as plain attributes.

Their values come from the module's own hook (`init_non_persistent_buffers`, timm's convention) or from building the
same class from its config once more (models of diffusers and transformers), with parameters that stay on meta.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from anyfp8.errors import LoadError, Problem
from anyfp8.replace import ModuleTree, tensors_in


def refillable(tree: ModuleTree, owner: nn.Module, path: str) -> bool:
    """Is there a way to compute what this module (`path` in the tree) has lost on meta?"""
    return _has_hook(owner) or _builder(tree, path) is not None


def refill(tree: ModuleTree, device: torch.device | None) -> Callable[[], None]:
    """Give every lost buffer and attribute its value, on `device` (default CPU); returns how to undo it.

    The code of the model's library runs here, before any other change. Raises LoadError if it fails or leaves
    something empty; the model is then as it was.
    """
    where = device or torch.device("cpu")
    owners = {
        owner: name.rpartition(".")[0]
        for name, (owner, _) in (*tree.meta_buffers.items(), *tree.meta_attributes.items())
    }
    saved = [(o, dict(o.__dict__), dict(o._buffers), set(o._non_persistent_buffers_set)) for o in owners]

    def undo() -> None:
        for owner, attributes, buffers, hidden in saved:
            owner.__dict__.clear()
            owner.__dict__.update(attributes)
            owner._buffers.clear()
            owner._buffers.update(buffers)
            owner._non_persistent_buffers_set.clear()
            owner._non_persistent_buffers_set.update(hidden)

    try:
        problems: list[Problem] = []
        for owner, leaf in tree.meta_buffers.values():
            fresh = torch.empty_like(owner.get_buffer(leaf), device=where)
            owner._buffers[leaf] = fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh.zero_()
        for owner, name in owners.items():
            if _has_hook(owner):
                with _parameters_on(owner, where):
                    try:
                        cast(Any, owner).init_non_persistent_buffers()
                    except Exception as error:
                        problems.append(Problem("meta", name, f"init_non_persistent_buffers() raised {error!r}"))
        problems += _from_configs(tree, {name: owner for owner, name in owners.items() if not _has_hook(owner)}, where)
        for name, (owner, leaf) in tree.meta_buffers.items():
            found = owner._buffers.get(leaf)
            if found is None or found.is_meta or (found.is_floating_point() and found.numel() and found.isnan().all()):
                problems.append(Problem("meta", name, f"{_way(owner)} left it empty"))
        for name, (owner, key) in tree.meta_attributes.items():
            if key in owner.__dict__ and any(t.is_meta for t in tensors_in(owner.__dict__[key])):
                problems.append(Problem("meta", name, f"{_way(owner)} left it on meta"))
        if problems:
            raise LoadError(problems)
    except BaseException:
        undo()
        raise
    return undo


def _has_hook(owner: nn.Module) -> bool:
    return callable(getattr(owner, "init_non_persistent_buffers", None))


def _way(owner: nn.Module) -> str:
    return "init_non_persistent_buffers()" if _has_hook(owner) else "building it again from its config"


def _builder(tree: ModuleTree, path: str) -> tuple[str, Callable[[], nn.Module]] | None:
    """The outermost module around `path` that can be built from a config that it carries, and how."""
    parts = path.split(".") if path else []
    for depth in range(len(parts) + 1):
        above = ".".join(parts[:depth])
        module: Any = tree.modules.get(above)
        library = {t.__module__.partition(".")[0] for t in type(module).__mro__}
        if getattr(module, "config", None) is None:
            continue
        if "diffusers" in library and hasattr(type(module), "from_config"):
            return above, lambda module=module: type(module).from_config(module.config)
        if "transformers" in library and hasattr(type(module), "_from_config"):
            return above, lambda module=module: type(module)(copy.deepcopy(module.config))
    return None


def _from_configs(tree: ModuleTree, owners: dict[str, nn.Module], where: torch.device) -> list[Problem]:
    """Build the models around these modules again, and take over what they have."""
    problems: list[Problem] = []
    made: dict[str, nn.Module] = {}
    for path, owner in owners.items():
        found = _builder(tree, path)
        assert found is not None, "the planner has refused it"
        above, build = found
        try:
            if above not in made:
                with parameters_on_meta(), torch.random.fork_rng(devices=[]):
                    made[above] = build()
            donor = made[above].get_submodule(path[len(above) :].lstrip("."))
        except Exception as error:
            problems.append(Problem("meta", path, f"building {type(tree.modules[above]).__name__} again: {error!r}"))
            continue
        for leaf in owner._non_persistent_buffers_set & donor._buffers.keys():
            value, old = donor._buffers[leaf], owner._buffers[leaf]
            if value is not None and old is not None and value.shape == old.shape:
                owner._buffers[leaf] = value.to(where, old.dtype)
        for key, value in donor.__dict__.items():
            if any(t.is_meta for t in tensors_in(owner.__dict__.get(key))):
                owner.__dict__[key] = _moved(value, where)
    return problems


def _moved(value: Any, where: torch.device) -> Any:
    """The same on another device; what is on meta stays there."""
    if isinstance(value, Tensor):
        return value if value.is_meta else value.to(where)
    if type(value) in (list, tuple):
        return type(value)(_moved(item, where) for item in value)
    if type(value) is dict:
        return {key: _moved(item, where) for key, item in value.items()}
    if any(True for _ in tensors_in(value)):  # an object of the library's, which nobody else holds
        for key, item in vars(value).items():
            vars(value)[key] = _moved(item, where) if isinstance(item, Tensor) else item
    return value


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are built meanwhile have their parameters on meta, whatever the default device, buffers not."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(cast(Any, to_meta))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _parameters_on(owner: nn.Module, device: torch.device) -> Iterator[None]:
    """For the time being, empty (never touched, so free) parameters in place of those on meta: the hook may look at
    them for device and dtype."""
    saved = [(m, k, p) for m in owner.modules() for k, p in m._parameters.items() if p is not None and p.is_meta]
    try:
        for module, leaf, parameter in saved:
            module._parameters[leaf] = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
        yield
    finally:
        for module, leaf, parameter in saved:
            module._parameters[leaf] = parameter
