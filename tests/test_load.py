"""`load` and `plan` where they succeed: every kind of model, place and wrapper, and that nothing else is changed."""

import copy
import functools
import json
import re
import sys

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

import anyfp8
from anyfp8 import FP8Conv2d, FP8Embedding, FP8Linear
from tests.checkpoints import (
    DYNAMIC,
    E4M3,
    F8,
    SCHEMES,
    STATIC,
    WEIGHT_ONLY,
    Doubling,
    Draft,
    Nested,
    Shared,
    Snapshot,
    Tied,
    Within,
    X,
    draft,
    encode,
    join,
    mlp,
    on_meta,
    oracle,
    seeded,
    stale,
    write_json,
    write_tensors,
)
from tests.helpers import assert_close, assert_same_bytes, randn

PLACES = ["real", "meta"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    yield
    torch._dynamo.reset()


def target(make, place):
    """What a user would load into: a model with other values, or one without any."""
    return stale(seeded(make)) if place == "real" else on_meta(make)


def run(model, *inputs):
    with torch.no_grad():
        return model(*inputs)


def assert_holds(model, written, names):
    """Codes and scales of the layers `names` are the file's bytes, every other tensor too, and nothing is on meta."""
    modules = dict(model.named_modules(remove_duplicate=False))
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    assert not [name for name, tensor in own.items() if tensor.is_meta]
    for name, tensor in written.tensors.items():
        path, _, leaf = name.rpartition(".")
        if path not in names or leaf == "bias":
            assert_same_bytes(own[name].detach(), tensor)
        elif leaf == "weight":
            assert_same_bytes(modules[path].weight_codes, tensor.view(torch.uint8))
        else:
            assert_same_bytes(getattr(modules[path], leaf).reshape(-1), tensor.reshape(-1))


# --- schemes and layer types ---
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("channel", [False, True], ids=["tensor", "channel"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_layers(tmp_path, scheme, channel, place):
    written = draft(mlp(), ["0", "2"], SCHEMES[scheme], channel)
    model = anyfp8.load(target(mlp, place), written.write(tmp_path))
    assert type(model[0]) is type(model[2]) is FP8Linear
    assert_holds(model, written, ["0", "2"])
    assert_close(model[0].weight, written.weight("0"), 0)
    assert_close(run(model, X), run(oracle(mlp(), written), X), 1e-5)


@pytest.mark.parametrize("what", ["weight_scale", "input_scale", "channel"])
def test_the_oracle_sees_a_wrong_scale(tmp_path, what):
    written = draft(mlp(), ["0", "2"], STATIC, channel=True)
    model = anyfp8.load(stale(mlp()), written.write(tmp_path))
    if what == "channel":
        written.tensors["0.weight_scale"][3] *= 1.01
    else:
        written.tensors[f"2.{what}"] *= 1.01
    with pytest.raises(AssertionError, match="max relative error"):
        assert_close(run(model, X), run(oracle(mlp(), written), X), 1e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [lambda: nn.Conv1d(4, 8, 3), lambda: nn.Conv2d(4, 8, 3), lambda: nn.Conv3d(4, 8, 2)])
def test_convolutions(tmp_path, make, place):
    net = lambda: nn.Sequential(make(), nn.Sigmoid())  # noqa: E731
    written = draft(seeded(net), ["0"], STATIC, channel=True)
    model = anyfp8.load(target(net, place), written.write(tmp_path))
    x = randn(2, 4, *[6] * (seeded(make).weight.dim() - 2))
    assert_holds(model, written, ["0"])
    assert_close(run(model, x), run(oracle(seeded(net), written), x), 1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_an_embedding_and_a_dynamic_linear(tmp_path, place):
    net = lambda: nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 4))  # noqa: E731
    written = draft(seeded(net), ["0", "1"], DYNAMIC, channel=True)
    model = anyfp8.load(target(net, place), written.write(tmp_path))
    index = torch.arange(12)
    assert type(model[0]) is FP8Embedding
    assert_holds(model, written, ["0", "1"])
    assert_close(run(model[0], index), written.weight("0"), 0)
    assert_close(run(model, index), run(oracle(seeded(net), written), index), 1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_different_schemes_in_one_file(tmp_path, place):
    written = draft(seeded(Nested), ["parts.up"], DYNAMIC)
    for name, scheme in {"layers.0.0": STATIC, "layers.1.0": WEIGHT_ONLY}.items():
        other = draft(seeded(Nested), [name], scheme, channel=True)
        written.layers |= other.layers
        written.tensors |= {n: t for n, t in other.tensors.items() if n.startswith(f"{name}.")}
    model = anyfp8.load(target(Nested, place), written.write(tmp_path))
    assert {n: dict(s)["act_dynamic"] for n, s in anyfp8.plan(model, tmp_path).layer_config.items()} == {
        "parts.up": True,
        "layers.0.0": False,
        "layers.1.0": False,
    }
    assert type(model.parts["up"]) is FP8Linear
    assert type(model.parts["up_proj"]) is nn.Linear
    assert_holds(model, written, written.layers)
    assert_close(run(model, X), run(oracle(seeded(Nested), written), X), 1e-5)


@pytest.mark.parametrize("place", PLACES)
def test_a_root_level_linear_is_returned_new(tmp_path, place):
    net = lambda: nn.Linear(8, 4)  # noqa: E731
    written = draft(seeded(net), [""])
    folder = written.write(tmp_path)
    model = target(net, place)
    loaded = anyfp8.load(model, folder)
    assert type(loaded) is FP8Linear
    assert type(model) is nn.Linear
    assert_close(run(loaded, X), run(oracle(seeded(net), written), X), 1e-5)
    assert list(anyfp8.report(loaded).layers) == [""]
    again = anyfp8.load(loaded, folder)
    assert_holds(again, written, [""])


# --- what a layer keeps ---
def test_a_replaced_layer_keeps_hooks_mode_and_attributes(tmp_path):
    seen = []
    model = stale(mlp()).train()
    model[2].eval()
    model[0].register_forward_pre_hook(lambda m, args: seen.append(("pre", type(m))))
    model[0].register_forward_hook(lambda m, args, out: seen.append(("post", type(m))))
    model[0].tag = "kept"
    anyfp8.load(model, draft(mlp(), ["0", "2"]).write(tmp_path))
    run(model, X)
    assert seen == [("pre", FP8Linear), ("post", FP8Linear)]
    assert (model[0].training, model[2].training, model[0].tag) == (True, False, "kept")


@pytest.mark.parametrize("place", PLACES)
def test_a_replaced_layer_keeps_what_was_registered_on_it(tmp_path, place):
    def make():
        net = nn.Sequential(nn.Linear(8, 8))
        net[0].register_buffer("mask", torch.ones(3))
        net[0].register_buffer("cache", torch.ones(2), persistent=False)
        net[0].register_parameter("gain", nn.Parameter(torch.ones(2)))
        net[0].add_module("probe", nn.Linear(8, 2))
        net[0].init_non_persistent_buffers = lambda: net[0].register_buffer("cache", torch.ones(2), False)
        return net

    original = seeded(make)
    with torch.no_grad():
        original[0].mask.fill_(7), original[0].gain.fill_(5)
    written = draft(original, ["0"])
    model = anyfp8.load(target(make, place), written.write(tmp_path))
    assert type(model[0]) is FP8Linear
    assert isinstance(model[0].gain, nn.Parameter)
    assert_holds(model, written, ["0"])
    assert "cache" in model[0]._buffers
    assert "0.cache" not in model.state_dict()
    assert model[0].probe(X).shape == (5, 2)


@pytest.mark.parametrize("place", PLACES)
def test_requires_grad_is_kept(tmp_path, place):
    model = target(mlp, place)
    model[0].bias.requires_grad_(False)
    anyfp8.load(model, draft(mlp(), ["2"]).write(tmp_path))
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        "0.weight": True,
        "0.bias": False,
        "2.bias": True,
    }


def test_parameters_of_a_real_model_stay_the_same_objects(tmp_path):
    model = stale(mlp())
    kept = [model[0].weight, model[0].bias, model[2].bias]
    pointers = [p.data_ptr() for p in kept]
    optimizer = torch.optim.SGD(kept, lr=1.0)
    written = draft(mlp(), ["2"])
    anyfp8.load(model, written.write(tmp_path))
    assert all(a is b for a, b in zip(kept, model.parameters(), strict=True))
    assert pointers == [p.data_ptr() for p in kept]
    model(X).sum().backward()
    optimizer.step()
    assert_close(model[2].bias.detach(), written.tensors["2.bias"] - X.shape[0], 1e-6)


def test_a_dtype_change_keeps_parameters_too(tmp_path):
    model = stale(mlp())
    kept = list(model[0].parameters())
    anyfp8.load(model, draft(mlp(), ["2"]).write(tmp_path), dtype=torch.bfloat16)
    assert all(a is b for a, b in zip(kept, model[0].parameters(), strict=True))
    assert kept[0].dtype == torch.bfloat16


class Aliased(nn.Module):
    """Layers that are also reachable past `_modules`."""

    def __init__(self, how):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.how = how
        if how == "list":
            self.steps = [self.a, self.b]
        elif how == "tuple":
            self.steps = (self.a, self.b)
        elif how == "dict":
            self.steps = {"a": self.a, "b": self.b}
        elif how == "nested":
            self.steps = [("a", self.a), ("b", self.b)]
        else:
            self.__dict__["steps"], self.__dict__["more"] = self.a, self.b

    def forward(self, x):
        if self.how == "attribute":
            return self.more(torch.tanh(self.steps(x)))
        steps = list(self.steps.values()) if self.how == "dict" else list(self.steps)
        first, second = (pair[1] for pair in steps) if self.how == "nested" else steps
        return second(torch.tanh(first(x)))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["list", "tuple", "dict", "nested", "attribute"])
def test_references_past_the_module_tree_follow(tmp_path, how, place):
    make = functools.partial(Aliased, how)
    plain = seeded(lambda: nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}))
    written = draft(plain, ["a", "b"])
    a, b = (
        anyfp8.load(copy.deepcopy(plain), written.write(tmp_path))["a"],
        anyfp8.load(copy.deepcopy(plain), tmp_path)["b"],
    )
    loaded = anyfp8.load(target(make, place), tmp_path)
    assert_close(run(loaded, X), run(b, torch.tanh(run(a, X))), 0)


def test_the_old_weight_is_left_alone_where_something_else_uses_it(tmp_path):
    model = stale(seeded(Tied))
    kept = model.emb.weight
    written = draft(seeded(Tied), ["head"], WEIGHT_ONLY)
    anyfp8.load(model, written.write(tmp_path))
    assert model.emb.weight is kept
    assert_same_bytes(kept.detach(), written.tensors["emb.weight"])


# --- wrappers ---
WRAPPERS = {
    "compile": lambda m: torch.compile(m, backend="eager"),
    "data_parallel": lambda m: nn.DataParallel(m, device_ids=[]),
    "compiled_data_parallel": lambda m: torch.compile(nn.DataParallel(m, device_ids=[]), backend="eager"),
    "data_parallel_compiled": lambda m: nn.DataParallel(torch.compile(m, backend="eager"), device_ids=[]),
    "checkpoint": checkpoint_wrapper,
    "checkpoint_compiled": lambda m: torch.compile(checkpoint_wrapper(m), backend="eager"),
}


@pytest.mark.parametrize(
    ("wrapper", "written_by"),
    [*((wrapper, "plain") for wrapper in WRAPPERS), ("data_parallel_compiled", "wrapper"), ("checkpoint", "wrapper")],
)
def test_wrapped_models(tmp_path, wrapper, written_by):
    written = draft(mlp(), ["0", "2"])
    wrapped = WRAPPERS[wrapper](stale(mlp()))
    if written_by == "wrapper":
        inside = next(name for name, m in wrapped.named_modules() if isinstance(m, nn.Sequential))
        written.renamed(lambda path: f"{inside}.{path}").write(tmp_path)
    else:
        written.write(tmp_path)
    loaded = anyfp8.load(wrapped, tmp_path)
    assert loaded is wrapped
    assert_close(run(loaded, X), run(oracle(mlp(), written), X), 1e-5)
    assert list(anyfp8.report(loaded).layers) == ["0", "2"]


@pytest.mark.parametrize("wrapper", [w for w in WRAPPERS if w != "compiled_data_parallel"])
def test_a_wrapped_bare_linear(tmp_path, wrapper):
    net = lambda: nn.Linear(8, 4)  # noqa: E731
    written = draft(seeded(net), [""])
    wrapped = WRAPPERS[wrapper](stale(seeded(net)))
    if "compile" in wrapper:
        run(wrapped, X)  # compiled before: nothing of it may be reused
    loaded = anyfp8.load(wrapped, written.write(tmp_path))
    assert loaded is wrapped
    assert any(type(m) is FP8Linear for m in loaded.modules())
    assert_close(run(loaded, X), run(oracle(seeded(net), written), X), 1e-5)


@pytest.mark.parametrize("wrapper", ["compile", "data_parallel_compiled", "checkpoint"])
def test_wrapped_blocks_inside_a_model(tmp_path, wrapper):
    net = lambda: nn.Sequential(mlp(), nn.Linear(8, 8))  # noqa: E731
    written = draft(seeded(net), ["0.0", "0.2", "1"])
    model = stale(seeded(net))
    model[0], model[1] = WRAPPERS[wrapper](model[0]), WRAPPERS[wrapper](model[1])
    loaded = anyfp8.load(model, written.write(tmp_path))
    assert_close(run(loaded, X), run(oracle(seeded(net), written), X), 1e-5)


def test_distributed_data_parallel(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        written = draft(mlp(), ["0", "2"])
        model = nn.parallel.DistributedDataParallel(stale(mlp()))
        anyfp8.load(model, written.write(tmp_path / "plain"))
        assert_close(run(model, X), run(oracle(mlp(), written), X), 1e-5)
        written.renamed(lambda path: f"module.{path}").write(tmp_path / "wrapped")
        assert_holds(anyfp8.load(stale(mlp()), tmp_path / "wrapped"), written, ["0", "2"])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("which", ["root", "layer", "bare"])
def test_modules_compiled_in_place(tmp_path, which):
    net = (lambda: nn.Linear(8, 4)) if which == "bare" else mlp
    names = [""] if which == "bare" else ["0", "2"]
    written = draft(seeded(net), names)
    model = stale(seeded(net))
    (model[0] if which == "layer" else model).compile(backend="eager")
    run(model, X)
    loaded = anyfp8.load(model, written.write(tmp_path))
    assert_close(run(loaded, X), run(oracle(seeded(net), written), X), 1e-5)
    run(anyfp8.dequantize(loaded), X)


def test_a_compiled_model_that_has_run_is_compiled_anew(tmp_path):
    written = draft(mlp(), ["0", "2"])
    model = stale(mlp())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    run(compiled, X)
    anyfp8.load(model, written.write(tmp_path))  # through the inner model: the wrapper must notice
    assert_close(run(compiled, X), run(oracle(mlp(), written), X), 1e-5)


# --- prefixes and names ---
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("prefix", ["model", "transformer", "model.diffusion_model", "module", "a.b.c"])
def test_a_prefix_of_the_file_is_taken_off(tmp_path, prefix, place):
    written = draft(seeded(Nested), ["parts.up", "parts.up_proj", "layers.1.0"])
    written.renamed(lambda path: f"{prefix}.{path}").write(tmp_path)
    loaded = anyfp8.load(target(Nested, place), tmp_path)
    assert_holds(loaded, written, written.layers)
    if prefix != "module":  # torch's own wrapper segment: no need to say so
        assert any(f"{prefix}." in note for note in anyfp8.report(loaded).notes)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["model", "transformer", "module", "backbone"])
def test_a_prefix_of_the_model_is_put_before(tmp_path, name, place):
    written = draft(seeded(Nested), ["parts.up", "layers.1.0"])
    written.write(tmp_path)
    loaded = anyfp8.load(target(lambda: Within(name, Nested()), place), tmp_path)
    assert_holds(getattr(loaded, name), written, written.layers)
    assert any(f"{name}." in note for note in anyfp8.report(loaded).notes)
    assert sorted(anyfp8.report(loaded).layers) == [f"{name}.layers.1.0", f"{name}.parts.up"]


def test_a_prefix_repeated_in_the_names_is_taken_off_once(tmp_path):
    make = lambda: Within("model", nn.Sequential(nn.Linear(8, 8)))  # noqa: E731
    written = draft(seeded(make), ["model.0"])
    written.renamed(lambda path: f"model.{path}").write(tmp_path)
    assert_holds(anyfp8.load(stale(seeded(make)), tmp_path), written, ["model.0"])


def test_a_prefix_and_a_tensor_of_the_model_that_looks_like_a_scale(tmp_path):
    make = functools.partial(WithScales, "k_scale")
    written = draft(seeded(make), ["fc"])
    written.renamed(lambda path: f"model.{path}" if path else "model").write(tmp_path)
    assert_holds(anyfp8.load(stale(seeded(make)), tmp_path), written, ["fc"])


def test_names_that_match_as_they_are_win(tmp_path):
    make = lambda: nn.ModuleDict({"model": nn.Linear(8, 8), "x": nn.ModuleDict({"model": nn.Linear(8, 8)})})  # noqa: E731
    original = seeded(make)
    written = draft(original, ["model", "x.model"])
    loaded = anyfp8.load(stale(original), written.write(tmp_path))
    assert_holds(loaded, written, written.layers)
    assert anyfp8.report(loaded).notes == ()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "rename",
    [
        {r"^net\.": "", r"^blk(\d)\.": r"layers.\1.", "^top$": "parts.up"},
        lambda path: re.sub(r"^blk(\d)\.", r"layers.\1.", path.removeprefix("net.").replace("top", "parts.up")),
    ],
    ids=["mapping", "function"],
)
def test_rename_acts_on_weights_scales_and_lists(tmp_path, rename, place):
    written = draft(seeded(Nested), ["parts.up", "layers.0.0", "layers.1.0"])
    written.ignore.append("parts.up_proj")

    def foreign(path):
        path = "top" if path == "parts.up" else path
        return "net." + re.sub(r"^layers\.(\d)\.", r"blk\1.", path)

    written.renamed(foreign).write(tmp_path)
    loaded = anyfp8.load(target(Nested, place), tmp_path, rename=rename)
    assert_holds(loaded, written, written.layers)
    assert_close(run(loaded, X), run(oracle(seeded(Nested), written), X), 1e-5)


def test_rename_rules_apply_in_order(tmp_path):
    written = draft(mlp(), ["0", "2"])
    written.renamed(lambda path: {"0": "a", "2": "b"}[path]).write(tmp_path)
    loaded = anyfp8.load(stale(mlp()), tmp_path, rename={"a": "b2", "^b$": "2", "b2": "0"})
    assert_holds(loaded, written, written.layers)


def test_rename_can_move_root_tensors(tmp_path):
    net = lambda: nn.Linear(8, 4)  # noqa: E731
    written = draft(seeded(net), [""])
    written.write(tmp_path)
    loaded = anyfp8.load(stale(seeded(lambda: Within("fc", net()))), tmp_path, rename=lambda path: "fc" + path)
    assert_holds(loaded.fc, written, [""])


def test_rename_and_prefix_together(tmp_path):
    written = draft(mlp(), ["0", "2"])
    written.renamed(lambda path: f"model.{ {'0': 'in', '2': 'out'}[path] }").write(tmp_path)
    loaded = anyfp8.load(stale(mlp()), tmp_path, rename={"in$": "0", "out$": "2"})
    assert_holds(loaded, written, written.layers)


def test_a_child_named_like_a_wrapper_keeps_its_name(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.x = nn.Linear(8, 8), nn.Linear(8, 8)

    written = draft(seeded(Net), ["module", "x"])
    loaded = anyfp8.load(stale(seeded(Net)), written.write(tmp_path))
    assert_holds(loaded, written, ["module", "x"])
    assert list(anyfp8.report(loaded).layers) == ["module", "x"]


# --- include and exclude ---
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("options", "quantized"),
    [
        ({"exclude": "0"}, ["2"]),
        ({"exclude": ["0", "nothing"]}, ["2"]),
        ({"include": ["2"]}, ["2"]),
        ({"include": "*", "exclude": ("2",)}, ["0"]),
        ({"include": "[0-9]", "exclude": "*"}, []),
        ({"include": ("0", "1")}, ["0"]),
    ],
    ids=str,
)
def test_excluded_layers_are_decoded(tmp_path, options, quantized, place):
    written = draft(mlp(), ["0", "2"], DYNAMIC, channel=True)
    loaded = anyfp8.load(target(mlp, place), written.write(tmp_path), **options)
    for name in ("0", "2"):
        layer = loaded.get_submodule(name)
        assert type(layer) is (FP8Linear if name in quantized else nn.Linear)
        assert_same_bytes(layer.weight.detach().clone(), written.weight(name))
        assert_same_bytes(layer.bias.detach(), written.tensors[f"{name}.bias"])
    report = anyfp8.report(loaded)
    assert sorted(report.layers) == quantized
    left = {f"{name}.weight" for name in {"0", "2"} - set(quantized)}
    assert set(report.dequantized) == left
    assert "decoded to float" in str(report) or not left


def test_an_excluded_convolution_and_embedding_are_decoded(tmp_path):
    net = lambda: nn.ModuleDict({"conv": nn.Conv2d(4, 8, 3), "emb": nn.Embedding(6, 4)})  # noqa: E731
    written = draft(seeded(net), ["conv", "emb"], WEIGHT_ONLY, channel=True)
    loaded = anyfp8.load(on_meta(net), written.write(tmp_path), exclude="*")
    for name in ("conv", "emb"):
        assert_same_bytes(loaded[name].weight.detach(), written.weight(name))


def test_excluded_layers_are_decoded_into_the_models_dtype(tmp_path):
    written = draft(mlp(), ["0", "2"])
    loaded = anyfp8.load(stale(mlp()).bfloat16(), written.write(tmp_path), exclude="0")
    assert_same_bytes(loaded[0].weight.detach(), written.weight("0").bfloat16())


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_shared_layer_is_excluded_by_either_name(tmp_path, name):
    written = draft(seeded(Shared), ["first"])
    written.tensors = {n: t for n, t in written.tensors.items() if not n.startswith("second")}
    loaded = anyfp8.load(stale(seeded(Shared)), written.write(tmp_path), exclude=name)
    assert type(loaded.first) is nn.Linear


# --- strict ---
@pytest.mark.parametrize("place", PLACES)
def test_lenient_loading_skips_and_reports(tmp_path, place):
    written = draft(mlp(), ["0", "2"], DYNAMIC)
    written.tensors["head.bias"] = torch.ones(3)
    written.tensors["0.output_scale"] = torch.ones(1)
    model = target(mlp, place)
    if place == "real":
        del written.tensors["2.bias"]
    loaded = anyfp8.load(model, written.write(tmp_path), strict=False)
    report = anyfp8.report(loaded)
    skipped = {"head.bias", "0.output_scale"} | ({"2.bias"} if place == "real" else set())
    assert set(report.skipped) == skipped
    assert all(report.skipped.values())
    for name in skipped:
        assert name in str(report)
    if place == "real":
        assert_same_bytes(loaded[2].bias.detach(), torch.full((8,), 0.123))


def test_lenient_loading_skips_quantized_layers_of_another_model(tmp_path):
    written = draft(seeded(lambda: nn.Sequential(*mlp(), nn.Linear(8, 8))), ["0", "2", "3"])
    loaded = anyfp8.load(stale(mlp()), written.write(tmp_path), strict=False)
    assert {"3.weight", "3.bias"} <= set(anyfp8.report(loaded).skipped)
    assert list(anyfp8.report(loaded).layers) == ["0", "2"]


# --- dtype and device ---
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtype_is_that_of_plain_tensors_and_of_decoded_weights(tmp_path, dtype, place):
    make = lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Doubling(8, 8), nn.Linear(8, 8))  # noqa: E731
    written = draft(seeded(make), ["0", "2", "3"], DYNAMIC)
    loaded = anyfp8.load(target(make, place), written.write(tmp_path), dtype=dtype, exclude="3")
    for name, tensor in (*loaded.named_parameters(), *loaded[1].named_buffers("1")):
        if tensor.is_floating_point() and "weight_scale" not in name:
            assert tensor.dtype == dtype, name
    assert loaded[1].num_batches_tracked.dtype == torch.int64
    assert loaded[0].weight.dtype == loaded[2].weight.dtype == loaded[3].weight.dtype == dtype
    assert_same_bytes(loaded[0].weight_codes, written.tensors["0.weight"].view(torch.uint8))
    assert loaded[0].weight_scale.dtype == torch.float32
    for i in (0, 2, 3):
        exact = written.tensors[f"{i}.weight"].double() * written.tensors[f"{i}.weight_scale"].double()
        assert_close(loaded[i].weight.detach().double(), exact, {torch.float64: 1e-7}.get(dtype, 4e-3))
    assert_same_bytes(loaded[1].weight.detach(), written.tensors["1.weight"].to(dtype))
    assert run(loaded, X.to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_keeps_its_own_dtype(tmp_path, dtype):
    written = draft(mlp(), ["0"], STATIC)
    loaded = anyfp8.load(stale(mlp()).to(dtype), written.write(tmp_path))
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert loaded[0].weight.dtype == dtype
    assert_same_bytes(loaded[2].weight.detach(), written.tensors["2.weight"].to(dtype))
    out = run(loaded, X.to(dtype))
    assert out.dtype == dtype
    assert_close(out.float(), run(oracle(mlp(), written), X.to(dtype).float()), 2e-2)


def test_dtype_leaves_non_persistent_buffers_alone(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("inv_freq", torch.linspace(0, 1, 4), persistent=False)

    loaded = anyfp8.load(stale(seeded(Net)), draft(seeded(Net), ["fc"]).write(tmp_path), dtype=torch.bfloat16)
    assert_same_bytes(loaded.inv_freq, torch.full((4,), 0.123))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")], ids=repr)
def test_device(tmp_path, device, place):
    written = draft(mlp(), ["0", "2"])
    loaded = anyfp8.load(target(mlp, place), written.write(tmp_path), device=device)
    assert_holds(loaded, written, ["0", "2"])


@pytest.mark.parametrize("place", PLACES)
def test_a_default_dtype_or_device_at_load_time_changes_nothing(tmp_path, place):
    make = lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), Doubling(8, 8), nn.Linear(8, 8))  # noqa: E731
    written = draft(seeded(make), ["0", "2"])
    del written.tensors["1.num_batches_tracked"], written.tensors["2.input_scale"]
    written.layers["2"] = WEIGHT_ONLY
    model = target(make, place)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            anyfp8.load(model, written.write(tmp_path))
    finally:
        torch.set_default_dtype(torch.float32)
    assert not [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    assert model[1].num_batches_tracked.item() == 0
    assert_close(model[2].weight, written.weight("2"), 0)
    assert_same_bytes(model[3].weight.detach(), written.tensors["3.weight"])
    assert run(model, X).dtype == torch.float32


# --- ties and sharing ---
def tied_draft(kind):
    """What a file may hold of a tied pair."""
    original = seeded(Tied)
    half = Draft({"emb.weight": original.emb.weight.detach() / 2}, {})
    fp8 = {name: draft(original, [name], WEIGHT_ONLY) for name in ("emb", "head")}
    only = lambda name, d: Draft({n: t for n, t in d.tensors.items() if n.startswith(name)}, d.layers)  # noqa: E731
    return {
        "both": draft(original, []),
        "emb": only("emb", draft(original, [])),
        "head": only("head", draft(original, [])),
        "fp8 head": only("head", fp8["head"]),
        "fp8 emb": only("emb", fp8["emb"]),
        "fp8 both": draft(original, ["emb", "head"], WEIGHT_ONLY),
        "fp8 head, float emb": Draft(only("head", fp8["head"]).tensors | half.tensors, fp8["head"].layers),
        "fp8 emb, float head": Draft(
            only("emb", fp8["emb"]).tensors | {"head.weight": half.tensors["emb.weight"]}, fp8["emb"].layers
        ),
    }[kind]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["both", "emb", "head"])
def test_tied_float_weights_stay_tied(tmp_path, kind, place):
    model = anyfp8.load(target(Tied, place), tied_draft(kind).write(tmp_path))
    assert model.head.weight is model.emb.weight
    assert isinstance(model.head.weight, nn.Parameter)
    assert_same_bytes(model.emb.weight.detach(), seeded(Tied).emb.weight.detach())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["fp8 head", "fp8 emb", "fp8 both"])
def test_tied_fp8_weights_serve_both(tmp_path, kind, place):
    written = tied_draft(kind)
    model = anyfp8.load(target(Tied, place), written.write(tmp_path))
    assert (type(model.emb), type(model.head)) == (FP8Embedding, FP8Linear)
    want = written.weight("emb" if "emb" in kind else "head") if kind != "fp8 both" else written.weight("head")
    assert_close(model.emb.weight, want, 0)
    assert_close(model.head.weight, want, 0)
    if kind != "fp8 both":
        assert model.emb.weight_codes.data_ptr() == model.head.weight_codes.data_ptr(), "the codes are there twice"
    index = torch.arange(12)
    assert_close(run(model, index), nn.functional.linear(want, want), 1e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_an_fp8_head_with_a_quantized_input_gives_the_embedding_its_weight(tmp_path, scheme, place):
    written = draft(seeded(Tied), ["head"], SCHEMES[scheme], input_scale=0.003)
    del written.tensors["emb.weight"]
    model = anyfp8.load(target(Tied, place), written.write(tmp_path))
    weight = written.weight("head")
    assert_close(run(model.emb, torch.arange(12)), weight, 0)
    assert_close(run(model.head, X), run(oracle(seeded(Tied), written).head, X), 1e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["fp8 head, float emb", "fp8 emb, float head"])
def test_tied_weights_of_two_dtypes_are_each_the_files(tmp_path, kind, place):
    written = tied_draft(kind)
    model = anyfp8.load(target(Tied, place), written.write(tmp_path))
    fp8, plain = ("head", "emb") if kind.startswith("fp8 head") else ("emb", "head")
    assert type(getattr(model, plain)) in (nn.Linear, nn.Embedding)
    assert_same_bytes(getattr(model, plain).weight.detach(), written.tensors[f"{plain}.weight"])
    assert_close(getattr(model, fp8).weight, written.weight(fp8), 0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["fp8 head", "fp8 emb"])
def test_tied_weights_that_are_decoded_stay_tied(tmp_path, kind, place):
    written = tied_draft(kind)
    model = anyfp8.load(target(Tied, place), written.write(tmp_path), exclude="*")
    assert model.head.weight is model.emb.weight
    assert_same_bytes(model.emb.weight.detach(), written.weight(kind[4:]))


@pytest.mark.parametrize("place", PLACES)
def test_two_fp8_weights_that_the_model_ties_but_the_file_does_not(tmp_path, place):
    written = draft(seeded(Tied), ["emb", "head"], WEIGHT_ONLY)
    written.tensors["emb.weight_scale"] = written.tensors["emb.weight_scale"] * 2  # the same codes
    model = anyfp8.load(target(Tied, place), written.write(tmp_path))
    assert_close(model.emb.weight, written.weight("emb"), 0)
    assert_close(model.head.weight, written.weight("head"), 0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("names", [["first"], ["second"], ["first", "second"]], ids=str)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "float"])
def test_a_shared_layer_is_loaded_under_any_of_its_names(tmp_path, names, fp8, place):
    written = draft(seeded(Shared), names if fp8 else [], STATIC)
    written.tensors = {n: t for n, t in written.tensors.items() if n.split(".")[0] in names}
    model = anyfp8.load(target(Shared, place), written.write(tmp_path))
    assert model.first is model.second
    assert type(model.first) is (FP8Linear if fp8 else nn.Linear)
    full = draft(seeded(Shared), ["first"] if fp8 else [], STATIC)
    full.tensors = {n: t for n, t in full.tensors.items() if n.startswith("first")}
    assert_close(run(model, X), run(oracle(seeded(Shared), full), X), 1e-5)


def test_three_tied_weights_of_which_one_is_fp8(tmp_path):
    def make():
        net = nn.ModuleDict({n: nn.Linear(8, 8, bias=False) for n in "abc"})
        net["b"].weight = net["c"].weight = net["a"].weight
        return net

    written = draft(seeded(make), ["a"], WEIGHT_ONLY)
    del written.tensors["c.weight"]
    written.tensors["b.weight"] = torch.ones(8, 8)
    model = anyfp8.load(on_meta(make), written.write(tmp_path))
    assert_close(model["a"].weight, written.weight("a"), 0)
    assert model["b"].weight is model["c"].weight
    assert_same_bytes(model["c"].weight.detach(), torch.ones(8, 8))


# --- buffers ---
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stored", [True, False], ids=["count in file", "count absent"])
def test_buffers_and_the_batch_counter(tmp_path, stored, place):
    make = lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))  # noqa: E731
    original = seeded(make)
    original[1].running_mean.add_(2), original[1].running_var.mul_(3), original[1].num_batches_tracked.fill_(7)
    written = draft(original, ["0"], WEIGHT_ONLY)
    if not stored:
        del written.tensors["1.num_batches_tracked"]
    model = anyfp8.load(target(make, place), written.write(tmp_path))
    assert_holds(model, written, ["0"])
    assert model[1].num_batches_tracked.item() == (7 if stored else 0)
    x = randn(2, 3, 4, 4)
    assert_close(run(model, x), run(oracle(original, written), x), 1e-5)


class Rotary(nn.Module):
    """A layer and a table that no checkpoint holds."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("table", self._table(), persistent=False)
        self.register_buffer("steps", torch.arange(3), persistent=False)

    @staticmethod
    def _table():
        return torch.linspace(1, 2, 8)

    def init_non_persistent_buffers(self):
        self.table = self._table()
        self.steps.copy_(torch.arange(3))

    def forward(self, x):
        return self.fc(x * self.table)


@pytest.mark.parametrize("wrap", [False, True])
def test_meta_buffers_are_filled_by_the_modules_own_hook(tmp_path, wrap):
    original = seeded(Rotary)
    written = draft(original, ["fc"])
    make = (lambda: Within("inner", nn.Sequential(Rotary()))) if wrap else Rotary
    model = anyfp8.load(on_meta(make), written.write(tmp_path))
    inner = model.inner[0] if wrap else model
    assert_same_bytes(inner.table, original.table)
    assert_same_bytes(inner.steps, original.steps)
    assert "table" not in model.state_dict()
    assert_close(run(model, X), run(oracle(original, written), X), 1e-5)


def test_the_hook_may_look_at_the_modules_parameters(tmp_path):
    class Net(Rotary):
        def init_non_persistent_buffers(self):  # as timm's swin does
            weight = self.fc.weight
            self.table = self._table().to(weight.device, weight.dtype)
            self.steps = torch.arange(3, device=self.fc.bias.device)

    original = seeded(Net)
    model = anyfp8.load(on_meta(Net), draft(original, ["fc"]).write(tmp_path))
    assert_same_bytes(model.table, original.table)
    assert_same_bytes(model.steps, original.steps)


def test_the_hook_is_left_alone_where_buffers_are_real(tmp_path):
    model = stale(seeded(Rotary))
    anyfp8.load(model, draft(seeded(Rotary), ["fc"]).write(tmp_path))
    assert_same_bytes(model.table, torch.full((8,), 0.123))


def test_timm_models_build_on_meta(tmp_path):
    timm = pytest.importorskip("timm")
    make = lambda: timm.create_model(  # noqa: E731
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=16, depths=(2, 1), num_heads=(1, 2), num_classes=4
    )
    original = seeded(make)
    names = [n for n, m in original.named_modules() if type(m) is nn.Linear]
    written = draft(original, names, DYNAMIC, channel=True)
    model = anyfp8.load(on_meta(make), written.write(tmp_path))
    x = randn(1, 3, 56, 56)
    assert_holds(model, written, names)
    assert_close(run(model, x), run(oracle(original, written), x), 1e-3)


# --- checkpoints without FP8, and other sources ---
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("source", ["folder", "mapping"])
def test_a_plain_checkpoint_loads_as_it_is(tmp_path, source, place):
    make = lambda: nn.Sequential(mlp(), nn.BatchNorm1d(8))  # noqa: E731
    original = seeded(make)
    tensors = original.state_dict()
    write_tensors(tmp_path, tensors)
    model = anyfp8.load(target(make, place), tensors if source == "mapping" else tmp_path)
    assert_holds(model, Draft(tensors, {}), [])
    assert {p.requires_grad for p in model.parameters()} == {True}
    assert anyfp8.report(model).dialect == "plain"
    assert anyfp8.report(model).layers == {}
    assert_close(run(model, X), run(original, X), 0)


def test_a_mapping_may_hold_views_and_transposed_tensors():
    tensors = mlp().state_dict()
    tensors["0.weight"] = tensors["0.weight"].t().contiguous().t()
    tensors["2.weight"] = tensors["2.weight"].repeat(1, 2)[:, ::2][:, :16].clone().as_strided((8, 16), (16, 1))
    tensors["0.bias"] = torch.cat([tensors["0.bias"], torch.ones(3)])[:-3]
    model = anyfp8.load(stale(mlp()), tensors)
    assert_holds(model, Draft(tensors, {}), [])


def test_a_real_model_shares_no_memory_with_the_mapping():
    tensors = {name: tensor.clone() for name, tensor in mlp().state_dict().items()}
    model = anyfp8.load(stale(mlp()), tensors)
    with torch.no_grad():
        model[0].weight.zero_()
    assert_same_bytes(tensors["0.weight"], mlp()[0].weight.detach())


@pytest.mark.parametrize("source", ["folder", "str", "index", "file", "subfolder"])
def test_sources(tmp_path, source):
    folder = tmp_path / "repo" / "unet"
    written = draft(mlp(), ["0", "2"])
    written.write(folder, shards=1 if source == "file" else 3)
    given = {
        "folder": folder,
        "str": str(folder),
        "index": folder / "model.safetensors.index.json",
        "file": folder / "model.safetensors",
        "subfolder": tmp_path / "repo",
    }[source]
    loaded = anyfp8.load(stale(mlp()), given, subfolder="unet" if source == "subfolder" else "")
    assert_holds(loaded, written, ["0", "2"])


def test_pickles_beside_complete_safetensors_are_reported(tmp_path):
    written = draft(mlp(), ["0", "2"])
    written.write(tmp_path)
    (tmp_path / "optimizer.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    loaded = anyfp8.load(stale(mlp()), tmp_path)
    assert list(anyfp8.report(loaded).ignored_files) == ["optimizer.bin"]
    assert "optimizer.bin" in str(anyfp8.report(loaded))


def test_loading_writes_nothing_to_the_checkpoint(tmp_path):
    folder = draft(mlp(), ["0", "2"]).write(tmp_path)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    model = anyfp8.load(on_meta(mlp), folder)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert_holds(anyfp8.load(on_meta(mlp), folder), draft(mlp(), ["0", "2"]), ["0", "2"])


# --- loading over what was loaded ---
@pytest.mark.parametrize("place", PLACES)
def test_loading_twice_over_other_schemes(tmp_path, place):
    model = target(mlp, place)
    for i, scheme in enumerate(["static", "weight_only", "dynamic", "static"]):
        written = draft(mlp(seed=i), ["0", "2"] if i % 2 else ["0"], SCHEMES[scheme], channel=bool(i % 2))
        if i > 1:
            written = draft(mlp(seed=i), ["0", "2"], SCHEMES[scheme], channel=bool(i % 2))
        model = anyfp8.load(model, written.write(tmp_path / str(i)))
        assert_holds(model, written, written.layers)
        assert_close(run(model, X), run(oracle(mlp(seed=i), written), X), 1e-5)


def test_loading_over_fp8_layers_and_leaving_some_out_decodes_them(tmp_path):
    model = anyfp8.load(stale(mlp()), draft(mlp(), ["0", "2"]).write(tmp_path / "a"))
    written = draft(mlp(seed=1), ["0", "2"])
    model = anyfp8.load(model, written.write(tmp_path / "b"), exclude="0")
    assert type(model[0]) is nn.Linear
    assert_same_bytes(model[0].weight.detach(), written.weight("0"))
    assert_close(model[2].weight, written.weight("2"), 0)


def test_loading_over_decoded_layers_quantizes_them(tmp_path):
    written = draft(mlp(), ["0", "2"])
    model = anyfp8.load(stale(mlp()), written.write(tmp_path), exclude="*")
    assert_holds(anyfp8.load(model, tmp_path), written, ["0", "2"])


@pytest.mark.parametrize("place", PLACES)
def test_loading_over_a_parametrized_layer(tmp_path, place):
    make = lambda: nn.Sequential(Doubling(8, 8))  # noqa: E731
    model = target(make, place)
    for seed in range(3):
        written = draft(seeded(make, seed), ["0"], DYNAMIC)
        model = anyfp8.load(model, written.write(tmp_path / str(seed)))
        assert_close(model[0].weight, written.weight("0"), 0)
        assert_close(run(model, X), 2 * nn.functional.linear(X, written.weight("0"), written.tensors["0.bias"]), 1e-6)
    assert len(list(model.modules())) == len(list(anyfp8.load(target(make, place), tmp_path / "0").modules()))


def test_a_dequantized_model_can_be_loaded_again(tmp_path):
    written = draft(mlp(), ["0", "2"])
    model = anyfp8.load(stale(mlp()), written.write(tmp_path))
    model = anyfp8.dequantize(model)
    assert_holds(anyfp8.load(model, tmp_path), written, ["0", "2"])


# --- tensors of the model that are called like scales ---
class WithScales(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_parameter(name, nn.Parameter(torch.tensor([2.0, 3.0])))
        self.register_buffer("input_zero_point", torch.tensor(4.0))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "float"])
@pytest.mark.parametrize(
    "name", ["k_scale", "v_scale", "logit_scale", "scale", "input_scale", "weight_scale", "output_scale", "_amax"]
)
def test_a_models_own_tensors_may_be_called_like_scales(tmp_path, name, fp8, place):
    make = functools.partial(WithScales, name)
    written = draft(seeded(make), ["fc"] if fp8 else [])
    model = anyfp8.load(target(make, place), written.write(tmp_path))
    assert_holds(model, written, written.layers)
    assert name in dict(model.named_parameters())
    assert anyfp8.report(model).skipped == {}


def test_a_plain_file_with_names_like_scales():
    tensors = seeded(lambda: WithScales("k_scale")).state_dict()
    model = anyfp8.load(on_meta(lambda: WithScales("k_scale")), tensors)
    assert_holds(model, Draft(tensors, {}), [])


# --- layers that no FP8 layer may replace ---
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_subclass_with_its_own_forward_is_parametrized_and_reported(tmp_path, scheme, place):
    make = lambda: nn.Sequential(nn.Linear(8, 8), Doubling(8, 8))  # noqa: E731
    written = draft(seeded(make), ["0", "1"], SCHEMES[scheme])
    model = anyfp8.load(target(make, place), written.write(tmp_path))
    assert isinstance(model[1], Doubling)
    assert parametrize.is_parametrized(model[1], "weight")
    assert_close(model[1].weight, written.weight("1"), 0)
    out = run(model[1], X)
    assert_close(out, 2 * nn.functional.linear(X, written.weight("1"), written.tensors["1.bias"]), 1e-6)
    report = anyfp8.report(model)
    assert set(report.layers) == {"0", "1.weight"}
    assert "Doubling" in str(report)
    if scheme != "weight_only":
        assert any("1" in note and "not quantized" in note for note in report.notes)
    codes = [b for b in model[1].buffers() if b.dtype == torch.uint8]
    assert len(codes) == 1
    assert_same_bytes(codes[0], written.tensors["1.weight"].view(torch.uint8))


def test_a_forward_replaced_on_the_instance_is_respected(tmp_path):
    written = draft(mlp(), ["0", "2"], DYNAMIC)
    model = stale(mlp())
    inner = model[0].forward
    model[0].forward = lambda x: 3 * inner(x)
    anyfp8.load(model, written.write(tmp_path))
    want = 3 * nn.functional.linear(X, written.weight("0"), written.tensors["0.bias"])
    assert_close(run(model[0], X), want, 1e-6)
    assert any("instance" in layer.note for layer in anyfp8.report(model).layers.values())


class OneWeight(nn.Module):
    """A weight without any layer around it."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [lambda: OneWeight(8), lambda: OneWeight(5, 8), lambda: nn.LayerNorm(8)])
def test_weights_of_unknown_modules_are_decoded_on_access(tmp_path, make, place):
    net = lambda: nn.Sequential(make())  # noqa: E731
    original = seeded(net)
    written = draft(original, ["0"], WEIGHT_ONLY)
    model = anyfp8.load(target(net, place), written.write(tmp_path))
    assert_close(model[0].weight, written.weight("0"), 0)
    assert_close(run(model, X), run(oracle(original, written), X), 1e-6)
    assert list(anyfp8.report(model).layers) == ["0.weight"]


def test_an_embedding_with_max_norm_is_parametrized(tmp_path):
    make = lambda: nn.Sequential(nn.Embedding(6, 4, max_norm=1.0))  # noqa: E731
    written = draft(seeded(make), ["0"], WEIGHT_ONLY)
    model = anyfp8.load(stale(seeded(make)), written.write(tmp_path))
    assert "max_norm" in str(anyfp8.report(model))
    assert_close(model[0].weight, written.weight("0"), 0)


@pytest.mark.parametrize("place", PLACES)
def test_multihead_attention(tmp_path, place):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.mha = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            x = self.inp(x)
            return self.mha(x, x, x)[0]

    original = seeded(Net)
    written = draft(original, ["inp", "mha.out_proj"], DYNAMIC)
    model = anyfp8.load(target(Net, place), written.write(tmp_path))
    assert isinstance(model.mha.out_proj, FP8Linear)
    x = randn(2, 5, 8)
    # attention reads out_proj.weight and never calls the layer, so its input is not quantized
    as_written = Draft(written.tensors, written.layers | {"mha.out_proj": WEIGHT_ONLY})
    assert_close(run(model, x), run(oracle(original, as_written), x), 1e-5)
    assert any("mha.out_proj" in note for note in anyfp8.report(model).notes)


@pytest.mark.parametrize("training", [False, True])
def test_a_transformer_encoder_layer_takes_no_path_past_the_fp8_layers(tmp_path, training):
    make = lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)  # noqa: E731
    original = seeded(make)
    written = draft(original, ["linear1", "linear2"], STATIC)
    model = anyfp8.load(stale(original), written.write(tmp_path)).train(training)
    x = randn(2, 5, 8)
    assert_close(run(model, x), run(oracle(original, written).train(training), x), 1e-5)


# --- parameters of odd kinds ---
def test_parameters_that_refuse_to_be_written_in_place(tmp_path):
    written = draft(mlp(), ["0"])
    with torch.inference_mode():
        model = mlp(seed=3)
    loaded = anyfp8.load(model, written.write(tmp_path))
    assert_holds(loaded, written, ["0"])
    model = stale(mlp())
    model[2].bias = nn.Parameter(torch.zeros(1).expand(8))
    assert_holds(anyfp8.load(model, tmp_path), written, ["0"])


@pytest.mark.parametrize(
    "stored", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64], ids=str
)
@pytest.mark.parametrize("wanted", [torch.int64, torch.int32], ids=str)
def test_integers_of_other_widths_that_fit(stored, wanted):
    model = nn.Module()
    model.register_buffer("ids", torch.zeros(3, dtype=wanted))
    anyfp8.load(model, {"ids": torch.tensor([0, 1, 100], dtype=torch.int64).to(stored)})
    assert model.ids.tolist() == [0, 1, 100]
    assert model.ids.dtype == wanted


@pytest.mark.parametrize("place", PLACES)
def test_modules_with_flat_copies_of_their_weights(place):
    """An LSTM keeps a list of its parameters beside them."""
    original = seeded(lambda: nn.LSTM(8, 8, num_layers=2))
    model = anyfp8.load(target(lambda: nn.LSTM(8, 8, num_layers=2), place), original.state_dict())
    assert_same_bytes(run(model, X)[0], run(original, X)[0])


def test_parameter_lists_and_foreign_parametrizations(tmp_path):
    def make():
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        return nn.ModuleDict({"list": nn.ParameterList([torch.randn(3), torch.randn(2)]), "normed": normed})

    original = seeded(make)
    model = anyfp8.load(stale(original), original.state_dict())
    assert_same_bytes(model["list"][1].detach(), original["list"][1].detach())
    assert_same_bytes(model["normed"].weight.detach(), original["normed"].weight.detach())


def test_a_traced_model(tmp_path):
    written = draft(mlp(), ["0", "2"])
    model = torch.fx.symbolic_trace(stale(mlp()))
    anyfp8.load(model, written.write(tmp_path))
    assert_close(run(model, X), run(oracle(mlp(), written), X), 1e-5)


def test_a_model_that_is_partly_on_meta(tmp_path):
    written = draft(mlp(), ["0"])
    model = stale(mlp())
    model[2].to("meta")
    kept = model[0].bias
    assert_holds(anyfp8.load(model, written.write(tmp_path)), written, ["0"])
    assert model[0].bias is kept


def test_gradients_survive(tmp_path):
    model = stale(mlp())
    model(X).sum().backward()
    grad = model[2].bias.grad
    anyfp8.load(model, draft(mlp(), ["0", "2"]).write(tmp_path))
    assert model[2].bias.grad is grad


def test_under_no_grad_and_inference_mode(tmp_path):
    written = draft(mlp(), ["0", "2"], DYNAMIC)
    folder = written.write(tmp_path)
    with torch.inference_mode():
        inside = anyfp8.load(on_meta(mlp), folder)
    assert_close(run(inside, X), run(oracle(mlp(), written), X), 1e-5)
    x = X.clone().requires_grad_()
    with torch.no_grad():
        model = anyfp8.load(stale(mlp()), folder)
    model(x).sum().backward()
    assert x.grad.abs().sum() > 0


# --- progress ---
def test_no_bar_unless_on_a_terminal(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    folder = draft(mlp(), ["0", "2"]).write(tmp_path)
    anyfp8.load(stale(mlp()), folder)
    assert capfd.readouterr() == ("", "")
    anyfp8.load(stale(mlp()), folder, progress=False)
    assert capfd.readouterr() == ("", "")
    anyfp8.load(stale(mlp()), folder, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "100%" in err or "B/s" in err


def test_the_bar_of_a_terminal(tmp_path, monkeypatch, capsys):
    folder = draft(mlp(), ["0", "2"]).write(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    anyfp8.load(stale(mlp()), folder)
    assert "B" in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    anyfp8.load(stale(mlp()), folder)
    assert capsys.readouterr().err == ""


def test_without_a_standard_error(tmp_path, monkeypatch):
    written = draft(mlp(), ["0", "2"])
    monkeypatch.setattr(sys, "stderr", None)
    loaded = anyfp8.load(stale(mlp()), written.write(tmp_path))
    assert_holds(loaded, written, ["0", "2"])


# --- plan and report ---
@pytest.mark.parametrize("place", PLACES)
def test_a_plan_touches_nothing_and_says_what_load_does(tmp_path, place):
    make = lambda: nn.Sequential(nn.Linear(8, 8), Doubling(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))  # noqa: E731
    written = draft(seeded(make), ["0", "1", "2"], DYNAMIC, channel=True)
    model = target(make, place)
    before = Snapshot(model, *([X] if place == "real" else []))
    plan = anyfp8.plan(model, written.write(tmp_path), exclude="2")
    before.assert_unchanged()
    assert plan.problems == ()
    plan.raise_problems()
    assert {n: dict(s) for n, s in plan.layer_config.items()} == {"0": DYNAMIC | {"tile": (1, -1), "act_tile": (1, -1)}}
    text = str(plan)
    for line in (
        r"Replace .*\b0\.weight.*e4m3fn per channel, input dynamic e4m3fn per token",
        r"Parametrize .*\b1\.weight.*Doubling",
        r"Dequantize .*\b2\.weight.*exclude",
        r"Assign 5 plain tensors",
    ):
        assert re.search(line, text), f"{line!r} is not in\n{text}"


def test_a_plan_folds_names_and_shows_each_scheme(tmp_path):
    make = lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])  # noqa: E731
    written = draft(seeded(make), list("0123"), STATIC)
    other = draft(seeded(make), ["5"], WEIGHT_ONLY, channel=True)
    written.layers |= other.layers
    written.tensors |= {n: t for n, t in other.tensors.items() if n[0] == "5"}
    text = str(anyfp8.plan(seeded(make), written.write(tmp_path)))
    assert "{0…3}.weight" in text
    assert "e4m3fn per tensor, input static e4m3fn per tensor" in text
    assert "e4m3fn per channel, weight-only" in text


def test_a_plan_lists_every_problem_and_raises_none(tmp_path):
    written = draft(mlp(), ["0", "2"])
    del written.tensors["0.weight_scale"], written.tensors["2.bias"]
    written.tensors["extra"] = torch.ones(1)
    plan = anyfp8.plan(on_meta(mlp), written.write(tmp_path))
    assert {p.name for p in plan.problems} == {"0.weight_scale", "2.bias", "extra"}
    assert all(p.name in str(plan) for p in plan.problems)
    with pytest.raises(anyfp8.LoadError, match=r"3 problems") as caught:
        plan.raise_problems()
    assert caught.value.problems == plan.problems


def test_the_report(tmp_path):
    make = lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], Doubling(8, 8), nn.LayerNorm(8))  # noqa: E731
    written = draft(seeded(make), list("0123"), STATIC)
    written.tensors["k_scale"] = torch.ones(1)
    model = anyfp8.load(stale(seeded(make)), written.write(tmp_path), exclude="2")
    report = anyfp8.report(model)
    assert report.dialect == "anyfp8"
    assert str(tmp_path) in report.source
    assert set(report.layers) == {"0", "1", "3.weight"}
    assert report.layers["0"].backend == "emulated"
    assert "native" in report.layers["0"].refusals
    assert report.layers["0"].nbytes == 64 + 4 + 4
    assert set(report.skipped) == {"k_scale"}
    assert report.assigned == 6
    as_json = json.loads(json.dumps(report.to_dict()))
    assert as_json["layers"]["0"]["scheme"] == STATIC | {"act_tile": [-1, -1]}
    assert as_json["dequantized"] == {"2.weight": "left out by include/exclude"}
    text = str(report)
    for part in ("{0,1}", "emulated", "k_scale", "2.weight", "Doubling", "per tensor"):
        assert part in text


def test_the_report_follows_the_model(tmp_path):
    model = anyfp8.load(stale(mlp()), draft(mlp(), ["0", "2"]).write(tmp_path))
    anyfp8.set_backend(model, "dequantized")
    assert {layer.backend for layer in anyfp8.report(model).layers.values()} == {"dequantized"}
    assert set(anyfp8.report(copy.deepcopy(model)).layers) == {"0", "2"}
    anyfp8.dequantize(model)
    with pytest.raises(anyfp8.AnyFP8Error, match="not loaded by anyfp8"):
        anyfp8.report(model)


def test_no_report_without_a_load():
    with pytest.raises(anyfp8.AnyFP8Error, match="Sequential was not loaded"):
        anyfp8.report(mlp())


def test_a_manifest_is_json(tmp_path):
    written = draft(mlp(), ["0", "2"])
    written.tensors["k_scale"] = torch.ones(1)
    manifest = anyfp8.inspect(written.write(tmp_path))
    as_json = json.loads(json.dumps(manifest.to_dict()))
    assert sorted(as_json["layer_config"]) == ["0", "2"]
    assert list(as_json["exceptions"]) == ["k_scale"]
    assert as_json["bytes"]["total"] == sum(t.nbytes for t in written.tensors.values())
    assert "{0,2}" in str(manifest)


# --- backends ---
@pytest.mark.parametrize("backend", ["emulated", "native", "dequantized", "auto"])
def test_the_backend_is_chosen_at_load(tmp_path, backend):
    make = lambda: nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 16))  # noqa: E731
    written = draft(seeded(make), ["0"], WEIGHT_ONLY)
    other = draft(seeded(make), ["1"], STATIC)
    written.layers |= other.layers
    written.tensors |= {n: t for n, t in other.tensors.items() if n[0] == "1"}
    model = anyfp8.load(stale(seeded(make)), written.write(tmp_path), backend=backend)
    assert model[1].backend.name == ("emulated" if backend == "auto" else backend)
    assert anyfp8.report(model).layers["1"].backend == model[1].backend.name
    want = oracle(seeded(make), Draft(written.tensors, written.layers | {"1": WEIGHT_ONLY}))
    if backend != "dequantized":
        want = oracle(seeded(make), written)
    assert_close(run(model, torch.arange(12)), run(want, torch.arange(12)), 1e-5)


# --- values that are unusual but right ---
def test_zero_scales_and_zero_weights(tmp_path):
    written = draft(mlp(), ["0", "2"], STATIC, channel=True)
    written.tensors["0.weight_scale"][3] = 0
    written.tensors["2.weight"] = torch.zeros(8, 16).to(F8)
    model = anyfp8.load(stale(mlp()), written.write(tmp_path))
    assert_close(run(model, X), run(oracle(mlp(), written), X), 1e-5)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_scales_of_other_float_dtypes(tmp_path, stored):
    written = draft(mlp(), ["0", "2"], STATIC)
    for name in [n for n in written.tensors if "scale" in n]:
        written.tensors[name] = written.tensors[name].to(stored)
    for entry in written.layers.values():
        entry["scale_dtype"] = str(stored).removeprefix("torch.")
    model = anyfp8.load(stale(mlp()), written.write(tmp_path))
    assert model[0].weight_scale.dtype == torch.float32
    assert_same_bytes(model[0].weight_scale.reshape(-1), written.tensors["0.weight_scale"].float())
    assert_close(run(model, X), run(oracle(mlp(), written), X), 1e-5)


@pytest.mark.parametrize("kind", ["float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_weights_of_the_other_formats(tmp_path, kind):
    written = draft(mlp(), ["0"], WEIGHT_ONLY)
    written.tensors["0.weight"], written.tensors["0.weight_scale"] = encode(mlp()[0].weight, dtype=getattr(torch, kind))
    written.layers["0"]["weight_dtype"] = kind
    model = anyfp8.load(stale(mlp()), written.write(tmp_path))
    assert_close(model[0].weight, written.weight("0"), 0)
    assert model[0].scheme.weight_dtype == kind != E4M3


@pytest.mark.parametrize(
    ("tile", "shape"),
    [
        ((4, 4), (4, 2)),
        ((3, 5), (6, 2)),
        ((1, 4), (16, 2)),
        ((128, 128), (1, 1)),
        ((16, -1), (1, 1)),
        ((-1, 3), (1, 3)),
    ],
)
def test_tiles(tmp_path, tile, shape):
    original = mlp()
    written = draft(original, ["0"], WEIGHT_ONLY)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5
    written.tensors["0.weight_scale"] = scale
    written.layers["0"]["tile"] = list(tile)
    model = anyfp8.load(stale(original), written.write(tmp_path))
    want = written.tensors["0.weight"].float()
    for (i, j), value in [((i, j), want[i, j]) for i in range(16) for j in range(8)]:
        grid = tuple(0 if t == -1 else n // t for n, t in zip((i, j), tile, strict=True))
        want[i, j] = value * scale[grid]
    assert_close(model[0].weight, want, 0)


def test_the_root_may_own_parameters(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls_token = nn.Parameter(torch.randn(8))
            self.fc = nn.Linear(8, 8)

    written = draft(seeded(Net), ["fc"])
    assert_holds(anyfp8.load(on_meta(Net), written.write(tmp_path)), written, ["fc"])


def test_config_json_of_others_is_no_hindrance(tmp_path):
    written = draft(mlp(), ["0", "2"])
    write_json(written.write(tmp_path) / "config.json", {"model_type": "mlp", "quantization_config": None})
    assert_holds(anyfp8.load(stale(mlp()), tmp_path), written, ["0", "2"])


def test_convolution_layers_are_conv2d_still(tmp_path):
    net = lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False))  # noqa: E731
    written = draft(seeded(net), ["0"], DYNAMIC | {"act_tile": [-1, -1]}, channel=True)
    model = anyfp8.load(on_meta(net), written.write(tmp_path))
    assert type(model[0]) is FP8Conv2d
    assert isinstance(model[0], nn.Conv2d)
    assert model[0].bias is None
    assert join("", "weight") == "weight"
    assert run(model, randn(1, 4, 5, 5)).shape == (1, 8, 5, 5)
