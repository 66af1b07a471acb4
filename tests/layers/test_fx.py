"""torch.fx: FP8 layers are leaves, for torch's tracer and for timm's and torchvision's."""

import pytest
import torch
from torch import fx, nn

import anyfp8
from anyfp8.layers import FP8Layer
from anyfp8.reads import weight_readers
from anyfp8.replace import ModuleTree
from tests.helpers import assert_same_bytes, randn

timm = pytest.importorskip("timm")
EVA = {"img_size": 56, "embed_dim": 48, "depth": 2, "num_heads": 3}
X = {64: randn(2, 3, 64, 64), 56: randn(2, 3, 56, 56)}


def quantized(name, **options):
    torch.manual_seed(0)
    model = timm.create_model(name, **options).eval()
    return anyfp8.quantize(model, "FP8_STATIC", calibration=[X[options.get("img_size", 64)]])


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options", "read"), [("test_resnet", {}, 0), ("test_convnext", {}, 0), ("eva02_tiny_patch14_224", EVA, 2)]
)
def test_a_timm_model_is_traced_with_its_layers_as_leaves(name, options, read):
    model = quantized(name, **options)
    graph = fx.symbolic_trace(model)
    layers = {n for n, m in model.named_modules() if isinstance(m, FP8Layer)}
    called = {node.target for node in graph.graph.nodes if node.op == "call_module"} & layers
    assert len(called) == len(layers) - read
    x = X[options.get("img_size", 64)]
    assert_same_bytes(graph(x), model(x))
    for name in called:
        assert graph.get_submodule(name) is model.get_submodule(name)  # no copy of a weight


@torch.no_grad()
def test_features_of_a_vit_come_from_the_middle_of_it():
    from timm.models._features_fx import create_feature_extractor  # torchvision's, with what must not be traced

    model = quantized("test_vit", img_size=64)
    seen = {}
    model.blocks[1].mlp.fc1.register_forward_hook(lambda module, args, out: seen.update(fc1=out))
    extractor = create_feature_extractor(model, ["blocks.1.mlp.fc1"])
    found = extractor(X[64])["blocks.1.mlp.fc1"]
    model(X[64])
    assert_same_bytes(found, seen["fc1"])


@torch.no_grad()
@pytest.mark.parametrize("keyword", [False, True])
def test_every_kind_of_layer_is_a_leaf(keyword):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.conv, self.fc = nn.Embedding(9, 8), nn.Conv1d(8, 8, 3, padding=1), nn.Linear(8, 4)

        def forward(self, ids):
            x = self.conv(self.table(ids).mT).mT
            return self.fc(input=x) if keyword else self.fc(x)

    model = anyfp8.quantize(Net(), "FP8_DYNAMIC", include="*")
    graph = fx.symbolic_trace(model)
    assert [n.target for n in graph.graph.nodes if n.op == "call_module"] == ["table", "conv", "fc"]
    ids = torch.tensor([[1, 2, 8]])
    assert_same_bytes(graph(ids), model(ids))


# --- what is read instead of called ---
class Reads(nn.Module):
    """One layer of each kind of use."""

    def __init__(self, read=True):
        super().__init__()
        self.read = read
        self.called, self.qkv, self.asked, self.both = (nn.Linear(8, 8) for _ in range(4))
        self.aliased, self.maybe, self.cache = nn.Linear(8, 8), nn.Linear(8, 8), None

    def forward(self, x):
        self.cache = x
        weight = self.qkv.weight
        x = nn.functional.linear(self.called(x), weight, self.qkv.bias)
        x = self.asked(x.to(self.asked.weight.dtype)) * self.asked.weight.shape[0]
        x = self.both(x) + self.both.weight.sum()
        layer = self.aliased
        x = x @ layer.weight.T
        return nn.functional.linear(x, self.maybe.weight) if self.read else self.maybe(x)


class Branches(Reads):
    """The same, with a branch on values, which can't be traced."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else self.called(nn.functional.linear(x, self.qkv.weight))


def readers(model):
    tree = ModuleTree(model)
    found = weight_readers(tree)
    return {name for name, module in tree.modules.items() if module in found}


@pytest.mark.parametrize("place", ["real", "meta", "fp8"])
def test_reads_are_told_from_calls_and_from_questions(place):
    with torch.device("meta" if place == "meta" else "cpu"):
        model, other = Reads(), Reads(read=False)
    if place == "fp8":
        model, other = (anyfp8.quantize(m, "FP8_WEIGHT_ONLY") for m in (model, other))
    assert readers(model) == {"qkv", "aliased", "maybe"}
    assert readers(other) == {"qkv", "aliased"}
    assert model.cache is None, "tracing left something behind"


def test_where_a_trace_fails_the_source_tells():
    assert readers(Branches()) == {"qkv"}


def outside(layer, x):
    """Reads a weight where neither a trace of values nor the module's own source shows it."""
    return x @ layer.weight.T if x.sum() > -1e9 else x


class Helped(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.called, self.idle = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        return outside(self.read, self.called(x)) * self.idle.weight.shape[0]


def test_calibration_tells_what_is_read_from_what_is_not_used():
    with pytest.raises(anyfp8.CalibrationError, match="calibration never called idle; "):
        anyfp8.quantize(Helped(), "FP8_STATIC", calibration=[randn(2, 8)])
    model = anyfp8.quantize(Helped(), "FP8_STATIC", calibration=[randn(2, 8)], exclude="idle")
    found = anyfp8.report(model).layers
    assert {name: layer.scheme.weight_only for name, layer in found.items()} == {"read": True, "called": False}
    assert found["read"].note == "never called in calibration, but its weight was read"


def test_the_report_of_a_loaded_model_names_the_reader(tmp_path):
    model = anyfp8.quantize(Reads(), "FP8_STATIC", calibration=[randn(2, 8)])
    found = anyfp8.report(model).layers
    assert {name for name, layer in found.items() if layer.scheme.weight_only} == {"qkv", "aliased", "maybe"}
    dynamic = anyfp8.quantize(Reads(read=False), "FP8_DYNAMIC")  # this one calls `maybe`: a file that says so
    anyfp8.save(dynamic, tmp_path / "q")
    loaded = anyfp8.load(Reads(), tmp_path / "q")
    layer = anyfp8.report(loaded).layers["maybe"]
    assert layer.note == "Reads reads its weight and never calls it"
    assert "maybe: the input is not quantized: Reads reads its weight" in str(anyfp8.report(loaded))
