"""timm: every name is planned on meta; small models of every family go through their whole life."""

import json
import struct
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import anyfp8
from anyfp8.numerics import grid_shape
from anyfp8.plan import Assign, Replace
from anyfp8.planner import build_plan
from anyfp8.quantize import QuantizationPlan, plan_quantization
from anyfp8.writers import Layer, native
from tests.sweeps.coverage import Coverage
from tests.sweeps.cycle import Row, cycle
from tests.sweeps.timm_cases import CASES, NOT_RUN, Case

timm = pytest.importorskip("timm", reason="timm is not installed: pip install anyfp8[timm]")

#: fused and read-only qkv, distillation, windows, tables lost on meta, convolutions in groups, LSTMs, merged branches
FEW = (
    "test_vit2",
    "deit_tiny_distilled_patch16_224",
    "eva02_tiny_patch14_224",
    "swinv2_tiny_window8_256",
    "test_efficientnet",
    "test_convnext2",
    "test_nfnet",
    "sequencer2d_s",
    "edgenext_xx_small",
    "lcnetv2_small, reparameterised",
)
WORDS = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3"}


# --- one small model of each family, loaded and run ---
def lived(case: Case, folder: Path) -> Row:
    """The row of a model; what is raised that should not be is its problem, and makes it wrong."""
    row = Row("timm", case.family, case.label)
    try:
        with TemporaryDirectory(dir=folder) as own:
            return cycle(row, case.build, case.run, Path(own) / "fp8")
    except Exception as error:  # the others have to run all the same
        row.exact, row.into, row.problem = False, row.into or "nothing", f"{type(error).__name__}: {error}"
        return row


@pytest.mark.parametrize("label", FEW)
def test_a_loaded_model_computes_what_was_quantized(label, tmp_path):
    case = next(case for case in CASES if case.label == label)
    row = cycle(Row("timm", case.family, case.label), case.build, case.run, tmp_path / "fp8")
    assert row.exact
    assert not row.wrong
    assert not row.problem
    assert row.fp8 > 0


def test_every_family_has_a_small_model():
    assert len({case.label for case in CASES}) == len(CASES)
    assert {case.family for case in CASES} | NOT_RUN.keys() >= set(timm.list_modules())


# --- every name, planned on meta ---
class Unfilled(TorchFunctionMode):
    """Leaves out what fills tensors on meta: there is nothing to fill, and it would take most of the time."""

    FILL = frozenset(
        getattr(owner, name)
        for owner, names in {
            torch.Tensor: "normal_ uniform_ fill_ zero_ erfinv_ mul_ add_ div_ clamp_ copy_",
            nn.init: "trunc_normal_ normal_ uniform_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ constant_",
        }.items()
        for name in names.split()
    )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.FILL:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def built(name: str) -> tuple[nn.Module, list[str]]:
    """On meta, or, with the reason, on the CPU."""
    try:
        with torch.device("meta"), Unfilled():
            return timm.create_model(name).eval(), []
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return timm.create_model(name).eval(), [f"can't be built on meta: {why}"]


def write_hollow(model: nn.Module, quantized: QuantizationPlan, folder: Path) -> None:
    """The checkpoint that `save` would write, its header true and its data a hole that takes no room."""
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    layers, floats, seen = [], [], set()
    schemes = {slot.name: (layer, quantized.schemes[layer]) for layer, slot in quantized.slots.items()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # tied: stored once
            continue
        seen.add(id(tensor))
        shape = tuple(tensor.shape)
        if name in schemes:
            layer, scheme = schemes[name]
            kinds[name] = (torch.float8_e4m3fn, shape)
            kinds[f"{layer}.weight_scale"] = (torch.float32, grid_shape(shape, scheme.tile))
            if scheme.static:
                kinds[f"{layer}.input_scale"] = (torch.float32, (1,))
            layers.append(Layer(layer, scheme, shape))
        else:
            kinds[name] = (tensor.dtype, shape)
            if name.endswith(".weight") and len(shape) > 1:
                floats.append(name.removesuffix(".weight"))
    header, end = {}, 0
    for name, (dtype, shape) in kinds.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": WORDS[dtype], "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    for name, config in native.configs(layers, floats, "a test").items():
        (folder / name).write_text(json.dumps(config))


def outcome(name: str, folder: Path) -> str:
    """ "right", or what is not: every tensor of file and model has its place, every matrix is FP8 or named."""
    model, faults = built(name)
    quantized = plan_quantization(model, "FP8_STATIC")
    write_hollow(model, quantized, folder)
    plan = build_plan(model, anyfp8.inspect(folder))
    faults += [f"{problem.kind}: {problem.detail or problem.name}" for problem in plan.problems]
    replaced = {step.slot.name for step in plan.of(Replace)}
    if replaced != {slot.name for slot in quantized.slots.values()}:
        faults.append("other layers are replaced than were quantized")
    filled = {name for step in plan.of(Assign) for slot in step.slots for name in slot.names}
    filled |= {name for step in plan.of(Replace) for name in step.slot.names}
    if any(scheme.weight_only and not quantized.notes.get(layer) for layer, scheme in quantized.schemes.items()):
        faults.append("weight-only without a reason")
    tensors = {name for name in model.state_dict() if not name.endswith("num_batches_tracked")}
    if missing := tensors - filled:
        faults.append(f"no step fills {len(missing)} tensors")
    told = {slot.owner for slot in quantized.slots.values()}
    told |= {model.get_submodule(path) for path, reason in quantized.skipped.items() if reason}
    for module in set(model.modules()) - told:
        own = module.named_parameters(recurse=False)
        if any("weight" in leaf and parameter.dim() > 1 for leaf, parameter in own):
            faults.append(f"silently skipped: {type(module).__name__}")
    return "; ".join(sorted(set(faults))) or "right"


@pytest.mark.parametrize("name", ["resnet50", "vit_base_patch16_224", "tf_efficientnet_b0", "nfnet_f0", "coat_tiny"])
def test_a_name_is_planned_without_weights(name, tmp_path):
    assert outcome(name, tmp_path) == "right"
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 1 << 20


# --- all of it ---
@pytest.mark.sweep
@pytest.mark.timeout(7200)
def test_all_of_timm(tmp_path):
    start = time.monotonic()
    planned = Counter(outcome(name, tmp_path / "planned") for name in timm.list_models())
    coverage = Coverage("timm", timm.__version__)
    coverage.rows = [lived(case, tmp_path) for case in CASES]
    coverage.write(time.monotonic() - start, planned)
    assert not [f"{row.name}: {row.problem}" for row in coverage.rows if row.wrong]
    assert sum(row.exact for row in coverage.rows) >= 0.95 * len(CASES)
    assert planned["right"] == planned.total(), planned
