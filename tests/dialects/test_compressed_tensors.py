"""compressed-tensors: which group a layer belongs to, what it says, and that the tensors decide."""

import itertools

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import FP8Embedding, FP8Linear
from tests.checkpoints import (
    CT_CHANNEL,
    CT_TENSOR,
    CT_TOKEN,
    DYNAMIC,
    F8,
    FP8_ARGS,
    STATIC,
    WEIGHT_ONLY,
    Doubling,
    X,
    compressed,
    draft,
    group,
    mlp,
    oracle,
    seeded,
    stale,
    write_json,
    write_tensors,
)
from tests.helpers import assert_close

STATIC_IN = FP8_ARGS


def named(*names, kind=nn.Linear):
    return seeded(lambda: nn.ModuleDict({name: kind(8, 8) for name in names}))


def check(model, written, folder):
    """It loads, and computes what the draft's own schemes say."""
    loaded = anyfp8.load(stale(model), folder)
    want = oracle(model, written)
    for name, layer in loaded.named_children():
        assert_close(layer.weight, want.get_submodule(name).weight, 0)
        assert_close(layer(X).detach(), want.get_submodule(name)(X).detach(), 1e-5)
    return anyfp8.report(loaded)


def schemes(folder):
    return {name: str(scheme) for name, scheme in anyfp8.inspect(folder).layer_config.items()}


# --- strategies ---
@pytest.mark.parametrize(
    ("scheme", "channel", "weights", "inputs"),
    [
        (STATIC, False, CT_TENSOR, STATIC_IN),
        (STATIC, True, CT_CHANNEL, STATIC_IN | {"dynamic": False}),
        (DYNAMIC, True, CT_CHANNEL, CT_TOKEN),
        (WEIGHT_ONLY, True, CT_CHANNEL, None),
        (WEIGHT_ONLY, False, {"num_bits": 8, "type": "float"}, None),  # strategy left out: tensor
        (WEIGHT_ONLY, True, {"num_bits": 8, "type": "float", "group_size": -1}, None),  # ... or channel
    ],
)
def test_strategies(tmp_path, scheme, channel, weights, inputs):
    model = named("a", "b")
    written = draft(model, ["a", "b"], scheme, channel)
    report = check(model, written, compressed(tmp_path, written, [group(["Linear"], weights, inputs)]))
    assert report.dialect == "compressed-tensors"
    assert set(report.layers) == {"a", "b"}


@pytest.mark.parametrize("shape", ["[N]", "[N,1]"])
def test_channel_scales_in_either_shape(tmp_path, shape):
    model = named("a")
    written = draft(model, ["a"], WEIGHT_ONLY, channel=True)
    if shape == "[N,1]":
        written.tensors["a.weight_scale"] = written.tensors["a.weight_scale"].reshape(8, 1)
    check(model, written, compressed(tmp_path, written, [group(["Linear"], CT_CHANNEL)]))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensor_scales_in_any_shape(tmp_path, shape):
    model = named("a")
    written = draft(model, ["a"], STATIC)
    for name in ("a.weight_scale", "a.input_scale"):
        written.tensors[name] = written.tensors[name].reshape(shape)
    check(model, written, compressed(tmp_path, written, [group(["Linear"], CT_TENSOR, STATIC_IN)]))


@pytest.mark.parametrize("structure", [[4, 3], "4x3"])
def test_blocks_with_ragged_edges(tmp_path, structure):
    model = seeded(lambda: nn.ModuleDict({"a": nn.Linear(8, 10)}))
    written = draft(model, ["a"], WEIGHT_ONLY)
    scale = torch.rand(3, 3) + 0.5
    written.tensors["a.weight_scale"] = scale
    weights = FP8_ARGS | {"strategy": "block", "block_structure": structure}
    loaded = anyfp8.load(stale(model), compressed(tmp_path, written, [group(["Linear"], weights)]))
    spread = scale.repeat_interleave(4, 0)[:10].repeat_interleave(3, 1)[:, :8]
    assert_close(loaded["a"].weight, written.tensors["a.weight"].float() * spread, 0)


def test_groups_of_columns(tmp_path):
    model = named("a")
    written = draft(model, ["a"], WEIGHT_ONLY)
    written.tensors["a.weight_scale"] = torch.rand(8, 2) + 0.5
    weights = FP8_ARGS | {"strategy": "group", "group_size": 4}
    loaded = anyfp8.load(stale(model), compressed(tmp_path, written, [group(["Linear"], weights)]))
    spread = written.tensors["a.weight_scale"].repeat_interleave(4, 1)
    assert_close(loaded["a"].weight, written.tensors["a.weight"].float() * spread, 0)


@pytest.mark.parametrize(
    "inputs", [FP8_ARGS | {"dynamic": True}, FP8_ARGS | {"strategy": "group", "group_size": 4, "dynamic": True}]
)
def test_other_dynamic_inputs(tmp_path, inputs):
    model = named("a")
    written = draft(model, ["a"], WEIGHT_ONLY)
    loaded = anyfp8.load(stale(model), compressed(tmp_path, written, [group(["Linear"], CT_TENSOR, inputs)]))
    size = inputs.get("group_size", X.numel())
    parts = X.reshape(-1, size)
    scale = parts.abs().amax(1, keepdim=True) / 448
    rounded = ((parts / scale).to(F8).float() * scale).reshape(X.shape)
    want = nn.functional.linear(rounded, written.weight("a"), written.tensors["a.bias"])
    assert_close(loaded["a"](X).detach(), want, 1e-5)


def test_args_as_old_releases_wrote_them(tmp_path):
    """All keys, null or at their defaults; and a group format."""
    model = named("a")
    written = draft(model, ["a"], STATIC)
    full = {"group_size": None, "block_structure": None, "actorder": None, "symmetric": True, "observer": "minmax"}
    full |= {"dynamic": False, "observer_kwargs": {}, "scale_dtype": None, "zp_dtype": None}
    given = group(["Linear"], CT_TENSOR | full, STATIC_IN | full, output_activations=None, format="float-quantized")
    check(model, written, compressed(tmp_path, written, [given]))


# --- where the config is ---
def test_status_frozen_means_nothing(tmp_path):
    model = named("a")
    written = draft(model, ["a"], STATIC)
    folder = compressed(tmp_path, written, [group(["Linear"], inputs=STATIC_IN)], quantization_status="frozen")
    check(model, written, folder)


@pytest.mark.parametrize("status", ["initialized", "calibration", "compressed", "decompressed", None, "whatever"])
@pytest.mark.parametrize("format", ["float-quantized", "naive-quantized", "dense", None])
def test_summaries_decide_nothing(tmp_path, status, format):
    model = named("a")
    written = draft(model, ["a"], STATIC)
    groups = [group(["Linear"], inputs=STATIC_IN)]
    check(
        model,
        written,
        compressed(
            tmp_path,
            written,
            groups,
            quantization_status=status,
            format=format,
            version="9",
            global_compression_ratio=1,
        ),
    )


PLACES = {
    "quantization_config": lambda c: {"quantization_config": c},
    "compression_config": lambda c: {"compression_config": c},
    "nested": lambda c: {"quantization_config": {"quantization_config": c}},
    "text_config": lambda c: {"text_config": {"quantization_config": c}},
    "text_config nested": lambda c: {"text_config": {"compression_config": {"quantization_config": c}}},
    "empty beside it": lambda c: {"quantization_config": {}, "compression_config": c},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", [True, False], ids=["quant_method", "no quant_method"])
def test_where_the_config_is(tmp_path, place, method):
    model = named("a")
    written = draft(model, ["a"], STATIC)
    write_tensors(tmp_path, written.tensors)
    config = {"config_groups": {"group_0": group(["Linear"], inputs=STATIC_IN)}}
    write_json(
        tmp_path / "config.json", PLACES[place](config | ({"quant_method": "compressed-tensors"} if method else {}))
    )
    check(model, written, tmp_path)


# --- which group ---
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_exact_names_beat_regexes_beat_classes(tmp_path, order):
    model = named("exact", "regex", "other")
    written = draft(model, ["exact", "regex", "other"], DYNAMIC)
    groups = [
        group(["Linear"], CT_TENSOR, CT_TOKEN),
        group(["re:(exact|regex)"], CT_TENSOR, FP8_ARGS | {"dynamic": True}),
        group(["exact"], CT_TENSOR, None),
    ]
    folder = compressed(tmp_path, written, {f"g{i}": groups[i] for i in order})
    assert schemes(folder) == {
        "exact": "e4m3fn per tensor, weight-only",
        "regex": "e4m3fn per tensor, input dynamic e4m3fn per tensor",
        "other": "e4m3fn per tensor, input dynamic e4m3fn per token",
    }


@pytest.mark.parametrize("swap", [False, True])
def test_inside_one_kind_the_alphabet_decides(tmp_path, swap):
    model = named("layer")
    written = draft(model, ["layer"], DYNAMIC)
    groups = {"x": group(["re:lay.*"], CT_TENSOR, CT_TOKEN), "y": group(["re:la.*"], CT_TENSOR, None)}
    folder = compressed(tmp_path, written, dict(reversed(groups.items())) if swap else groups)
    assert schemes(folder) == {"layer": "e4m3fn per tensor, weight-only"}  # "re:la.*" comes before "re:lay.*"


def test_a_regex_is_anchored_at_the_start_and_open_at_the_end(tmp_path):
    model = named("mlp", "mlp2", "my_mlp")
    written = draft(model, ["mlp", "mlp2", "my_mlp"], DYNAMIC)
    folder = compressed(tmp_path, written, [group(["re:mlp"], CT_TENSOR, CT_TOKEN), group(["Linear"], CT_TENSOR)])
    got = schemes(folder)
    assert "token" in got["mlp"]
    assert "token" in got["mlp2"]
    assert "weight-only" in got["my_mlp"]


def test_an_exact_name_is_the_whole_name(tmp_path):
    model = named("gate", "gate_proj", "my_gate")
    written = draft(model, ["gate", "gate_proj", "my_gate"], DYNAMIC)
    folder = compressed(tmp_path, written, [group(["gate"], CT_TENSOR, CT_TOKEN), group(["Linear"], CT_TENSOR)])
    got = schemes(folder)
    assert "token" in got["gate"]
    assert "weight-only" in got["gate_proj"]
    assert "weight-only" in got["my_gate"]


@pytest.mark.parametrize("targets", [["head"], ["re:^x"], ["head", "re:^x"]])
def test_a_layer_that_nobody_targets_is_refused(tmp_path, targets):
    """Its granularity is unknown; the name of another layer is no class name."""
    model = named("body", "head")
    written = draft(model, ["body", "head"], DYNAMIC)
    with pytest.raises(anyfp8.LoadError, match=r"body.*no config group targets it"):
        anyfp8.load(model, compressed(tmp_path, written, [group(targets, CT_TENSOR, CT_TOKEN)]))


def test_no_groups_at_all(tmp_path):
    model = named("body")
    written = draft(model, ["body"], DYNAMIC)
    with pytest.raises(anyfp8.LoadError, match=r"body.*no config group targets it"):
        anyfp8.load(model, compressed(tmp_path, written, {}))


def test_a_target_in_two_different_groups_is_refused(tmp_path):
    model = named("a")
    written = draft(model, ["a"], DYNAMIC)
    groups = [group(["Linear"], CT_TENSOR, CT_TOKEN), group(["Linear"], CT_TENSOR)]
    with pytest.raises(anyfp8.DialectError, match=r"'Linear' is in two different groups"):
        anyfp8.load(model, compressed(tmp_path / "a", written, groups))
    check(model, written, compressed(tmp_path / "b", written, [groups[0], groups[0]]))  # equal ones: no matter


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_classes_are_those_of_the_model(tmp_path, scheme):
    model = seeded(lambda: nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8)))
    written = draft(model, ["0", "1"], STATIC if scheme == "static" else DYNAMIC, channel=True)
    written.tensors.pop("0.input_scale", None)
    inputs = STATIC_IN if scheme == "static" else CT_TOKEN
    folder = compressed(tmp_path, written, [group(["Linear"], CT_CHANNEL, inputs), group(["Embedding"], CT_CHANNEL)])
    loaded = anyfp8.load(stale(model), folder)
    assert (type(loaded[0]), type(loaded[1])) == (FP8Embedding, FP8Linear)
    assert loaded[0].scheme.weight_only
    assert loaded[1].scheme.act_dtype is not None
    assert_close(loaded[0].weight, written.weight("0"), 0)
    assert_close(loaded[1](X).detach(), oracle(model, written)[1](X).detach(), 1e-5)


def test_class_names_of_subclasses_count_by_the_alphabet(tmp_path):
    """A Doubling is a Linear too; the target that comes first by name wins, as in compressed-tensors."""
    model = seeded(lambda: nn.ModuleDict({"a": Doubling(8, 8), "b": nn.Linear(8, 8)}))
    written = draft(model, ["a", "b"], WEIGHT_ONLY)
    groups = [group(["Linear"], CT_TENSOR, CT_TOKEN), group(["Doubling"], CT_TENSOR)]
    loaded = anyfp8.load(stale(model), compressed(tmp_path, written, groups))
    assert loaded["b"].scheme.act_dynamic
    assert_close(loaded["a"].weight, written.weight("a"), 0)


# --- presets as group names ---
@pytest.mark.parametrize(
    ("name", "scheme", "channel"),
    [("FP8", STATIC, False), ("fp8", STATIC, False), ("FP8_DYNAMIC", DYNAMIC, True), ("Fp8_Dynamic", DYNAMIC, True)],
)
def test_a_preset_as_the_groups_name(tmp_path, name, scheme, channel):
    model = named("a", "b")
    written = draft(model, ["a", "b"], scheme, channel)
    check(model, written, compressed(tmp_path, written, {name: ["Linear"]}))


def test_the_block_preset(tmp_path):
    model = seeded(lambda: nn.ModuleDict({"a": nn.Linear(8, 130)}))
    written = draft(model, ["a"], WEIGHT_ONLY)
    written.tensors["a.weight_scale"] = torch.tensor([[1.0], [3.0]])
    loaded = anyfp8.load(stale(model), compressed(tmp_path, written, {"FP8_BLOCK": ["re:.*"]}))
    assert (loaded["a"].scheme.tile, loaded["a"].scheme.act_tile) == ((128, 128), (1, 128))
    want = written.tensors["a.weight"].float()
    want[128:] *= 3
    assert_close(loaded["a"].weight, want, 0)


@pytest.mark.parametrize("name", ["W8A8", "FP8_STATIC", "FP8_WEIGHT_ONLY", "INT8", "group_0"])
def test_unknown_presets_are_refused(tmp_path, name):
    """FP8_STATIC is auto-round's word: per channel there, unknown here."""
    written = draft(named("a"), ["a"], STATIC)
    with pytest.raises(anyfp8.DialectError, match=name):
        anyfp8.load(named("a"), compressed(tmp_path, written, {name: ["Linear"]}))


# --- lists and tensors ---
@pytest.mark.parametrize("entry", ["a", "re:a$", "re:.*"])
def test_ignored_but_stored_in_fp8(tmp_path, entry):
    model = named("a", "b")
    written = draft(model, ["a", "b"], STATIC)
    report = check(model, written, compressed(tmp_path, written, [group(["Linear"], inputs=STATIC_IN)], ignore=[entry]))
    assert any("a" in note and "ignored" in note and "tensors decide" in note for note in report.notes)
    assert set(report.layers) == {"a", "b"}


@pytest.mark.parametrize("junk", [True, False])
def test_targeted_but_stored_in_float(tmp_path, junk):
    model = named("a", "lm_head")
    written = draft(model, ["a"], STATIC)
    if junk:
        written.tensors |= {"lm_head.weight_scale": torch.full((1,), 9.0), "lm_head.input_scale": torch.ones(1)}
    loaded = anyfp8.load(stale(model), compressed(tmp_path, written, [group(["Linear"], inputs=STATIC_IN)]))
    assert type(loaded["lm_head"]) is nn.Linear
    assert_close(loaded["lm_head"].weight, model["lm_head"].weight, 0)
    report = anyfp8.report(loaded)
    assert set(report.skipped) == ({"lm_head.weight_scale", "lm_head.input_scale"} if junk else set())
    assert "lm_head" in str(report), "the report says where lists and tensors disagree"


def test_a_targeted_layer_in_float_that_is_ignored_is_no_disagreement(tmp_path):
    model = named("a", "lm_head")
    written = draft(model, ["a"], STATIC)
    folder = compressed(tmp_path, written, [group(["Linear"], inputs=STATIC_IN)], ignore=["lm_head"])
    assert anyfp8.report(anyfp8.load(stale(model), folder)).notes == ()


# --- exceptions ---
@pytest.mark.parametrize(
    "name",
    ["self_attn.k_scale", "self_attn.v_scale", "self_attn.q_scale", "k_proj.output_scale", "v_proj.output_scale"],
)
def test_kv_scales_are_reported(tmp_path, name):
    model = named("k_proj", "v_proj")
    written = draft(model, ["k_proj", "v_proj"], STATIC)
    written.tensors[name] = torch.ones(1)
    report = check(
        model, written, compressed(tmp_path, written, [group(["Linear"], inputs=STATIC_IN)], kv_cache_scheme=FP8_ARGS)
    )
    assert "KV-cache" in report.skipped[name]
    assert any("KV-cache" in note for note in report.notes)


@pytest.mark.parametrize("dtype", [F8, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("name", ["a.weight_zero_point", "a.input_zero_point"])
def test_zero_points_of_symmetric_layers(tmp_path, name, dtype):
    model = named("a")
    written = draft(model, ["a"], STATIC)
    folder = tmp_path / "zero"
    written.tensors[name] = torch.zeros(1).to(dtype)
    report = check(model, written, compressed(folder, written, [group(["Linear"], inputs=STATIC_IN)]))
    assert name in report.skipped
    written.tensors[name] = torch.ones(1).to(dtype)
    with pytest.raises(anyfp8.LoadError, match=name.replace(".", r"\.")):
        anyfp8.load(model, compressed(tmp_path / "one", written, [group(["Linear"], inputs=STATIC_IN)]))


# --- refusals ---
@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"sparsity_config": {"format": "sparse-bitmask", "ignore": []}}, "sparse-bitmask"),
    ],
)
def test_what_would_have_to_be_executed_is_refused(tmp_path, config, match):
    written = draft(named("a"), ["a"], STATIC)
    with pytest.raises(anyfp8.DialectError, match=match):
        anyfp8.load(named("a"), compressed(tmp_path, written, [group(["Linear"], inputs=STATIC_IN)], **config))


@pytest.mark.parametrize(
    "config",
    [
        {"transform_config": {}},
        {"sparsity_config": {}},
        {"sparsity_config": {"format": "dense"}},
        {"transform_config": None},
        {"sparsity_config": None},
        {"anything": 1},
    ],
    ids=str,
)
def test_empty_ones_and_unknown_top_level_keys_are_not(tmp_path, config):
    model = named("a")
    written = draft(model, ["a"], STATIC)
    check(model, written, compressed(tmp_path, written, [group(["Linear"], inputs=STATIC_IN)], **config))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (group(["Linear"], FP8_ARGS | {"num_bit": 8}), "'num_bit'"),
        (group(["Linear"], FP8_ARGS, FP8_ARGS | {"q_max": 448}), "'q_max'"),
        (group(["Linear"], wieghts=None), "'wieghts'"),
        (group(["Linear"], FP8_ARGS | {"num_bits": 4}), "num_bits is 4"),
        (group(["Linear"], {"num_bits": 8, "strategy": "tensor"}), "type is 'int'"),  # a missing type is int
        (group(["Linear"], FP8_ARGS | {"type": "int"}), "type is 'int'"),
        (group(["Linear"], FP8_ARGS, FP8_ARGS | {"type": "int"}), "type is 'int'"),
        (group(["Linear"], FP8_ARGS | {"strategy": "attn_head"}), "attn_head"),
        (group(["Linear"], FP8_ARGS | {"strategy": "token"}), "token"),
        (group(["Linear"], FP8_ARGS | {"strategy": "group"}), "group_size"),
        (group(["Linear"], FP8_ARGS | {"strategy": "group", "group_size": -1}), "group_size"),
        (group(["Linear"], FP8_ARGS | {"strategy": "block"}), "block_structure"),
        (group(["Linear"], FP8_ARGS, FP8_ARGS | {"strategy": "token"}), "act_tile|static"),  # static token
        (group(["Linear"], FP8_ARGS, FP8_ARGS | {"strategy": "group", "group_size": 4}), "act_tile|static"),
        (group(["Linear"], FP8_ARGS, FP8_ARGS | {"strategy": "channel"}), "channel"),
        (group(["Linear"], FP8_ARGS, FP8_ARGS | {"strategy": "block", "block_structure": [4, 4]}), "block"),
        (group(["Linear"], FP8_ARGS, CT_TOKEN | {"dynamic": "local"}), "local"),
        (group(["Linear"], FP8_ARGS, CT_TOKEN | {"dynamic": "false"}), "dynamic"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_refused_groups_name_the_layers(tmp_path, given, match):
    model = named("a", "b")
    written = draft(model, ["a", "b"], STATIC)
    with pytest.raises(anyfp8.AnyFP8Error, match=f"(?s)a, b.*{match}"):
        anyfp8.load(model, compressed(tmp_path, written, [given]))


@pytest.mark.parametrize(
    "config",
    [
        {"config_groups": ["x"]},
        {"config_groups": "x"},
        {"config_groups": {"g": "x"}},
        {"config_groups": {"g": {}}},
        {"config_groups": {"g": group("Linear")}},
        {"config_groups": {"g": group([1])}},
        {"config_groups": {"g": group([["Linear"]])}},
        {"config_groups": {"g": group(["re:("])}},
        {"config_groups": {"g": group(["Linear"], None)}},
        {"config_groups": {"g": group(["Linear"], "FP8")}},
        {"config_groups": {"g": group(["Linear"], [])}},
        {"config_groups": {"g": group(["Linear"], FP8_ARGS, "FP8")}},
        {"config_groups": {"g": group(["Linear"], FP8_ARGS | {"num_bits": "8"})}},
        {"config_groups": {"g": group(["Linear"], FP8_ARGS | {"strategy": "block", "block_structure": "axb"})}},
        {"config_groups": {"g": group(["Linear"], FP8_ARGS | {"strategy": "block", "block_structure": [4]})}},
        {"config_groups": {"g": group(["Linear"], FP8_ARGS | {"strategy": "block", "block_structure": 4})}},
        {"config_groups": {"g": group(["Linear"], FP8_ARGS | {"strategy": "group", "group_size": "4"})}},
        {"config_groups": {"g": group(["Linear"], FP8_ARGS | {"strategy": ["tensor"]})}},
        {"ignore": [1]},
        {"ignore": ["re:("]},
        {"sparsity_config": "dense"},
        {"sparsity_config": ["x"]},
    ],
    ids=str,
)
def test_malformed_configs(tmp_path, config):
    model = named("a")
    written = draft(model, ["a"], STATIC)
    folder = compressed(tmp_path, written, [group(["Linear"], inputs=STATIC_IN)], **config)
    with pytest.raises(anyfp8.AnyFP8Error, match=r"(?s)(config|checkpoint|a\b)"):
        anyfp8.load(model, folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("a.weight_scale"), r"a\.weight_scale"),
        (lambda t: t.pop("a.input_scale"), r"a\.input_scale.*static"),
        (lambda t: t.update({"a.weight": t["a.weight"].float().to(torch.float8_e5m2)}), r"a\.weight.*e5m2"),
        (lambda t: t.update({"a.output_scale": torch.ones(1)}), r"a\.output_scale"),
        (lambda t: t.update({"a.weight_scale": torch.ones(8)}), r"a\.weight_scale.*\[8\]"),
        (lambda t: t.update({"a.weight_scale": torch.ones(1, dtype=torch.uint8)}), r"a\.weight_scale.*U8"),
        (lambda t: t.update({"c.weight_scale": torch.ones(1)}), r"c\.weight_scale"),
        (lambda t: t.update({"a.weight_packed": torch.ones(8, 4, dtype=torch.uint8)}), r"a\.weight_packed"),
        (lambda t: t.update({"a.weight_global_scale": torch.ones(1)}), r"a\.weight_global_scale"),
    ],
)
def test_tensors_that_contradict_the_format(tmp_path, change, match):
    model = named("a", "b")
    written = draft(model, ["a", "b"], STATIC)
    change(written.tensors)
    with pytest.raises(anyfp8.LoadError, match=f"(?s){match}"):
        anyfp8.load(model, compressed(tmp_path, written, [group(["Linear"], inputs=STATIC_IN)]))


def test_an_input_scale_of_a_dynamic_layer_is_not_dropped_in_silence(tmp_path):
    model = named("a")
    written = draft(model, ["a"], STATIC)
    with pytest.raises(anyfp8.LoadError, match=r"a\.input_scale"):
        anyfp8.load(model, compressed(tmp_path, written, [group(["Linear"], CT_TENSOR, CT_TOKEN)]))


def test_targets_are_in_the_files_names_under_rename(tmp_path):
    model = mlp()
    written = draft(model, ["0", "2"], DYNAMIC, channel=True)
    foreign = written.renamed(lambda path: {"0": "vit.first", "2": "vit.second"}[path])
    groups = [group(["vit.first"], CT_CHANNEL), group(["re:vit.*"], CT_CHANNEL, CT_TOKEN)]
    folder = compressed(tmp_path, foreign, groups, ignore=["head"])
    loaded = anyfp8.load(stale(model), folder, rename={r"vit\.first": "0", r"vit\.second": "2"})
    assert loaded[0].scheme.weight_only
    assert loaded[2].scheme.act_dynamic
    assert_close(loaded[2].weight, written.weight("2"), 0)


def test_a_config_without_fp8_tensors_is_a_plain_load(tmp_path):
    """What `decompress` leaves behind: float weights under a config that says FP8."""
    model = named("a")
    written = draft(model, [])
    loaded = anyfp8.load(stale(model), compressed(tmp_path, written, [group(["Linear"])]))
    assert_close(loaded["a"].weight, model["a"].weight, 0)
