import copy
import dataclasses
import json
import pickle
from collections.abc import Mapping

import pytest
import torch

from anyfp8 import QuantizationScheme
from anyfp8.errors import AnyFP8Error, SchemeError
from anyfp8.scheme import ACT_SCALES, FP8_DTYPES, PRESETS, SCALE_DTYPES, WEIGHT_DTYPES

E4M3, FP4 = "float8_e4m3fn", "float4_e2m1fn"
FIELDS = ("weight_dtype", "tile", "scale_dtype", "act_dtype", "act_dynamic", "act_tile")
#: shown only where they differ from these
RARE = {"act_scale": "float32", "symmetric": True, "act_symmetric": True, "out_dtype": None}
STATIC = QuantizationScheme(act_dtype=E4M3)
DYNAMIC = QuantizationScheme(tile=(1, -1), act_dtype=E4M3, act_dynamic=True, act_tile=(1, -1))
WEIGHT_ONLY = QuantizationScheme(tile=(128, 128), weight_dtype="float8_e5m2", scale_dtype="bfloat16")
SHIFTED = QuantizationScheme(act_dtype=E4M3, symmetric=False, act_symmetric=False, out_dtype="float8_e5m2")
schemes = pytest.mark.parametrize(
    "scheme", [STATIC, DYNAMIC, WEIGHT_ONLY, SHIFTED, *PRESETS.values()], ids=lambda s: str(s).replace(" ", "-")
)


# --- a value ---
def test_defaults():
    assert QuantizationScheme() == QuantizationScheme(E4M3, (-1, -1), "float32", None, False, (-1, -1))


@pytest.mark.parametrize("field", [*FIELDS, *RARE])
def test_frozen(field):
    with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{field}'"):
        setattr(STATIC, field, STATIC[field])
    with pytest.raises(TypeError, match="does not support item assignment"):
        STATIC[field] = STATIC[field]


def test_equality_and_hash():
    again = QuantizationScheme.from_dict(DYNAMIC.to_dict())
    assert again == DYNAMIC
    assert hash(again) == hash(DYNAMIC)
    assert {again, DYNAMIC, STATIC} == {DYNAMIC, STATIC}
    assert STATIC != DYNAMIC
    assert dict(STATIC) != STATIC  # only a scheme is a scheme


@schemes
def test_copies(scheme):
    for twin in (copy.copy(scheme), copy.deepcopy(scheme), pickle.loads(pickle.dumps(scheme))):
        assert twin == scheme
        assert type(twin) is QuantizationScheme


def test_torch_dtypes_and_lists_become_plain_values():
    scheme = QuantizationScheme(torch.float8_e5m2, [1, 16], torch.bfloat16, torch.float8_e4m3fn)
    assert (scheme.weight_dtype, scheme.scale_dtype, scheme.act_dtype) == ("float8_e5m2", "bfloat16", E4M3)
    assert scheme.tile == (1, 16)
    assert isinstance(hash(scheme), int)


# --- dict-style access ---
@schemes
def test_is_a_mapping(scheme):
    assert isinstance(scheme, Mapping)
    shown = (*FIELDS, *(name for name, usual in RARE.items() if getattr(scheme, name) != usual))
    assert tuple(scheme) == shown == tuple(scheme.keys())
    assert len(scheme) == len(shown)
    assert dict(scheme) == {name: getattr(scheme, name) for name in shown}
    assert list(scheme.values()) == [scheme[name] for name in shown]
    assert QuantizationScheme(**scheme) == scheme
    assert {**scheme, "act_dynamic": 1}["act_dynamic"] == 1


def test_rare_fields_can_always_be_asked_for():
    for scheme in (STATIC, SHIFTED):
        assert [scheme[name] for name in RARE] == [getattr(scheme, name) for name in RARE]
        assert all(name in scheme for name in RARE)
    assert STATIC.get("out_dtype", "x") is None


def test_get_and_in():
    assert "tile" in DYNAMIC
    assert "bits" not in DYNAMIC
    assert 3 not in DYNAMIC
    assert DYNAMIC.get("act_dynamic") is True
    assert DYNAMIC.get("act_dtype", "x") == E4M3
    assert WEIGHT_ONLY.get("act_dtype", "x") is None
    assert DYNAMIC.get("bits") is None
    assert DYNAMIC.get("bits", 8) == 8


@pytest.mark.parametrize("key", ["bits", "weight_only", "__class__", "", 0])
def test_unknown_key_lists_the_valid_ones(key):
    with pytest.raises(KeyError, match="a QuantizationScheme has weight_dtype, tile, scale_dtype, act_dtype, act_dyn"):
        STATIC[key]


# --- to and from dicts ---
@schemes
def test_dict_round_trip_through_json(scheme):
    plain = json.loads(json.dumps(scheme.to_dict()))
    assert plain == scheme.to_dict()
    assert list(plain) == list(scheme)
    assert plain["tile"] == list(scheme.tile)
    assert QuantizationScheme.from_dict(plain) == scheme
    assert QuantizationScheme.from_dict(scheme) == scheme


def test_from_dict_fills_defaults():
    assert QuantizationScheme.from_dict({}) == QuantizationScheme()
    assert QuantizationScheme.from_dict({"act_dtype": E4M3}) == STATIC


def test_from_dict_refuses_unknown_keys():
    with pytest.raises(
        SchemeError, match=r"unknown key 'bits', 'tiles'; valid: weight_dtype, tile, scale_dtype, act_dtype, act_dy"
    ):
        QuantizationScheme.from_dict({"bits": 8, "tile": [1, -1], "tiles": 0})


def test_scheme_errors_are_value_errors():
    assert issubclass(SchemeError, AnyFP8Error)
    assert issubclass(SchemeError, ValueError)


# --- bad values ---
@pytest.mark.parametrize("bad", ["float8_e4m3", "int8", "bfloat16", None, 8, ["x"], torch.float16])
@pytest.mark.parametrize("field", ["weight_dtype", "act_dtype"])
def test_bad_fp8_dtype(field, bad):
    if field == "act_dtype" and bad is None:
        assert QuantizationScheme(act_dtype=None).weight_only
        return
    with pytest.raises(SchemeError, match=f"{field} is .*; valid: (None, )?{', '.join(WEIGHT_DTYPES)}"):
        QuantizationScheme(**{field: bad})


@pytest.mark.parametrize("bad", ["int8", "float4_e2m1fn", torch.float16])
def test_bad_out_dtype(bad):
    with pytest.raises(SchemeError, match=f"out_dtype is .*; valid: None, {', '.join(FP8_DTYPES)}"):
        QuantizationScheme(act_dtype=E4M3, out_dtype=bad)


@pytest.mark.parametrize("bad", ["e8m0", None, "bfloat16", 0])
def test_bad_act_scale(bad):
    with pytest.raises(SchemeError, match=f"act_scale is .*; valid: {', '.join(ACT_SCALES)}"):
        QuantizationScheme(act_dtype=E4M3, act_dynamic=True, act_scale=bad)


@pytest.mark.parametrize("bad", ["int8", None, "float8_e5m2"])
def test_bad_scale_dtype(bad):
    with pytest.raises(SchemeError, match=f"scale_dtype is .*; valid: {', '.join(SCALE_DTYPES)}"):
        QuantizationScheme(scale_dtype=bad)


@pytest.mark.parametrize("bad", [0, 1, None, "false", "True"])
@pytest.mark.parametrize("field", ["act_dynamic", "symmetric", "act_symmetric"])
def test_switches_are_bools(field, bad):
    with pytest.raises(SchemeError, match=f"{field} is .*; valid: True, False"):
        QuantizationScheme(act_dtype=E4M3, **{field: bad})


@pytest.mark.parametrize("bad", [None, 128, "128x128", b"ab", 1.5])
@pytest.mark.parametrize("field", ["tile", "act_tile"])
def test_tiles_are_lists(field, bad):
    with pytest.raises(SchemeError, match=f"{field} is .*; valid: a list of sizes, -1 for a whole axis"):
        QuantizationScheme(**{field: bad})


@pytest.mark.parametrize("bad", [[], [0, 1], [-2, 1], [1.0, -1], [True, -1], ["1", 2], [None, 1]])
@pytest.mark.parametrize("field", ["tile", "act_tile"])
def test_tiles_hold_sizes(field, bad):
    with pytest.raises(SchemeError, match=f"{field} is .*; valid: positive sizes, -1 for a whole axis"):
        QuantizationScheme(**{field: bad})


@pytest.mark.parametrize("bad", [[-1], [1, -1, -1], [2, -1], [128, 128], [-1, 128], [-1, 1]])
def test_act_tile_is_tensor_token_or_group(bad):
    with pytest.raises(SchemeError, match=r"act_tile is .*; valid: \[-1, -1\] per tensor, \[1, -1\] per token, "):
        QuantizationScheme(act_dtype=E4M3, act_dynamic=True, act_tile=bad)


@pytest.mark.parametrize("extra", [{"act_dynamic": True}, {"act_tile": (1, -1)}, {"act_tile": (1, 128)}])
def test_weight_only_contradicts_dynamic(extra):
    with pytest.raises(SchemeError, match=r"act_dtype is null \(weight-only\), so act_dynamic must be false"):
        QuantizationScheme(**extra)


@pytest.mark.parametrize("tile", [(1, -1), (1, 128)])
def test_static_contradicts_token(tile):
    with pytest.raises(SchemeError, match=r"a static input has one scale: act_tile must be \[-1, -1\], not \[1, "):
        QuantizationScheme(act_dtype=E4M3, act_tile=tile)


@pytest.mark.parametrize("scheme", [STATIC, WEIGHT_ONLY])
def test_rounded_scales_contradict_static(scheme):
    with pytest.raises(SchemeError, match="act_scale 'e8m0_floor' is for dynamic inputs"):
        dataclasses.replace(scheme, act_scale="e8m0_floor")


@pytest.mark.parametrize("scheme", [DYNAMIC, WEIGHT_ONLY])
def test_zero_points_of_inputs_are_static(scheme):
    with pytest.raises(SchemeError, match="only a static input can have a zero point: act_symmetric must be true"):
        dataclasses.replace(scheme, act_symmetric=False)


# --- presets ---
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FP8_STATIC", "e4m3fn per channel, input static e4m3fn per tensor"),
        ("FP8", "e4m3fn per tensor, input static e4m3fn per tensor"),
        ("FP8_DYNAMIC", "e4m3fn per channel, input dynamic e4m3fn per token"),
        ("FP8_BLOCK", "e4m3fn per 128×128, input dynamic e4m3fn per 1×128"),
        ("FP8_WEIGHT_ONLY", "e4m3fn per channel, weight-only"),
        ("FPW8A16", "e4m3fn per tensor, weight-only"),
        ("MXFP8", "e4m3fn per 1×32 (e8m0 scales), input dynamic e4m3fn per 1×32 (e8m0_floor scales)"),
        ("MXFP4", "fp4 per 1×32 (e8m0 scales), input dynamic fp4 per 1×32 (e8m0_floor scales)"),
        ("MXFP6A16", "fp6 per 1×32 (e8m0 scales), weight-only"),
        ("NVFP4", "fp4 per 1×16 (e4m3 scales), input dynamic fp4 per 1×16 (e4m3 scales)"),
    ],
)
def test_presets(name, text):
    assert str(QuantizationScheme.from_preset(name)) == text
    assert QuantizationScheme.from_preset(name.lower()) is PRESETS[name]


@pytest.mark.parametrize("name", ["FP9", "", "fp8 static"])
def test_unknown_preset_lists_the_known(name):
    with pytest.raises(SchemeError, match=f"unknown preset '{name}'; valid: FP8_STATIC, FP8, FP8_DYNAMIC, FP8_BLOCK"):
        QuantizationScheme.from_preset(name)


# --- auto-round's words ---
AR = {"bits": 8, "data_type": "fp", "sym": True}
AR_STATIC = AR | {"group_size": -1, "act_bits": 8, "act_data_type": "fp", "act_group_size": 0, "act_dynamic": False}


@pytest.mark.parametrize(
    ("values", "want"),
    [
        (AR_STATIC, PRESETS["FP8_STATIC"]),
        (AR_STATIC | {"group_size": 0}, PRESETS["FP8"]),
        (AR_STATIC | {"act_sym": True, "super_bits": None, "super_group_size": None}, PRESETS["FP8_STATIC"]),
        (AR, PRESETS["FP8_WEIGHT_ONLY"]),
        (AR | {"act_bits": 16, "act_data_type": "float", "act_dynamic": True}, PRESETS["FP8_WEIGHT_ONLY"]),
        (AR | {"act_bits": None, "sym": None, "group_size": None}, PRESETS["FP8_WEIGHT_ONLY"]),
        (AR | {"group_size": 0, "data_type": "fp8_e4m3"}, PRESETS["FPW8A16"]),
        (AR | {"group_size": 128}, QuantizationScheme(tile=(1, 128))),
        (AR | {"group_size": (64, 32)}, QuantizationScheme(tile=(64, 32))),
        (AR | {"act_bits": 8}, DYNAMIC),
        (AR | {"act_bits": 8, "group_size": [128, 128]}, PRESETS["FP8_BLOCK"]),
        (AR_STATIC | {"act_group_size": None, "group_size": 0}, PRESETS["FP8"]),
        ({"bits": 8, "data_type": "mx_fp", "group_size": 32, "act_bits": 8}, PRESETS["MXFP8"]),
        ({"bits": 4, "data_type": "mx_fp", "group_size": 32}, PRESETS["MXFP4A16"]),
        ({"bits": 4, "data_type": "nv_fp", "group_size": 16, "act_bits": 4}, PRESETS["NVFP4"]),
    ],
)
def test_from_auto_round(values, want):
    assert QuantizationScheme.from_auto_round(values) == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 4}, "bits is 4; valid: 8"),
        ({"bits": None}, "bits is 4; valid: 8"),
        ({"data_type": "int"}, "data_type is 'int'; valid: fp, fp8, fp8_e4m3"),
        ({"data_type": "nv_fp"}, "bits is 8; valid: 4"),
        ({"data_type": "nv_fp", "bits": 4, "group_size": 32}, "group_size is 32; valid: 16"),
        ({"data_type": "mx_fp"}, "group_size is -1; valid: 32"),
        ({"data_type": "mx_fp", "group_size": 32, "act_bits": 8, "act_dynamic": False}, "act_dynamic is False; valid"),
        ({"sym": False}, "sym is False; valid: True"),
        ({"act_bits": 4}, "act_bits is 4; valid: 8"),
        ({"act_bits": 8, "act_data_type": "int"}, "act_data_type is 'int'; valid: fp, fp8, fp8_e4m3"),
        ({"act_bits": 8, "act_sym": False}, "act_sym is False; valid: True"),
        ({"rotation_config": {"x": 1}}, "rotation_config, super_bits and super_group_size are not supported"),
        ({"super_bits": 6}, "rotation_config, super_bits and super_group_size are not supported"),
        ({"group_size": -2}, "valid: positive sizes"),
        ({"group_size": "x"}, "valid: positive sizes"),
        ({"weight_dtype": E4M3}, "auto-round scheme has unknown key 'weight_dtype'; valid: bits, group_size, sym"),
        ({"act_bits": 8, "act_dynamic": False}, r"a static input has one scale"),
        ({"act_bits": 8, "act_dynamic": "yes"}, "act_dynamic is 'yes'"),
    ],
)
def test_from_auto_round_refuses(change, message):
    with pytest.raises(SchemeError, match=message):
        QuantizationScheme.from_auto_round(AR | change)


@pytest.mark.parametrize(
    "change",
    [{"act_bits": "8"}, {"act_bits": 8, "act_group_size": [1, 128]}, {"act_bits": 8, "act_group_size": "all"}],
)
def test_from_auto_round_refuses_values_of_another_type(change):
    (key,) = set(change) - {"act_bits"} or {"act_bits"}
    with pytest.raises(SchemeError, match=key):
        QuantizationScheme.from_auto_round(AR | change)


# --- compressed-tensors' words ---
SHIFTED_E4M3 = dataclasses.replace(SHIFTED, out_dtype=E4M3)
CT = {"num_bits": 8, "type": "float", "symmetric": True}


def ct(weights, act=None, **group):
    return {"weights": CT | weights, "input_activations": None if act is None else CT | act, **group}


@pytest.mark.parametrize(
    ("group", "want"),
    [
        (ct({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}), PRESETS["FP8"]),
        (ct({"strategy": "channel"}, {"strategy": "tensor", "dynamic": False}), PRESETS["FP8_STATIC"]),
        (ct({"strategy": "channel"}, {"strategy": "token", "dynamic": True}), PRESETS["FP8_DYNAMIC"]),
        (ct({"strategy": "channel"}), PRESETS["FP8_WEIGHT_ONLY"]),
        (ct({"strategy": "tensor"}), PRESETS["FPW8A16"]),
        (ct({"strategy": "group", "group_size": 64}), QuantizationScheme(tile=(1, 64))),
        (
            ct(
                {"strategy": "block", "block_structure": [128, 128]},
                {"strategy": "group", "group_size": 128, "dynamic": True},
            ),
            PRESETS["FP8_BLOCK"],
        ),
        (ct({"strategy": "block", "block_structure": "64x32"}), QuantizationScheme(tile=(64, 32))),
        (
            ct({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": True}),
            QuantizationScheme(act_dtype=E4M3, act_dynamic=True),
        ),
        (ct({"symmetric": False}, {"symmetric": False}, output_activations=CT | {"num_bits": 8}), SHIFTED_E4M3),
        (
            ct({"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
            PRESETS["MXFP8A16"],
        ),
        (
            ct(
                {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
                {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
            ),
            PRESETS["NVFP4"],
        ),
        # strategies that are left out follow from group_size
        (ct({"group_size": -1}), PRESETS["FP8_WEIGHT_ONLY"]),
        (ct({"group_size": 32}), QuantizationScheme(tile=(1, 32))),
        (ct({}), PRESETS["FPW8A16"]),
        # what else real files hold
        (
            {
                "targets": ["Linear"],
                "format": "float-quantized",
                "output_activations": None,
                "weights": CT
                | {
                    "strategy": "channel",
                    "group_size": None,
                    "block_structure": None,
                    "dynamic": False,
                    "actorder": None,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "scale_dtype": None,
                    "zp_dtype": None,
                },
            },
            PRESETS["FP8_WEIGHT_ONLY"],
        ),
    ],
)
def test_from_compressed_tensors(group, want):
    assert QuantizationScheme.from_compressed_tensors(group) == want


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (ct({"strategy": "token"}), "weights: strategy is 'token'; valid: tensor, channel, group, block"),
        (ct({"strategy": "tensor_group", "group_size": 16}), "weights: strategy is 'tensor_group'; valid: tensor, ch"),
        (
            ct({}, {"strategy": "channel"}),
            r"input_activations: strategy is 'channel'; valid: tensor \(static or dynamic\), token, group",
        ),
        (ct({}, {"strategy": "block", "block_structure": [1, 128]}), "input_activations: strategy is 'block'; valid"),
        (ct({"num_bits": 4}), "weights: num_bits is 4; valid: 8"),
        (ct({"type": "int"}), "weights: type is 'int'; valid: float"),
        (ct({"type": None}), "weights: type is 'int'; valid: float"),
        (ct({"symmetric": "no"}), "weights: symmetric is 'no'; valid: True, False"),
        (ct({}, {"num_bits": 4}), "input_activations: num_bits is 4; valid: 8"),
        (ct({}, {"symmetric": False, "dynamic": True}), "only a static input can have a zero point"),
        (ct({"strategy": "group"}), "weights: strategy 'group' needs a group_size, not None"),
        (ct({"strategy": "group", "group_size": 0}), "weights: strategy 'group' needs a group_size, not 0"),
        (ct({"strategy": "group", "group_size": "x"}), "weights: strategy 'group' needs a group_size, not 'x'"),
        (ct({"strategy": "block"}), r"weights: strategy 'block' needs a block_structure such as \[128, 128\]"),
        (ct({"strategy": "block", "block_structure": [0, 5]}), "tile is .*; valid: positive sizes"),
        (
            ct({"strategy": "tensor", "sparsity": 1}),
            "compressed-tensors weights has unknown key 'sparsity'",
        ),
        (ct({}, {"bits": 8}), "compressed-tensors input_activations has unknown key 'bits'; valid: num_bits"),
        (ct({}, scheme=1), "compressed-tensors group has unknown key 'scheme'; valid: targets, weights"),
        (ct({}, output_activations=CT | {"strategy": "token"}), "output_activations: strategy is 'token'; valid: ten"),
        (ct({}, output_activations=CT | {"dynamic": True}), "output_activations: dynamic is True; valid: False"),
        (ct({"scale_dtype": "uint8"}), "weights: scale_dtype is 'uint8'; valid: float types"),
        (ct({}, {"strategy": "token", "dynamic": False}), "a static input has one scale"),
    ],
)
def test_from_compressed_tensors_refuses(group, message):
    with pytest.raises(SchemeError, match=message):
        QuantizationScheme.from_compressed_tensors(group)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"weights": None}, "weights"),
        ({"weights": "FP8"}, "weights"),
        (ct({"strategy": "block", "block_structure": "128xab"}), "block_structure"),
        (ct({"strategy": "block", "block_structure": 128}), "block_structure"),
        (ct({}, {"strategy": "token", "dynamic": "local"}), "dynamic"),
        ({"weights": CT, "input_activations": "FP8"}, "input_activations"),
    ],
)
def test_from_compressed_tensors_refuses_values_of_another_type(group, message):
    """A hand-edited config must not end in a TypeError from deep inside."""
    with pytest.raises(SchemeError, match=message):
        QuantizationScheme.from_compressed_tensors(group)


# --- of() ---
def test_of_reads_every_notation():
    want = PRESETS["FP8_STATIC"]
    ours = {"tile": [1, -1], "act_dtype": E4M3}
    for value in (want, "fp8_static", ours, dict(want), AR_STATIC, ct({"strategy": "channel"}, {"strategy": "tensor"})):
        assert QuantizationScheme.of(value) == want
    assert QuantizationScheme.of(want) is want


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nonsense", "unknown preset 'nonsense'"),
        ({"nonsense": 1}, "QuantizationScheme has unknown key 'nonsense'"),
        ({"bits": 8, "tile": [1, -1]}, "auto-round scheme has unknown key 'tile'"),
        ({"weights": CT, "bits": 8}, "auto-round scheme has unknown key 'weights'"),
        ({"weights": CT, "tile": 8}, "compressed-tensors group has unknown key 'tile'"),
    ],
)
def test_of_refuses(value, message):
    with pytest.raises(SchemeError, match=message):
        QuantizationScheme.of(value)


@pytest.mark.parametrize("value", [None, 8, ["FP8"], torch.float8_e4m3fn])
def test_of_refuses_other_types_in_words(value):
    with pytest.raises(SchemeError, match=r"[sS]cheme"):
        QuantizationScheme.of(value)


# --- questions ---
def test_tensors_that_a_scheme_needs():
    assert [(s.needs_input_scale, s.extras) for s in (STATIC, DYNAMIC, WEIGHT_ONLY, PRESETS["NVFP4"], SHIFTED)] == [
        (True, ()),
        (False, ()),
        (False, ()),
        (True, ()),
        (True, ("weight_zero_point", "input_zero_point", "output_scale")),
    ]


@schemes
def test_weight_only_twin(scheme):
    twin = scheme.weight_only_twin()
    assert twin.weight_only
    assert twin.out_dtype is None
    for name in ("weight_dtype", "tile", "scale_dtype", "symmetric"):
        assert twin[name] == scheme[name]


def test_weight_only_and_static():
    assert [(s.weight_only, s.static) for s in (STATIC, DYNAMIC, WEIGHT_ONLY)] == [
        (False, True),
        (False, False),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("tile", "rank", "want"),
    [
        ((-1, -1), 2, (-1, -1)),
        ((-1, -1), 4, (-1, -1, -1, -1)),
        ((1, -1), 3, (1, -1, -1)),
        ((1, -1), 5, (1, -1, -1, -1, -1)),
        ((-1,), 2, (-1, -1)),
        ((1, -1, -1, -1), 2, (1, -1)),
        ((16, -1), 4, (16, -1, -1, -1)),
        ((1, 128), 4, (1, 128)),  # says nothing about the other axes: left for the check against the shape
        ((128, 128), 2, (128, 128)),
    ],
)
def test_for_rank(tile, rank, want):
    scheme = QuantizationScheme(tile=tile, act_dtype=E4M3)
    assert scheme.for_rank(rank) == dataclasses.replace(scheme, tile=want)


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        (STATIC, "e4m3fn per tensor, input static e4m3fn per tensor"),
        (DYNAMIC, "e4m3fn per channel, input dynamic e4m3fn per token"),
        (WEIGHT_ONLY, "e5m2 per 128×128, weight-only"),
        (QuantizationScheme(tile=(1, 32)), "e4m3fn per 1×32, weight-only"),
        (QuantizationScheme(tile=(1, -1, -1, -1)), "e4m3fn per channel, weight-only"),
        (QuantizationScheme(tile=(-1, -1, -1)), "e4m3fn per tensor, weight-only"),
        (QuantizationScheme(tile=(-1, 8)), "e4m3fn per ·×8, weight-only"),
        (
            SHIFTED,
            "e4m3fn per tensor with zero points, input static e4m3fn per tensor with a zero point, output e5m2",
        ),
        (
            QuantizationScheme("float8_e4m3fnuz", act_dtype="float8_e5m2fnuz", act_dynamic=True, act_tile=(1, 64)),
            "e4m3fnuz per tensor, input dynamic e5m2fnuz per 1×64",
        ),
    ],
)
def test_str(scheme, text):
    assert str(scheme) == text


@schemes
def test_repr_can_be_evaluated(scheme):
    assert eval(repr(scheme), {"QuantizationScheme": QuantizationScheme}) == scheme
