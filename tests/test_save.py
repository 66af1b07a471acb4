"""`save`: what is loaded from the folder is bit for bit what was saved, and the folder appears whole or not at all."""

import functools
import json
import os
import stat

import pytest
import torch
from safetensors import safe_open
from torch import nn

import anyfp8
from anyfp8 import FP8Embedding, FP8Linear
from anyfp8.scheme import PRESETS, QuantizationScheme
from tests.checkpoints import (
    DYNAMIC,
    F8,
    SCHEMES,
    STATIC,
    WEIGHT_ONLY,
    Doubling,
    Nested,
    Shared,
    Snapshot,
    Tied,
    Within,
    X,
    draft,
    mlp,
    on_meta,
    seeded,
    stale,
    write_json,
    write_tensors,
)
from tests.helpers import assert_close, assert_same_bytes, bytes_of, randn


def run(model, *inputs):
    with torch.no_grad():
        return model(*inputs)


def quantized(make, scheme="FP8_STATIC", inputs=X, **options):
    model = seeded(make)
    needs = QuantizationScheme.of(scheme).static
    return anyfp8.quantize(model, scheme, calibration=[inputs] if needs else None, **options)


def assert_same_model(got, want, *inputs):
    """Types, bytes, schemes and outputs."""
    assert [type(m).__name__ for m in got.modules()] == [type(m).__name__ for m in want.modules()]
    before, after = want.state_dict(), got.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert_same_bytes(after[name], value)
    for a, b in zip(got.modules(), want.modules(), strict=True):
        if hasattr(a, "scheme"):
            assert dict(a.scheme) | {"scale_dtype": 0} == dict(b.scheme) | {"scale_dtype": 0}
    if inputs:
        assert_same_bytes(run(got, *inputs), run(want, *inputs))


def files(folder):
    return sorted(p.name for p in folder.iterdir())


# --- round trips ---
@pytest.mark.parametrize("place", ["real", "meta"])
@pytest.mark.parametrize("shard", ["5GB", "1MB", 150])
@pytest.mark.parametrize("scheme", ["FP8_STATIC", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8_WEIGHT_ONLY", "FPW8A16"])
def test_a_round_trip_is_bit_exact(tmp_path, scheme, shard, place):
    model = quantized(Nested, scheme)
    anyfp8.save(model, tmp_path / "out", max_shard_size=shard)
    assert ("model.safetensors.index.json" in files(tmp_path / "out")) == (shard == 150)
    target = on_meta(Nested) if place == "meta" else stale(seeded(Nested))
    assert_same_model(anyfp8.load(target, tmp_path / "out"), model, X)


@pytest.mark.parametrize("scheme", sorted(set(PRESETS) - {"NVFP4"}))
def test_a_round_trip_of_every_preset(tmp_path, scheme):
    make = lambda: nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))  # noqa: E731
    x = randn(3, 64)
    model = quantized(make, scheme, inputs=x)
    anyfp8.save(model, tmp_path / "out")
    assert_same_model(anyfp8.load(stale(seeded(make)), tmp_path / "out"), model, x)


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 4), lambda: nn.Conv2d(8, 4, 1), lambda: nn.Conv1d(8, 4, 3)])
def test_a_bare_layer(tmp_path, make):
    x = randn(2, 8) if isinstance(make(), nn.Linear) else randn(2, 8, *[5] * (make().weight.dim() - 2))
    model = quantized(make, inputs=x)
    anyfp8.save(model, tmp_path / "out")
    again = anyfp8.load(seeded(make, 1), tmp_path / "out")
    assert_same_model(again, model, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(tmp_path, dtype):
    model = quantized(lambda: nn.Sequential(mlp(), nn.LayerNorm(8)).to(dtype), inputs=X.to(dtype))
    anyfp8.save(model, tmp_path / "out")
    again = anyfp8.load(on_meta(lambda: nn.Sequential(mlp(), nn.LayerNorm(8)).to(dtype)), tmp_path / "out")
    assert_same_model(again, model, X.to(dtype))


def test_a_plain_model_and_a_partly_quantized_one(tmp_path):
    anyfp8.save(mlp(), tmp_path / "plain")
    assert_same_model(anyfp8.load(stale(mlp()), tmp_path / "plain"), mlp(), X)
    part = quantized(mlp, include="2")
    anyfp8.save(part, tmp_path / "part")
    assert_same_model(anyfp8.load(on_meta(mlp), tmp_path / "part"), part, X)
    manifest = json.loads((tmp_path / "part" / "anyfp8.json").read_text())
    assert (manifest["ignore"], list(manifest["layer_config"])) == (["0"], ["2"])


def test_a_loaded_model_with_parametrized_and_decoded_layers(tmp_path):
    make = lambda: nn.Sequential(nn.Linear(8, 8), Doubling(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))  # noqa: E731
    written = draft(seeded(make), ["0", "1", "2", "3"], WEIGHT_ONLY)
    model = anyfp8.load(stale(seeded(make)), written.write(tmp_path / "in"), exclude="2")
    anyfp8.save(model, tmp_path / "out")
    again = anyfp8.load(stale(seeded(make)), tmp_path / "out")
    assert_same_model(again, model, X)
    assert list(anyfp8.inspect(tmp_path / "out").layers) == ["0", "1", "3"]


@pytest.mark.parametrize("prepare", ["cast", "moved", "trained"])
def test_what_happened_after_loading_is_saved(tmp_path, prepare):
    model = quantized(mlp)
    if prepare == "cast":
        model = model.bfloat16()
    elif prepare == "moved":
        model = model.to("cpu")
    else:
        model[0].bias.data.add_(1)
    anyfp8.save(model, tmp_path / "out")
    target = mlp().bfloat16() if prepare == "cast" else mlp()
    assert_same_model(anyfp8.load(target, tmp_path / "out"), model, X.bfloat16() if prepare == "cast" else X)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: torch.compile(m, backend="eager"),
        lambda m: nn.DataParallel(m, device_ids=[]),
        lambda m: torch.compile(nn.DataParallel(m, device_ids=[]), backend="eager"),
    ],
)
def test_wrapped_models_are_saved_under_plain_names(tmp_path, wrap):
    model = quantized(mlp)
    anyfp8.save(wrap(model), tmp_path / "out")
    assert sorted(anyfp8.inspect(tmp_path / "out").layers) == ["0", "2"]
    assert_same_model(anyfp8.load(stale(mlp()), tmp_path / "out"), model, X)


def test_buffers(tmp_path):
    make = lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))  # noqa: E731
    model = quantized(make, "FP8_DYNAMIC")
    model[1].running_mean += 3
    model[1].num_batches_tracked += 7
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    anyfp8.save(model, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "scratch" not in list(file.keys())
    again = anyfp8.load(stale(seeded(make)), tmp_path / "out")
    assert again[1].num_batches_tracked.item() == 7
    assert_same_bytes(again[1].running_mean, model[1].running_mean)


def test_views_and_other_strides(tmp_path):
    """Parameters that share one memory, overlap, or are transposed: each is written as it reads."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            flat = torch.randn(40, generator=torch.Generator().manual_seed(3))
            self.a, self.b, self.c = nn.Parameter(flat[:12]), nn.Parameter(flat[12:24]), nn.Parameter(flat[8:20])
            self.t = nn.Parameter(flat[20:40].view(4, 5).t())
            self.same = nn.Parameter(self.a.data)
            self.register_buffer("one", torch.ones(1).expand(6))
            self.register_buffer("none", torch.empty(0))
            self.register_buffer("none_either", torch.empty(0, 3))

    model = Net()
    anyfp8.save(model, tmp_path / "out")
    again = Net()
    for parameter in again.parameters():
        parameter.data = torch.zeros_like(parameter).contiguous()
    again.one = torch.zeros(6)
    anyfp8.load(again, tmp_path / "out")
    for name, value in model.state_dict().items():
        assert_same_bytes(again.state_dict()[name], value)


# --- ties and sharing ---
@pytest.mark.parametrize(("stored", "scheme"), [("emb", "weight_only"), *(("head", scheme) for scheme in SCHEMES)])
def test_tied_fp8_weights_are_written_once_and_keep_their_input_scheme(tmp_path, stored, scheme):
    """The head may round its inputs, the embedding can't: what is written must still say so."""
    written = draft(seeded(Tied), [stored], SCHEMES[scheme], input_scale=0.003)
    written.tensors = {n: t for n, t in written.tensors.items() if n.startswith(stored)}
    model = anyfp8.load(on_meta(Tied), written.write(tmp_path / "in"))
    anyfp8.save(model, tmp_path / "out")
    again = anyfp8.load(on_meta(Tied), tmp_path / "out")
    assert (type(again.emb), type(again.head)) == (FP8Embedding, FP8Linear)
    assert_same_model(again, model, torch.arange(12))
    total = sum(t.nbytes for t in anyfp8.inspect(tmp_path / "out").checkpoint.tensors.values() if t.is_fp8)
    assert total == model.head.weight_codes.numel()


def test_tied_float_weights_are_written_once(tmp_path):
    anyfp8.save(seeded(Tied), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 1
    again = anyfp8.load(on_meta(Tied), tmp_path / "out")
    assert again.head.weight is again.emb.weight
    assert_same_model(again, seeded(Tied), torch.arange(12))


def test_an_untied_pair_is_written_twice(tmp_path):
    model = quantized(Tied, "FP8_DYNAMIC")
    assert type(model.emb) is nn.Embedding
    anyfp8.save(model, tmp_path / "out")
    again = anyfp8.load(on_meta(Tied), tmp_path / "out")
    assert_same_model(again, model, torch.arange(12))


def test_shared_layers_are_written_once(tmp_path):
    model = quantized(Shared)
    anyfp8.save(model, tmp_path / "out")
    assert list(anyfp8.inspect(tmp_path / "out").layers) == ["first"]
    again = anyfp8.load(stale(seeded(Shared)), tmp_path / "out")
    assert again.first is again.second
    assert_same_model(again, model, X)


# --- what is on disk ---
def test_the_files_are_those_of_any_safetensors_checkpoint(tmp_path):
    model = quantized(mlp)
    anyfp8.save(model, tmp_path / "out", max_shard_size=200)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert files(tmp_path / "out") == sorted(["anyfp8.json", "model.safetensors.index.json", *shards])
    assert len(shards) > 1
    stored = {}
    for shard in shards:
        with safe_open(tmp_path / "out" / shard, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert file.metadata()["producer"] == f"anyfp8 {anyfp8.__version__}"
            stored |= {name: file.get_tensor(name) for name in list(file.keys())}
    assert stored.keys() == index["weight_map"].keys()
    assert {n: t.dtype for n, t in stored.items() if n.startswith("0.")} == {
        "0.weight": F8,
        "0.weight_scale": torch.float32,
        "0.input_scale": torch.float32,
        "0.bias": torch.float32,
    }
    assert bytes_of(stored["0.weight"]) == bytes_of(model[0].weight_codes)
    assert_close(stored["0.weight"].float() * stored["0.weight_scale"].reshape(-1, 1), model[0].weight, 0)
    manifest = json.loads((tmp_path / "out" / "anyfp8.json").read_text())
    assert manifest["format"] == "anyfp8"
    assert manifest["version"] == 1
    assert manifest["layer_config"]["0"] == {
        "weight_dtype": "float8_e4m3fn",
        "tile": [1, -1],
        "scale_dtype": "float32",
        "act_dtype": "float8_e4m3fn",
        "act_dynamic": False,
        "act_tile": [-1, -1],
    }


def test_the_folder_obeys_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        anyfp8.save(mlp(), tmp_path / "out")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


@pytest.mark.parametrize("place", ["str", "deep", "empty"])
def test_places(tmp_path, place, monkeypatch):
    path = tmp_path / "a" / "b" / "out" if place == "deep" else tmp_path / "out"
    if place == "empty":
        path.mkdir()
    anyfp8.save(mlp(), str(path) if place == "str" else path)
    assert files(path) == ["anyfp8.json", "model.safetensors"]
    assert files(path.parent) == ["out"], "nothing else is left there"


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    anyfp8.save(mlp(), "out")
    anyfp8.save(mlp(), "out")
    assert files(tmp_path) == ["out"]


# --- replacing ---
def test_an_own_folder_is_replaced_completely(tmp_path):
    anyfp8.save(quantized(mlp), tmp_path / "out", max_shard_size=200)
    second = quantized(mlp, "FP8_DYNAMIC")
    anyfp8.save(second, tmp_path / "out")
    assert files(tmp_path / "out") == ["anyfp8.json", "model.safetensors"]
    assert files(tmp_path) == ["out"]
    assert_same_model(anyfp8.load(stale(mlp()), tmp_path / "out"), second, X)


def test_saving_over_the_folder_that_the_model_came_from(tmp_path):
    """Its tensors are the mapped files themselves."""
    model = quantized(mlp)
    anyfp8.save(model, tmp_path / "out")
    loaded = anyfp8.load(on_meta(mlp), tmp_path / "out")
    for _ in range(2):
        anyfp8.save(loaded, tmp_path / "out")
        assert_same_model(loaded, model, X)
        assert_same_model(anyfp8.load(on_meta(mlp), tmp_path / "out"), model, X)


@pytest.mark.parametrize(
    "foreign",
    [
        {"notes.txt": "mine"},
        {"model.safetensors": "another producer's weights"},
        {"model-00001-of-00002.safetensors": "w", "model.safetensors.index.json": "{}"},
        {"anyfp8.json": '{"format": "anyfp8", "version": 1}', "config.json": "{}"},
        {"anyfp8.json": '{"format": "other"}', "model.safetensors": "w"},
        {"sub/model.safetensors": "w"},
        {".git/HEAD": "ref"},
        {"model.safetensors.index.json": '{"weight_map": {}}'},
        {"config.json": "{}"},
        {"model.safetensors.bak": "w", "anyfp8.json": "{}"},
    ],
    ids=lambda foreign: "+".join(foreign),
)
def test_other_folders_are_refused_and_left_alone(tmp_path, foreign):
    for name, text in foreign.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(text)
    with pytest.raises(anyfp8.AnyFP8Error, match=r"out holds other files"):
        anyfp8.save(mlp(), tmp_path / "out")
    assert {n: (tmp_path / "out" / n).read_text() for n in foreign} == foreign
    assert files(tmp_path) == ["out"]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(anyfp8.AnyFP8Error, match="out is a file"):
        anyfp8.save(mlp(), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


# --- failing ---
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("where", ["second shard", "index", "manifest", "rename"])
def test_a_failure_in_the_middle_leaves_nothing(tmp_path, monkeypatch, where, existing):
    first = quantized(mlp)
    if existing:
        anyfp8.save(first, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} if existing else None
    second = quantized(mlp, "FP8_DYNAMIC")
    snapshot = Snapshot(second, X)
    calls = []

    def failing(real, at, *args, **kwargs):
        calls.append(args)
        if len(calls) == at:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    if where == "second shard":
        import safetensors.torch as module

        monkeypatch.setattr(module, "save_file", functools.partial(failing, module.save_file, 2))
    elif where == "rename":
        path = type(tmp_path)
        real = path.rename
        at = 2 if existing else 1
        monkeypatch.setattr(path, "rename", lambda self, target: failing(real, at, self, target))
    else:
        path, at = type(tmp_path), {"index": 1, "manifest": 2}[where]
        real = path.write_text
        monkeypatch.setattr(path, "write_text", lambda self, *args: failing(real, at, self, *args))
    with pytest.raises(OSError, match="No space left"):
        anyfp8.save(second, tmp_path / "out", max_shard_size=200)
    monkeypatch.undo()
    assert files(tmp_path) == (["out"] if existing else [])
    if existing:
        assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
        assert_same_model(anyfp8.load(stale(mlp()), tmp_path / "out"), first, X)
    snapshot.assert_unchanged()
    anyfp8.save(second, tmp_path / "out", max_shard_size=200)
    assert_same_model(anyfp8.load(stale(mlp()), tmp_path / "out"), second, X)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: on_meta(mlp), r"0\.weight is on the meta device"),
        (
            lambda: nn.ModuleDict({"ok": nn.Linear(2, 2), "bad": on_meta(lambda: nn.LayerNorm(2))}),
            r"bad\.\w+ is on the meta",
        ),
    ],
)
def test_meta_models_are_refused(tmp_path, make, match):
    with pytest.raises(anyfp8.AnyFP8Error, match=match):
        anyfp8.save(make(), tmp_path / "out")
    assert files(tmp_path) == []


def test_bare_fp8_parameters_are_refused(tmp_path):
    model = nn.Module()
    model.raw = nn.Parameter(torch.ones(4).to(F8), requires_grad=False)
    with pytest.raises(anyfp8.AnyFP8Error, match=r"raw is a bare .*float8_e4m3fn"):
        anyfp8.save(model, tmp_path / "out")
    assert files(tmp_path) == []


def test_dtypes_that_safetensors_lacks_are_refused(tmp_path):
    model = nn.Module()
    model.register_buffer("odd", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(anyfp8.AnyFP8Error, match=r"odd .*complex128"):
        anyfp8.save(model, tmp_path / "out")
    assert files(tmp_path) == []


@pytest.mark.parametrize("format", ["gguf", "", "ANYFP8"])
def test_unknown_formats(tmp_path, format):
    with pytest.raises(anyfp8.AnyFP8Error, match=rf"unknown format '{format}'; valid: .*anyfp8"):
        anyfp8.save(mlp(), tmp_path / "out", format=format)
    assert files(tmp_path) == []


def test_a_model_that_cannot_be_told_apart_on_disk_is_not_saved_in_silence(tmp_path):
    """Two layers of one name (a child called `module` behind a wrapper) can't both be `weight`."""
    inner = nn.Linear(4, 4)
    outer = Within("module", inner)
    anyfp8.save(outer, tmp_path / "out")
    again = anyfp8.load(Within("module", nn.Linear(4, 4)), tmp_path / "out")
    assert_same_bytes(again.module.weight.detach(), inner.weight.detach())


def test_saving_changes_nothing(tmp_path):
    model = quantized(Nested)
    snapshot = Snapshot(model, X)
    anyfp8.save(model, tmp_path / "out")
    snapshot.assert_unchanged()


@pytest.mark.parametrize("scheme", [STATIC, DYNAMIC])
def test_a_foreign_checkpoint_becomes_ours(tmp_path, scheme):
    """bfloat16 scales, read once, are float32 from then on: the same values."""
    written = draft(mlp(), ["0", "2"], scheme, channel=True)
    groups = {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
    kind = {"strategy": "tensor"} if scheme is STATIC else {"strategy": "token", "dynamic": True}
    groups["g"]["input_activations"] = {"num_bits": 8, "type": "float"} | kind
    tensors = {n: t.bfloat16() if "scale" in n else t for n, t in written.tensors.items()}
    write_tensors(tmp_path / "in", tensors)
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    write_json(tmp_path / "in" / "config.json", {"quantization_config": config})
    model = anyfp8.load(stale(mlp()), tmp_path / "in")
    anyfp8.save(model, tmp_path / "out")
    assert_same_model(anyfp8.load(stale(mlp()), tmp_path / "out"), model, X)
