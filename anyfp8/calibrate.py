"""Observes the inputs of layers: absmax, or a percentile of the magnitudes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anyfp8.errors import CalibrationError
from anyfp8.folding import fold
from anyfp8.layers.readonly import asked
from anyfp8.reads import METADATA

Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Calibration = Iterable[Batch] | Callable[[nn.Module], Any]


class Observer:
    """The largest magnitude of a layer's input over all calls; NaN or inf once it saw one.

    percentile: of the magnitudes within a call, 100 for the maximum; the largest over all calls is kept.
    """

    def __init__(self, percentile: float) -> None:
        self.percentile = percentile
        self.amax: Tensor | None = None
        self.called = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook (with kwargs)."""
        self.called = True
        x = args[0] if args else kwargs["input"]
        if not x.numel():
            return
        magnitude = x.detach().abs().flatten().float()
        if self.percentile < 100 and bool(magnitude.isfinite().all()):
            rank = max(1, round(magnitude.numel() * self.percentile / 100))
            amax = magnitude.kthvalue(rank).values
        else:
            amax = magnitude.amax()
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax.to(self.amax.device))


def observe(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    calibration: Calibration | None,
    *,
    percentile: float = 100.0,
    progress: bool | None = None,
    uncalled: Collection[str] = (),
) -> tuple[dict[str, float], set[str]]:
    """Layer name → largest magnitude of its input, over a calibration run in eval mode without gradients; and the
    layers that were never called although something else used their weight.

    calibration: batches (a tensor is passed as model(x), a tuple or list as model(*x), a dict as model(**x)), or a
    callable that gets the model. uncalled: layers that are known not to be called. Raises CalibrationError, naming the
    layers, where neither input nor weight were ever used, or the input isn't finite.
    """
    if calibration is None:
        raise CalibrationError("a static scheme needs calibration=: batches, or a callable that runs the model")
    if not 0 < percentile <= 100:
        raise CalibrationError(f"percentile is {percentile}; valid: more than 0, at most 100")
    if isinstance(calibration, (Tensor, Mapping)):
        calibration = [calibration]
    observers = {name: Observer(percentile) for name in layers}
    handles = [layers[n].register_forward_pre_hook(observers[n], with_kwargs=True) for n in layers]
    try:
        with _evaluating(model), torch.no_grad(), _eager(), _Uses(layers) as uses:
            if callable(calibration):
                calibration(model)
            else:
                _run(model, calibration, progress)
    finally:
        for handle in handles:
            handle.remove()
    seen = {name: None if o.amax is None else float(o.amax) for name, o in observers.items()}
    read = {name for name in uses.names if not observers[name].called}
    if never := [name for name, amax in seen.items() if amax is None and name not in read.union(uncalled)]:
        raise CalibrationError(
            f"calibration never called {', '.join(fold(never))}; calibrate with inputs that reach it, or leave it out "
            "with exclude="
        )
    amax = {name: value for name, value in seen.items() if value is not None}
    if bad := [name for name, value in amax.items() if not value < float("inf")]:
        raise CalibrationError(f"the input of {', '.join(fold(bad))} held NaN or infinite values")
    return amax, read


class _Uses(TorchFunctionMode):
    """Watches for functions that are given the weight of a layer, by whomever: `names` of these layers."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._weights = {id(module.weight): name for name, module in layers.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if asked(func) not in METADATA:
            for value in (*args, *kwargs.values()):
                if isinstance(value, nn.Parameter) and id(value) in self._weights:
                    self.names.add(self._weights[id(value)])
        return func(*args, **kwargs)


def _run(model: nn.Module, batches: Iterable[Batch], progress: bool | None) -> None:
    from tqdm.auto import tqdm

    count = 0
    for batch in tqdm(batches, desc="Calibrating", disable=None if progress is None else not progress, leave=False):
        count += 1
        if isinstance(batch, Mapping):
            model(**batch)
        elif isinstance(batch, (tuple, list)):
            model(*batch)
        else:
            model(batch)
    if not count:
        raise CalibrationError("calibration holds no batches")


def _eager() -> AbstractContextManager[Any]:
    """Compiled code doesn't run hooks that came after it; if anything was compiled, run it eagerly for now."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
