"""torchao's flattened tensors: the header's records are the truth."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyfp8
from tests.checkpoints import F8, Snapshot, mlp, stale, write_json
from tests.dialects.test_comfy import One, swizzle
from tests.helpers import assert_close, bytes_of, randn

E4M3 = "float8_e4m3fn"


def dtype_of(name):
    return {"_type": "torch.dtype", "_data": name}


def act(granularity="PerRow", dtype=E4M3, where=None, **more):
    where = ({"dim": -1} if granularity == "PerRow" else {}) if where is None else where
    data = {"float8_dtype": dtype_of(dtype), "granularity": {"_type": granularity, "_data": where}, "mm_config": None}
    data |= {"hp_value_lb": None, "hp_value_ub": None} | more
    return {"_type": "QuantizeTensorToFloat8Kwargs", "_data": data}


def float8(block, inputs=None, **more):
    data = {"block_size": block, "mm_config": None, "act_quant_kwargs": inputs, "dtype": dtype_of("float32")} | more
    return {"_type": "Float8Tensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]}


def mx(mode=None, swizzled=False, size=32):
    inputs = {"elem_dtype": dtype_of(E4M3), "block_size": size, "scaling_mode": {"_type": "S", "_data": mode}}
    inputs = None if mode is None else {"_type": "QuantizeTensorToMXKwargs", "_data": inputs}
    data = {
        "elem_dtype": dtype_of(E4M3),
        "block_size": size,
        "is_swizzled_scales": swizzled,
        "act_quant_kwargs": inputs,
    }
    return {"_type": "MXTensor", "_data": data, "_tensor_data_names": ["qdata", "scale"]}


def write(path, tensors, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {name: json.dumps(record) for name, record in records.items()}
    metadata |= {name: '{"_type": "Tensor"}' for name in tensors if "._" not in name}
    metadata |= {"tensor_names": json.dumps(sorted(metadata)), "format": "pt"}
    save_file({name: t.detach().clone().contiguous() for name, t in tensors.items()}, path, metadata=metadata)
    return path


def quantized(weight, block, dtype=F8):
    """Codes and scale, shape [rows / block, columns / block]; no epsilon, as torchao has none."""
    rows, columns = (n // b for n, b in zip(weight.shape, block, strict=True))
    tiles = weight.detach().reshape(rows, block[0], columns, block[1])
    scale = tiles.abs().amax((1, 3)) / torch.finfo(dtype).max
    codes = (tiles / scale[:, None, :, None]).to(dtype).reshape(weight.shape)
    return codes, scale, (tiles / scale[:, None, :, None]).to(dtype).float() * scale[:, None, :, None]


def files(block, inputs=None, dtype=F8):
    """The tensors and records of an MLP with both layers in FP8, and the weights they mean."""
    tensors, records, weights = dict(mlp(i=32, h=64, o=32).state_dict()), {}, {}
    for name in ("0", "2"):
        weight = tensors.pop(f"{name}.weight")
        own = [n if b == -1 else b for n, b in zip(weight.shape, block, strict=True)]
        codes, scale, real = quantized(weight, own, dtype)
        tensors |= {f"{name}._weight_qdata": codes, f"{name}._weight_scale": scale}
        records[f"{name}.weight"] = float8(own, inputs)
        weights[name] = real.reshape(weight.shape)
    return tensors, records, weights


def model():
    return stale(mlp(i=32, h=64, o=32))


@pytest.mark.parametrize(
    ("block", "inputs", "tile", "act_tile"),
    [
        ((1, -1), None, (1, -1), None),
        ((-1, -1), None, (-1, -1), None),
        ((1, 32), None, (1, 32), None),
        ((1, -1), act(), (1, -1), (1, -1)),
        ((-1, -1), act("PerTensor"), (-1, -1), (-1, -1)),
        ((16, 16), act("PerBlock", where={"block_size": [1, 16]}), (16, 16), (1, 16)),
        ((1, 16), act("PerGroup", where={"group_size": 16}), (1, 16), (1, 16)),
    ],
)
@pytest.mark.parametrize("dtype", [F8, torch.float8_e5m2])
def test_granularity_of_weights_and_inputs(tmp_path, block, inputs, tile, act_tile, dtype):
    tensors, records, weights = files(block, inputs, dtype)
    path = write(tmp_path / "model.safetensors", tensors, records)
    manifest = anyfp8.inspect(path)
    assert (manifest.dialect, manifest.problems, manifest.unclaimed, manifest.exceptions) == ("torchao", (), {}, {})
    loaded = anyfp8.load(model(), path)
    scheme = loaded[2].scheme
    assert f"torch.{scheme.weight_dtype}" == str(dtype)
    # one group over all columns of the first layer is the same as the whole row
    assert scheme.tile == tile
    assert (scheme.act_dtype, scheme.act_dynamic) == (None if inputs is None else E4M3, inputs is not None)
    assert inputs is None or scheme.act_tile == act_tile
    for name, weight in weights.items():
        assert_close(loaded[int(name)].weight, weight)


def test_a_block_as_large_as_the_weight_and_no_block_at_all(tmp_path):
    tensors, records, weights = files((-1, -1))
    records["0.weight"]["_data"]["block_size"] = []
    loaded = anyfp8.load(model(), write(tmp_path / "model.safetensors", tensors, records))
    assert loaded[0].scheme.tile == (-1, -1)
    assert_close(loaded[0].weight, weights["0"])


def test_the_inputs_dtype_is_its_own(tmp_path):
    tensors, records, _ = files((1, -1), act(dtype="float8_e5m2"))
    path = write(tmp_path / "model.safetensors", tensors, records)
    assert anyfp8.inspect(path).layer_config["0"].act_dtype == "float8_e5m2"


def test_dynamic_rows_of_zeros_stay_zero(tmp_path):
    tensors, records, weights = files((1, -1), act())
    loaded = anyfp8.load(model(), write(tmp_path / "model.safetensors", tensors, records))
    x = randn(4, 32)
    x[1] = 0
    assert_close(loaded[0](x)[1], mlp(i=32, h=64, o=32)[0].bias)
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448
    want = (x / scale).to(F8).float() * scale @ weights["0"].T + tensors["0.bias"]
    assert_close(loaded[0](x), want, 1e-5)


# --- rows of zeros in a weight ---
def test_nan_codes_under_a_scale_of_zero_are_zeros(tmp_path):
    weight = randn(8, 32)
    weight[[0, 5]] = 0
    codes, scale, _ = quantized(weight, (1, 32))
    assert int(codes.float().isnan().sum()) == 64
    tensors = {"fc._weight_qdata": codes, "fc._weight_scale": scale}
    path = write(tmp_path / "model.safetensors", tensors, {"fc.weight": float8([1, 32])})
    loaded = anyfp8.load(One(8, 32), path)
    assert_close(loaded.fc.weight[[0, 5]], torch.zeros(2, 32))
    rest = [1, 2, 3, 4, 6, 7]
    assert bytes_of(loaded.fc.weight_codes[rest]) == bytes_of(codes[rest])
    assert loaded(randn(3, 32)).isfinite().all()
    assert any("NaN codes under a scale of 0 were taken as 0: fc.weight" in n for n in anyfp8.report(loaded).notes)
    assert anyfp8.load(One(8, 32), path, exclude="*").fc.weight.isfinite().all()


def test_tiles_of_zeros_too(tmp_path):
    weight = randn(32, 48)
    weight[16:, 32:] = 0
    codes, scale, real = quantized(weight, (16, 16))
    tensors = {"fc._weight_qdata": codes, "fc._weight_scale": scale}
    path = write(tmp_path / "model.safetensors", tensors, {"fc.weight": float8([16, 16])})
    assert_close(anyfp8.load(One(32, 48), path).fc.weight, real.reshape(32, 48).nan_to_num())


def test_any_other_nan_is_refused(tmp_path):
    codes, scale, _ = quantized(randn(8, 32), (1, 32))
    codes.view(torch.uint8)[3, 3] = 0x7F
    scale[2] = 0  # a scale of 0 elsewhere doesn't excuse it, and is no fault itself
    tensors = {"fc._weight_qdata": codes, "fc._weight_scale": scale}
    path = write(tmp_path / "model.safetensors", tensors, {"fc.weight": float8([1, 32])})
    with pytest.raises(anyfp8.LoadError, match=r"fc\._weight_qdata .*1 of its codes are NaN"):
        anyfp8.load(One(8, 32), path)


# --- MX ---
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("mode", "kind"), [(None, None), ("FLOOR", "e8m0_floor"), ("RCEIL", "e8m0_ceil")])
def test_mx_tensors(tmp_path, swizzled, mode, kind):
    codes = (randn(160, 96) * 50).to(F8)
    exponents = torch.randint(120, 130, (160, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    stored = (swizzle(exponents).reshape(32, -1) if swizzled else exponents).view(torch.float8_e8m0fnu)
    tensors = {"fc._weight_qdata": codes, "fc._weight_scale": stored}
    path = write(tmp_path / "model.safetensors", tensors, {"fc.weight": mx(mode, swizzled)})
    loaded = anyfp8.load(One(160, 96), path)
    scale = (2.0 ** (exponents.float() - 127)).repeat_interleave(32, 1)
    assert_close(loaded.fc.weight, codes.float() * scale)
    assert loaded.fc.scheme.weight_only == (mode is None)
    if mode is None:
        return
    assert (loaded.fc.scheme.act_tile, loaded.fc.scheme.act_scale) == ((1, 32), kind)
    x = randn(5, 96)
    blocks = x.reshape(5, 3, 32)
    power = torch.log2(blocks.abs().amax(-1, keepdim=True) / (448 if mode == "RCEIL" else 256))
    spread = 2.0 ** (power.ceil() if mode == "RCEIL" else power.floor())
    want = ((blocks / spread).clamp(-448, 448).to(F8).float() * spread).reshape(5, 96) @ (codes.float() * scale).T
    assert_close(loaded(x), want, 1e-5)


# --- names, files ---
class Root(nn.Linear):
    """A model whose own parameters are at the root."""

    def __init__(self):
        super().__init__(32, 8)
        self.token = nn.Parameter(torch.zeros(1, 8))


def test_parameters_at_the_root(tmp_path):
    codes, scale, real = quantized(randn(8, 32), (1, 32))
    tensors = {"_weight_qdata": codes, "_weight_scale": scale, "bias": torch.ones(8), "token": randn(1, 8)}
    path = write(tmp_path / "model.safetensors", tensors, {"weight": float8([1, 32])})
    loaded = anyfp8.load(Root(), path)
    assert_close(loaded.weight, real.reshape(8, 32))
    assert_close(loaded.token.detach(), tensors["token"], 0)


class Bank(nn.Module):
    """Stacked experts: two parameters of one module."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 32))
        self.down_proj = nn.Parameter(torch.zeros(2, 32, 4))


def test_two_parameters_of_one_module(tmp_path):
    tensors, records, want = {}, {}, {}
    for name, shape in (("gate_up_proj", (2, 8, 32)), ("down_proj", (2, 32, 4))):
        weight = randn(*shape)
        scale = weight.abs().amax(-1, keepdim=True) / 448
        tensors |= {f"experts._{name}_qdata": (weight / scale).to(F8), f"experts._{name}_scale": scale}
        records[f"experts.{name}"] = float8([1, 1, shape[-1]], act())
        want[name] = (weight / scale).to(F8).float() * scale
    path = write(tmp_path / "model.safetensors", tensors, records)
    loaded = anyfp8.load(nn.ModuleDict({"experts": Bank()}), path)
    for name, weight in want.items():
        assert_close(getattr(loaded["experts"], name).detach(), weight)


def test_shards_have_a_header_each(tmp_path):
    tensors, records, weights = files((1, -1))
    index = {}
    for i, name in enumerate(("0", "2")):
        part = {key: t for key, t in tensors.items() if key.startswith(name)}
        file = f"model-0000{i + 1}-of-00002.safetensors"
        write(tmp_path / file, part, {f"{name}.weight": records[f"{name}.weight"]})
        index |= dict.fromkeys(part, file)
    write_json(tmp_path / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    loaded = anyfp8.load(model(), tmp_path)
    for name, weight in weights.items():
        assert_close(loaded[int(name)].weight, weight)


def config(folder, **more):
    write_json(folder / "config.json", {"quantization_config": {"quant_method": "torchao", "quant_type": {}} | more})


def test_the_config_is_evidence_and_its_list_is_checked(tmp_path):
    tensors, records, _ = files((1, -1))
    write(tmp_path / "model.safetensors", tensors, records)
    config(tmp_path, modules_to_not_convert=["2", "lm_head"])
    manifest = anyfp8.inspect(tmp_path)
    assert manifest.evidence == "config.json: quantization_config: quant_method 'torchao'"
    assert set(manifest.layers) == {"0", "2"}
    (note,) = manifest.notes
    assert note.startswith("in modules_to_not_convert, but stored in FP8: 2 ")


def test_somebody_elses_config_wins(tmp_path):
    from anyfp8.checkpoint import Checkpoint
    from anyfp8.dialects import torchao

    tensors, records, _ = files((1, -1))
    write(tmp_path / "model.safetensors", tensors, records)
    assert torchao.match(Checkpoint.open(tmp_path)) is not None
    write_json(tmp_path / "config.json", {"quantization_config": {"quant_method": "fp8"}})
    assert torchao.match(Checkpoint.open(tmp_path)) is None


# --- refusals ---
@pytest.mark.parametrize(
    ("record", "match"),
    [
        (float8([1, 32]) | {"_type": "Int4Tensor"}, r"0\.weight.*is a Int4Tensor: only Float8Tensor and MXTensor"),
        (float8([1, 32], act(hp_value_ub=3.0)), r"0\.weight.*hp_value_ub"),
        (float8([1, 32], act("PerAxis", where={"axis": 0})), r"0\.weight.*granularity is PerAxis"),
        (float8([1, 32], act(where={"dim": 0})), r"0\.weight.*granularity is PerRow"),
        (float8([1, 32], act("PerBlock", where={"block_size": [2, 16]})), r"0\.weight.*act_tile"),
        (float8([1, 32], act(dtype="int8")), r"0\.weight.*act_dtype"),
        (float8([1, 1, 32]), r"0\.weight.*block_size \[1, 1, 32\]"),
        (float8([1, 16]), r"0\._weight_scale.*shape \[64, 1\].*needs \[64, 2\]"),
        (mx("EVEN"), r"0\.weight.*scaling_mode is EVEN"),
        (mx("CEIL"), r"0\.weight.*scaling_mode is CEIL"),
        (mx(), r"0\._weight_scale.*can't be F32"),
    ],
)
def test_what_is_refused_and_by_which_name(tmp_path, record, match):
    tensors, records, _ = files((1, -1))
    path = write(tmp_path / "model.safetensors", tensors, records | {"0.weight": record})
    target = model()
    before = Snapshot(target)
    with pytest.raises(anyfp8.LoadError, match=match):
        anyfp8.load(target, path)
    before.assert_unchanged()


@pytest.mark.parametrize("absent", ["0._weight_scale", "0._weight_qdata"])
def test_half_a_parameter(tmp_path, absent):
    tensors, records, _ = files((1, -1))
    del tensors[absent]
    with pytest.raises(anyfp8.LoadError, match=rf"0\.weight.*Float8Tensor, but {absent} is missing"):
        anyfp8.load(model(), write(tmp_path / "model.safetensors", tensors, records))


def test_another_part_than_qdata_and_scale(tmp_path):
    tensors, records, _ = files((1, -1))
    tensors["0._weight_act_scale"] = torch.ones(1)
    records["0.weight"]["_tensor_data_names"].append("act_scale")
    with pytest.raises(anyfp8.LoadError, match=r"0\.weight.*consists of qdata, scale, act_scale"):
        anyfp8.load(model(), write(tmp_path / "model.safetensors", tensors, records))


def test_codes_without_a_record(tmp_path):
    tensors, records, _ = files((1, -1))
    del records["0.weight"]
    with pytest.raises(anyfp8.LoadError, match=r"0\._weight_qdata.*no record"):
        anyfp8.load(model(), write(tmp_path / "a" / "model.safetensors", tensors, records))
    write(tmp_path / "b" / "model.safetensors", tensors, {})
    config(tmp_path / "b")
    with pytest.raises(anyfp8.LoadError, match=r"\{0,2\}\._weight_qdata|0\._weight_qdata.*2\._weight_qdata"):
        anyfp8.load(model(), tmp_path / "b")


@pytest.mark.parametrize("text", ['{"_type": "Float8Tensor"', '{"_type": 1, "_type": 2}'])
def test_a_record_that_is_no_json(tmp_path, text):
    tensors, _, _ = files((1, -1))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"0.weight": text})
    with pytest.raises(anyfp8.DialectError, match=r"record of 0\.weight"):
        anyfp8.inspect(tmp_path)


def test_a_record_without_its_data(tmp_path):
    tensors, _, _ = files((1, -1))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"0.weight": '{"_type": "Float8Tensor"}'})
    with pytest.raises(anyfp8.DialectError, match=r"malformed.*_tensor_data_names"):
        anyfp8.inspect(tmp_path)
