"""One model's whole life in a sweep: build small, quantize, save, load into a fresh meta model, run, compare."""

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import anyfp8
from anyfp8.layers import FP8Layer
from anyfp8.plan import Replace
from tests.helpers import bytes_of, sqnr

Build = Callable[[], nn.Module]
Run = Callable[[nn.Module], Any]


@dataclass
class Row:
    """What happened to one model. Everything but `problem` of a model that can't be built comes from plan and report.

    fp8: how many FP8 layers it has. left: reason → how many layers stayed float. notes: reason → how many FP8 layers
    are served in another way than by a call. into: what was loaded into ("meta", or "real" with its reason in
    `problem`). exact: is the output bit for bit the quantized original's? layers_db: the lowest SQNR of an FP8 layer's
    output, on the input that it got, against an ordinary layer with the decoded weight and the rounded input;
    oracle_db: of the output, against a model of such layers (deep networks amplify a single code that is rounded the
    other way); sqnr_db: against the float model.
    """

    library: str
    family: str
    name: str
    fp8: int = 0
    left: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    into: str = ""
    exact: bool = False
    layers_db: float = math.nan
    oracle_db: float = math.nan
    sqnr_db: float = math.nan
    problem: str = ""

    @property
    def wrong(self) -> bool:
        """Was it loaded without an error although it computes something else?"""
        right = self.exact and self.layers_db > 80
        if self.notes:  # some weights are used by no layer's call, so only the whole model shows them
            right = right and self.oracle_db > min(40.0, self.sqnr_db + 6)
        return bool(self.into) and not right

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


def cycle(row: Row, build: Build, run: Run, folder: Path, *, scheme: str = "FP8_STATIC", **quantize: Any) -> Row:
    """Fill `row`. build: makes the model, the same each time. run: model → its output, of the same inputs each time.

    Refusals of anyfp8 (AnyFP8Error) end up in `row.problem`; anything else is raised: it is a bug of somebody's.
    """
    original = float_model(build)
    reference = outputs(run, original)
    model = copy.deepcopy(original)
    try:
        model = anyfp8.quantize(model, scheme, calibration=lambda m: outputs(run, m), progress=False, **quantize)
        anyfp8.save(model, folder)
        fresh, row.into = fresh_model(build, folder)
        plan = anyfp8.plan(fresh, folder)
        row.problem = row.problem or "; ".join(f"{p.kind}: {p.name}: {p.detail}" for p in plan.problems)
        loaded = anyfp8.load(fresh, folder, progress=False)
    except anyfp8.AnyFP8Error as error:
        row.problem, row.into = f"{type(error).__name__}: {error}", ""
        return row
    report = anyfp8.report(loaded)
    row.fp8 = len(report.layers)
    row.left = dict(Counter(anyfp8.report(model).skipped.values()))
    row.notes = dict(Counter(layer.note for layer in anyfp8.report(model).layers.values() if layer.note))
    assert sum(1 for _ in plan.of(Replace)) <= row.fp8
    want, got = outputs(run, model), outputs(run, loaded)
    row.exact = len(got) == len(want) and all(map(same, got, want))
    row.sqnr_db = lowest_sqnr(got, reference)
    ordinary = oracle(original, model)
    row.oracle_db = lowest_sqnr(got, outputs(run, ordinary))
    row.layers_db = lowest_layer(run, loaded, ordinary)
    return row


def float_model(build: Build) -> nn.Module:
    """The model with weights that are not all zeros or ones where libraries start with those."""
    torch.manual_seed(0)
    model = build().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def fresh_model(build: Build, folder: Path) -> tuple[nn.Module, str]:
    """A model without any value of the original: on meta, or, if it can't be built there, real and full of NaN."""
    try:
        with torch.device("meta"):
            model = build().eval()
        if not anyfp8.plan(model, folder).problems:
            return model, "meta"
        reason = "; ".join(sorted({f"{p.kind}: {p.detail}" for p in anyfp8.plan(model, folder).problems}))
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
        ValueError,
    ) as error:  # a constructor that computes with values
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    torch.manual_seed(2)
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.fill_(math.nan)
    return model, f"real ({reason})"


def outputs(run: Run, model: nn.Module) -> list[Tensor]:
    """All float tensors that a model returns, in order; of random generators, the same numbers each time."""
    torch.manual_seed(3)
    with torch.no_grad():
        found = run(model)
    leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    assert leaves, f"no tensor in {type(found).__name__}"
    return leaves


def same(a: Tensor, b: Tensor) -> bool:
    """The same bytes, and numbers."""
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b) and bool(a.isfinite().any())


def lowest_sqnr(got: list[Tensor], want: list[Tensor]) -> float:
    """In dB, of the output that fares worst; entries that are infinite in both (masks) are left out. NaN if sizes
    differ, as they may against a float model that decides in another way."""
    if [a.shape for a in got] != [b.shape for b in want]:
        return math.nan
    found = []
    for a, b in zip(got, want, strict=True):
        both = a.isfinite() & b.isfinite()
        if not torch.equal(a.isfinite(), b.isfinite()):
            return -math.inf
        found.append(sqnr(a[both], b[both]))
    return min(found)


def lowest_layer(run: Run, loaded: nn.Module, ordinary: nn.Module) -> float:
    """In dB, of the FP8 layers that are called, each on the input that it gets, against the ordinary ones."""
    found: list[float] = []

    def hook(name: str) -> Callable[..., None]:
        theirs = ordinary.get_submodule(name)
        return lambda module, args, kwargs, out: found.append(sqnr(out, theirs(*args, **kwargs)))

    for name, module in loaded.named_modules():
        if isinstance(module, FP8Layer):
            module.register_forward_hook(hook(name), with_kwargs=True)
    outputs(run, loaded)
    return min(found, default=math.inf)


def oracle(original: nn.Module, quantized: nn.Module) -> nn.Module:
    """Ordinary layers all over: decoded weights in the float model, and hooks that round the inputs. No code of ours
    runs in it but the decoding of single weights."""
    model = copy.deepcopy(original)
    sources = dict(quantized.named_modules())
    for name, module in list(model.named_modules()):
        source = sources[name]
        if isinstance(source, FP8Layer):
            # a tensor of its own: the float weight may be tied to a layer that stays float
            module.weight = nn.Parameter(source.weight.clone().as_subclass(Tensor), requires_grad=False)
            module.register_forward_pre_hook(rounding(source), with_kwargs=True)
        elif "parametrizations" in source._modules:
            with torch.no_grad():
                for leaf in source.parametrizations:
                    getattr(module, leaf).copy_(getattr(source, leaf))
    return model


def rounding(layer: FP8Layer) -> Callable[..., Any]:
    """A pre-hook that rounds a static input to the e4m3 grid, with torch's own cast."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if layer.input_scale is None:
            return args, kwargs
        x = args[0] if args else kwargs.pop("input")
        codes = (x.float() / layer.input_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return ((codes.float() * layer.input_scale).to(x.dtype), *args[1:]), kwargs

    return hook
