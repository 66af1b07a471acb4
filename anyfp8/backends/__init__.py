"""Backends and how one is chosen: before the forward, with every refusal kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from anyfp8.backends.base import Backend
from anyfp8.backends.device import DeviceInfo
from anyfp8.backends.emulated import Dequantized, Emulated, TorchFp8Static
from anyfp8.backends.native import Native
from anyfp8.errors import BackendError
from anyfp8.scheme import QuantizationScheme

__all__ = ["BACKENDS", "Backend", "DeviceInfo", "check_name", "register_backend", "select"]

_BUILT_IN: tuple[Backend, ...] = (Native(), Emulated(), Dequantized(), TorchFp8Static())
_REGISTRY: dict[str, Backend] = {b.name: b for b in _BUILT_IN}
_AUTO: list[str] = ["native", "emulated"]
#: name → backend
BACKENDS: Mapping[str, Backend] = MappingProxyType(_REGISTRY)


def register_backend(backend: Backend) -> None:
    """Add a backend; `auto` tries it before the ones that are there. A name that is taken is a ValueError."""
    if backend.name in _REGISTRY or backend.name == "auto":
        raise ValueError(f"backend {backend.name!r} is already registered")
    _REGISTRY[backend.name] = backend
    _AUTO.insert(0, backend.name)


def check_name(name: str) -> None:
    """Raise BackendError for a name that is no backend."""
    if name != "auto" and name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}; known: auto, {', '.join(BACKENDS)}")


def select(
    name: str, scheme: QuantizationScheme, shape: Sequence[int], device: DeviceInfo
) -> tuple[Backend | None, dict[str, str]]:
    """The backend for one layer, and why each one that was tried before it was not taken.

    `auto` takes the best that accepts; a name takes that one or nothing (None, with its refusal).
    """
    check_name(name)
    refusals: dict[str, str] = {}
    for candidate in _AUTO if name == "auto" else [name]:
        backend = BACKENDS[candidate]
        reason = backend.check(scheme, shape, device) or (backend.avoid(device) if name == "auto" else None)
        if reason is None:
            return backend, refusals
        refusals[candidate] = reason
    return None, refusals
