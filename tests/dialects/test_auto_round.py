"""auto-round's own format: what the config says about each layer, and that the tensors decide."""

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import FP8Linear
from tests.checkpoints import (
    AR_STATIC,
    AR_WEIGHT_ONLY,
    DYNAMIC,
    F8,
    STATIC,
    WEIGHT_ONLY,
    X,
    auto_round,
    draft,
    mlp,
    oracle,
    seeded,
    stale,
    write_json,
    write_tensors,
)
from tests.helpers import assert_close


def named(*names, k=8, n=8):
    return seeded(lambda: nn.ModuleDict({name: nn.Linear(k, n) for name in names}))


def check(model, written, folder, **options):
    """It loads, and computes what the draft's own schemes say."""
    loaded = anyfp8.load(stale(model), folder, **options)
    want = oracle(model, written)
    for name, layer in loaded.named_children():
        if isinstance(layer, nn.Linear):
            assert_close(layer.weight, want.get_submodule(name).weight, 0)
            x = X[:, : layer.in_features]
            assert_close(layer(x[:, : layer.in_features]).detach(), want.get_submodule(name)(x).detach(), 1e-5)
    return anyfp8.report(loaded)


# --- the top level ---
def test_static_per_channel(tmp_path):
    model = named("a", "b")
    written = draft(model, ["a", "b"], STATIC, channel=True)
    report = check(model, written, auto_round(tmp_path, written))
    assert report.dialect == "auto-round"
    assert "quant_method 'auto-round'" in report.evidence
    assert str(report.layers["a"].scheme) == "e4m3fn per channel, input static e4m3fn per tensor"


@pytest.mark.parametrize("method", ["auto-round", "auto_round", "intel/auto-round"])
def test_the_methods_spellings(tmp_path, method):
    model = named("a")
    written = draft(model, ["a"], STATIC, channel=True)
    check(model, written, auto_round(tmp_path, written, quant_method=method))


def test_static_per_tensor(tmp_path):
    model = named("a")
    written = draft(model, ["a"], STATIC)
    check(model, written, auto_round(tmp_path, written, group_size=0))


def test_static_with_groups_stored_flat(tmp_path):
    model = named("a")
    written = draft(model, ["a"], STATIC)
    written.tensors["a.weight_scale"] = torch.rand(8 * 2) + 0.5
    loaded = anyfp8.load(stale(model), auto_round(tmp_path, written, group_size=4))
    spread = written.tensors["a.weight_scale"].reshape(8, 2).repeat_interleave(4, 1)
    assert_close(loaded["a"].weight, written.tensors["a.weight"].float() * spread, 0)


def test_bfloat16_scales(tmp_path):
    model = named("a")
    written = draft(model, ["a"], STATIC, channel=True)
    for name in ("a.weight_scale", "a.input_scale"):
        written.tensors[name] = written.tensors[name].bfloat16()
    report = check(model, written, auto_round(tmp_path, written))
    assert report.layers["a"].scheme.scale_dtype == "bfloat16"


@pytest.mark.parametrize("act", [{}, {"act_bits": 16}, {"act_bits": None}, {"act_bits": 32}], ids=str)
def test_weight_only_files_that_say_activation_scheme_dynamic(tmp_path, act):
    model = named("a")
    written = draft(model, ["a"], WEIGHT_ONLY)
    folder = auto_round(tmp_path, written, AR_WEIGHT_ONLY, activation_scheme="dynamic", fmt="e4m3", **act)
    report = check(model, written, folder)
    assert report.layers["a"].scheme.weight_only


def test_dynamic_per_token(tmp_path):
    model = named("a")
    written = draft(model, ["a"], DYNAMIC, channel=True)
    report = check(model, written, auto_round(tmp_path, written, act_dynamic=True, act_group_size=-1))
    assert report.layers["a"].scheme.act_tile == (1, -1)


def test_what_a_missing_key_means(tmp_path):
    """In a config (unlike a scheme) act_dynamic left out is False, so the input scale must be there."""
    model = named("a")
    written = draft(model, ["a"], STATIC, channel=True)
    config = {k: v for k, v in AR_STATIC.items() if k not in ("act_dynamic", "act_group_size", "act_data_type", "sym")}
    check(model, written, auto_round(tmp_path / "a", written, config))
    del written.tensors["a.input_scale"]
    with pytest.raises(anyfp8.LoadError, match=r"a\.input_scale.*act_dynamic false"):
        anyfp8.load(model, auto_round(tmp_path / "b", written, config))


def test_the_config_in_a_file_of_its_own(tmp_path):
    model = named("a")
    written = draft(model, ["a"], STATIC, channel=True)
    write_tensors(tmp_path, written.tensors)
    write_json(tmp_path / "quantization_config.json", {"quant_method": "auto-round"} | AR_STATIC)
    assert "quantization_config.json" in check(model, written, tmp_path).evidence


# --- extra_config ---
def scheme_of(tmp_path, model, written, **config):
    return anyfp8.inspect(auto_round(tmp_path, written, **config)).layer_config


def test_an_exact_name_beats_a_regex(tmp_path):
    model = named("up", "down")
    written = draft(model, ["up", "down"], STATIC, channel=True)
    for name in ("down",):
        written.tensors[f"{name}.weight_scale"] = torch.ones(1)
    schemes = scheme_of(
        tmp_path,
        model,
        written,
        extra_config={".*": {"group_size": 0}, "up": {"group_size": -1}, "u.": {"group_size": 4}},
    )
    assert (schemes["up"].tile, schemes["down"].tile) == ((1, -1), (-1, -1))


def test_the_first_regex_wins_and_is_searched(tmp_path):
    model = seeded(lambda: nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])}))
    written = draft(model, ["blocks.0", "blocks.1"], WEIGHT_ONLY)
    extra = {r"s\.1$": {"act_bits": 16, "group_size": 0}, r"blocks\.1": {"group_size": 4}, "locks": {"group_size": 0}}
    written.tensors["blocks.0.input_scale"] = torch.ones(1)
    schemes = scheme_of(tmp_path, model, written, extra_config=extra)
    assert schemes["blocks.1"].weight_only
    assert schemes["blocks.0"].static
    assert schemes["blocks.0"].tile == schemes["blocks.1"].tile == (-1, -1)


def test_only_the_keys_that_are_there_override(tmp_path):
    model = named("a", "b")
    written = draft(model, ["a", "b"], STATIC, channel=True)
    written.tensors["a.weight_scale"] = torch.ones(1)
    schemes = scheme_of(tmp_path, model, written, extra_config={"a": {"group_size": 0}})
    assert (schemes["a"].tile, schemes["a"].static) == ((-1, -1), True)
    assert (schemes["b"].tile, schemes["b"].static) == ((1, -1), True)


def test_a_null_overrides_too(tmp_path):
    """act_bits null is 16, whatever the top level says."""
    model = named("a", "b")
    written = draft(model, ["a", "b"], STATIC, channel=True)
    del written.tensors["a.input_scale"]
    schemes = scheme_of(
        tmp_path, model, written, extra_config={"a": {"act_bits": None, "act_dynamic": None, "act_data_type": None}}
    )
    assert schemes["a"].weight_only
    assert schemes["b"].static


@pytest.mark.parametrize(
    ("key", "others"), [("fc", ["fc2", "my_fc"]), ("a.1", ["a.10", "a.11", "aa1"]), ("h.0", ["eh.0"])]
)
def test_the_name_of_a_layer_is_no_regex(tmp_path, key, others):
    def make():
        root = nn.Module()
        for name in (key, *others):
            parent = root
            *path, leaf = name.split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(leaf, nn.Linear(8, 8))
        return root

    model = seeded(make)
    written = draft(model, [key, *others], DYNAMIC, channel=True)
    extra = {key: {"act_bits": 16}}
    schemes = scheme_of(tmp_path, model, written, act_dynamic=True, act_group_size=-1, extra_config=extra)
    assert schemes[key].weight_only
    assert all(schemes[name].act_dynamic for name in others)


def test_listed_as_16_bits_but_stored_in_fp8(tmp_path):
    model = named("a", "b")
    written = draft(model, ["a", "b"], STATIC, channel=True)
    folder = auto_round(tmp_path, written, extra_config={"a": {"bits": 16, "act_bits": 16}})
    report = check(model, written, folder)
    assert any("a (the tensors decide)" in note for note in report.notes)
    assert report.layers["a"].scheme.static


def test_listed_as_16_bits_and_stored_in_float(tmp_path):
    model = named("a", "b")
    written = draft(model, ["b"], STATIC, channel=True)
    loaded = anyfp8.load(
        stale(model),
        auto_round(tmp_path, written, extra_config={"a": {"bits": 16, "act_bits": 16}, ".*a.*": {"bits": 16}}),
    )
    assert type(loaded["a"]) is nn.Linear
    assert_close(loaded["a"].weight, model["a"].weight, 0)
    assert type(loaded["b"]) is FP8Linear


def test_a_layer_stored_in_float_needs_no_mention(tmp_path):
    model = named("a", "b")
    written = draft(model, ["b"], STATIC, channel=True)
    written.tensors |= {"a.weight_scale": torch.full((8,), 5.0), "a.input_scale": torch.ones(1)}  # junk beside it
    loaded = anyfp8.load(stale(model), auto_round(tmp_path, written))
    assert_close(loaded["a"].weight, model["a"].weight, 0)
    skipped = anyfp8.report(loaded).skipped
    assert set(skipped) == {"a.weight_scale", "a.input_scale"}
    assert all("stored in float" in reason for reason in skipped.values())


# --- what is not a weight ---
def test_kv_scales_are_reported(tmp_path):
    model = named("a")
    written = draft(model, ["a"], STATIC, channel=True)
    written.tensors |= {f"self_attn.{n}_scale": torch.ones(2) for n in "kvq"} | {"act.input_scale": torch.ones(1)}
    report = check(model, written, auto_round(tmp_path, written, static_kv_dtype="fp8", static_attention_dtype="fp8"))
    assert set(report.skipped) == {f"self_attn.{n}_scale" for n in "kvq"} | {"act.input_scale"}
    assert any("KV-cache" in note for note in report.notes)


# --- refusals ---
@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"rotation_config": {"kind": "hadamard"}}, "rotation_config"),
        ({"fmt": "e5m2"}, "e5m2"),
        ({"data_type": "fp8_e5m2"}, "e5m2"),
        ({"sym": False}, r"\ba\b.*sym is False"),
        ({"bits": 4}, r"\ba\b.*bits is 4"),
        ({"data_type": "int"}, r"\ba\b.*data_type is 'int'"),
        ({"data_type": None}, r"\ba\b.*data_type is 'int'"),
        ({"act_bits": 4}, r"\ba\b.*act_bits is 4"),
        ({"act_data_type": "int"}, r"\ba\b.*act_data_type is 'int'"),
        ({"act_sym": False}, r"\ba\b.*act_sym is False"),
        ({"act_group_size": -1}, r"\ba\b.*act_tile"),  # static per token
        ({"group_size": [128]}, r"group_size is \[128\]"),
        ({"group_size": [4, 4, 4]}, "group_size is"),
        ({"group_size": 4}, r"a\.weight_scale.*\[8\]"),
        ({"group_size": 0}, r"a\.weight_scale.*\[8\]"),
        ({"extra_config": {"a": {"data_type": "mx_fp", "group_size": 32}}}, r"\ba\b.*mx_fp|a\.weight_scale"),
        # malformed
        ({"group_size": "channel"}, "channel"),
        ({"group_size": 1.5}, r"1\.5|malformed"),
        ({"bits": "8"}, "'8'|malformed"),
        ({"bits": {}}, "bits|malformed"),
        ({"act_group_size": "x"}, "x"),
        ({"act_dynamic": "no"}, "act_dynamic"),
        ({"extra_config": ["a"]}, "extra_config|malformed"),
        ({"extra_config": {"a": 8}}, "extra_config|malformed"),
        ({"extra_config": {"(": {"bits": 16}}}, r"extra_config|malformed"),
        ({"extra_config": {"a": {"bits": "16"}}}, "bits|malformed"),
    ],
    ids=str,
)
def test_refused_configs(tmp_path, config, match):
    model = named("a", "b")
    written = draft(model, ["a", "b"], STATIC, channel=True)
    folder = auto_round(tmp_path, written, **config)
    with pytest.raises(anyfp8.AnyFP8Error, match=f"(?s){match}"):
        anyfp8.load(model, folder)
    assert type(model["a"]) is nn.Linear


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("a.weight_scale"), r"a\.weight_scale"),
        (lambda t: t.pop("a.input_scale"), r"a\.input_scale"),
        (lambda t: t.update({"a.weight": t["a.weight"].float().to(torch.float8_e5m2)}), r"a\.weight.*e5m2"),
        (lambda t: t.update({"a.weight_scale_inv": torch.ones(1)}), r"a\.weight_scale_inv"),
        (lambda t: t.update({"c.weight": torch.zeros(2, 2).to(F8)}), r"c\.weight_scale"),
        (lambda t: t.update({"c.weight_scale": torch.ones(1)}), r"c\.weight_scale"),
        (lambda t: t.update({"a.weight_zp": torch.ones(1)}), r"a\.weight_zp"),
    ],
)
def test_tensors_that_contradict_the_format(tmp_path, change, match):
    model = named("a", "b")
    written = draft(model, ["a", "b"], STATIC, channel=True)
    change(written.tensors)
    with pytest.raises(anyfp8.LoadError, match=f"(?s){match}"):
        anyfp8.load(model, auto_round(tmp_path, written))


def test_an_input_scale_of_a_weight_only_layer_is_not_dropped_in_silence(tmp_path):
    model = named("a")
    written = draft(model, ["a"], STATIC)
    with pytest.raises(anyfp8.LoadError, match=r"a\.input_scale"):
        anyfp8.load(model, auto_round(tmp_path, written, AR_WEIGHT_ONLY))


def test_extra_config_follows_the_files_names_under_rename(tmp_path):
    model = mlp()
    written = draft(model, ["0", "2"], STATIC, channel=True)
    written.tensors["0.weight_scale"] = torch.ones(1)
    foreign = written.renamed(lambda path: f"net.layer{path}")
    folder = auto_round(tmp_path, foreign, extra_config={r"layer0": {"group_size": 0}})
    loaded = anyfp8.load(stale(model), folder, rename={r"^net\.layer": ""})
    assert_close(loaded[0].weight, written.tensors["0.weight"].float(), 0)
    assert_close(loaded[2].weight, written.weight("2"), 0)
