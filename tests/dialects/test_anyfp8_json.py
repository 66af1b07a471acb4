"""Our own manifest: what it may say, and that every contradiction in it is an error."""

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8.scheme import PRESETS, QuantizationScheme
from tests.checkpoints import (
    DYNAMIC,
    F8,
    STATIC,
    WEIGHT_ONLY,
    Draft,
    draft,
    mlp,
    seeded,
    stale,
    write_json,
    write_tensors,
)
from tests.helpers import assert_close


def read(folder):
    return anyfp8.inspect(folder)


def test_what_is_read_is_what_is_written_there(tmp_path):
    written = draft(mlp(), ["0", "2"], STATIC, channel=True)
    written.layers["2"] = DYNAMIC
    del written.tensors["2.input_scale"]
    written.tensors["2.weight_scale"] = torch.ones(1)
    written.ignore = ["1"]
    manifest = read(written.write(tmp_path))
    assert (manifest.dialect, manifest.evidence, manifest.problems, manifest.notes) == ("anyfp8", "anyfp8.json", (), ())
    assert {name: scheme.to_dict() for name, scheme in manifest.layer_config.items()} == {
        "0": STATIC | {"tile": [1, -1], "act_tile": [-1, -1]},
        "2": DYNAMIC,
    }
    assert set(manifest.plain) == {"0.bias", "2.bias"}
    assert manifest.exceptions == manifest.unclaimed == {}


@pytest.mark.parametrize("name", ["FP8_STATIC", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "FP8_WEIGHT_ONLY", "FPW8A16"])
def test_a_preset_survives_the_round_trip(tmp_path, name):
    model = seeded(lambda: nn.Sequential(nn.Linear(200, 130)))
    scheme = PRESETS[name]
    grid = [-(-n // t) if t > 0 else 1 for n, t in zip((130, 200), scheme.tile, strict=True)]
    tensors = {"0.weight": torch.zeros(130, 200).to(F8), "0.weight_scale": torch.ones(grid), "0.bias": torch.ones(130)}
    if scheme.static:
        tensors["0.input_scale"] = torch.ones(1)
    write_tensors(tmp_path, tensors)
    manifest = {"format": "anyfp8", "version": 1, "producer": "test 1.0", "ignore": ["head"]}
    write_json(tmp_path / "anyfp8.json", manifest | {"layer_config": {"0": scheme.to_dict()}})
    assert read(tmp_path).layer_config == {"0": scheme}
    assert anyfp8.load(model, tmp_path)[0].scheme == scheme


def test_fields_that_may_be_left_out(tmp_path):
    written = draft(mlp(), ["0"], WEIGHT_ONLY)
    written.write(tmp_path)
    write_json(tmp_path / "anyfp8.json", {"format": "anyfp8", "version": 1, "layer_config": {"0": {}}})
    assert read(tmp_path).layer_config == {"0": QuantizationScheme()}
    assert read(tmp_path).problems == ()


def test_an_empty_list_of_layers_is_a_plain_checkpoint(tmp_path):
    Draft(mlp().state_dict(), {}).write(tmp_path)
    assert read(tmp_path).layers == {}
    assert_close(anyfp8.load(stale(mlp()), tmp_path)[0].weight, mlp()[0].weight, 0)


@pytest.mark.parametrize(
    ("make", "tile"),
    [
        (lambda: nn.Linear(8, 4), [-1, -1]),
        (lambda: nn.Conv2d(4, 8, 3), [-1, -1]),  # as a preset says it
        (lambda: nn.Conv2d(4, 8, 3), [-1, -1, -1, -1]),
        (lambda: nn.LayerNorm(8), [-1]),
    ],
)
def test_the_root_and_other_ranks(tmp_path, make, tile):
    written = draft(seeded(make), [""], WEIGHT_ONLY)
    written.layers[""] = WEIGHT_ONLY | {"tile": tile}
    manifest = read(written.write(tmp_path))
    assert manifest.problems == ()
    assert set(manifest.layer_config[""].tile) == {-1}
    assert len(manifest.layer_config[""].tile) == written.tensors["weight"].dim()


def test_names_of_ignored_layers_are_exact(tmp_path):
    written = draft(
        seeded(lambda: nn.ModuleDict({"gate": nn.Linear(8, 8), "gate_proj": nn.Linear(8, 8)})), ["gate_proj"]
    )
    written.ignore = ["gate"]
    assert read(written.write(tmp_path)).problems == ()


@pytest.mark.parametrize(
    "extra",
    [
        {"norm.weight_scale": torch.ones(1)},
        {"act.input_scale": torch.ones(1)},
        {"0.weight_zero_point": torch.zeros(1)},
        {"0.output_scale": torch.ones(1)},
        {"0.weight_scale_inv": torch.ones(1)},
        {"0.weight_scale_2": torch.ones(1)},
        {"scale_weight": torch.ones(1)},
        {"0.input_amax": torch.ones(1)},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_there_are_no_junk_scales_in_our_own_format(tmp_path, extra):
    written = draft(mlp(), ["0", "2"])
    written.tensors |= extra | ({"norm.weight": torch.ones(3)} if "norm.weight_scale" in extra else {})
    with pytest.raises(anyfp8.LoadError, match=next(iter(extra)).replace(".", r"\.")):
        anyfp8.load(stale(mlp()), written.write(tmp_path))


@pytest.mark.parametrize("name", ["attn.k_scale", "attn.v_scale", "attn.q_scale", "k_proj.output_scale"])
def test_scales_of_the_kv_cache_are_exceptions_with_a_reason(tmp_path, name):
    written = draft(mlp(), ["0", "2"])
    written.tensors[name] = torch.ones(1)
    manifest = read(written.write(tmp_path))
    assert "KV-cache" in manifest.exceptions[name]
    assert "not applied" in anyfp8.report(anyfp8.load(stale(mlp()), tmp_path)).skipped[name]


def test_all_contradictions_are_listed_without_a_model(tmp_path):
    written = draft(seeded(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])), list("01234"), STATIC)
    written.layers["0"] |= {"weight_dtype": "float8_e5m2"}
    written.layers["1"] |= {"bits": 8}
    del written.layers["2"]
    written.ignore = ["3"]
    written.layers["7"] = STATIC
    written.tensors["4.weight_scale"] = torch.ones(1).bfloat16()
    manifest = read(written.write(tmp_path))
    problems = {p.name: p.detail for p in manifest.problems}
    assert set(problems) == {"0.weight", "1", "2", "3", "7.weight", "7.weight_scale", "7.input_scale", "4.weight_scale"}
    assert "float8_e5m2" in problems["0.weight"]
    assert "'bits'" in problems["1"]
    assert "no layer_config entry" in problems["2"]
    assert "ignore" in problems["3"]
    assert "bfloat16" in problems["4.weight_scale"]
    assert all(p.kind in anyfp8.errors.HEADINGS for p in manifest.problems)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        ({"version": None}, "version None"),
        ({"format": None}, "format None"),
        ({"Layer_config": {}}, "unknown field 'Layer_config'"),
        ({"quantization_config": {}}, "unknown field 'quantization_config'"),
        ({"ignore": None}, "ignore"),
        ({"layer_config": {"0": None}}, "layer_config"),
    ],
)
def test_the_file_itself_is_checked(tmp_path, spoil, match):
    written = draft(mlp(), ["0", "2"])
    written.fields = spoil
    with pytest.raises(anyfp8.DialectError, match=rf"anyfp8\.json.*{match}"):
        read(written.write(tmp_path))


def test_it_is_the_file_beside_the_weights_that_counts(tmp_path):
    """A manifest in the folder above, or in a subfolder, is another checkpoint's."""
    written = draft(mlp(), ["0", "2"])
    written.write(tmp_path)
    write_tensors(tmp_path / "sub", written.tensors)
    with pytest.raises(anyfp8.DialectError, match="no dialect recognised it"):
        read(tmp_path / "sub")


def test_inspect_reads_no_tensors(tmp_path, monkeypatch):
    folder = draft(mlp(), ["0", "2"]).write(tmp_path)
    monkeypatch.setattr(anyfp8.checkpoint.TensorRef, "read", None)
    assert set(read(folder).layers) == {"0", "2"}
