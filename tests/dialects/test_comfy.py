"""ComfyUI single files: markers, labels, padding and swizzled scales, other components beside the model."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anyfp8
from tests.checkpoints import F8, Snapshot, Within, encode, mlp, stale
from tests.helpers import assert_close, assert_same_bytes, code_values, oracle_decode, randn

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def write(folder, tensors, metadata=None):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model_fp8.safetensors"
    save_file({name: t.detach().clone().contiguous() for name, t in tensors.items()}, path, metadata=metadata)
    return path


def label(format=E4M3, **more):
    return torch.tensor(list(json.dumps({"format": format} | more).encode()), dtype=torch.uint8)


def header(layers):
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def files(model=None, names=("0", "2"), *, spelling=("weight_scale", "input_scale"), static=True, dtype=F8):
    """The tensors of an MLP with FP8 layers, one scale each."""
    tensors = dict((model or mlp()).state_dict())
    for name in names:
        tensors[f"{name}.weight"], scale = encode(tensors[f"{name}.weight"], dtype=dtype)
        tensors[f"{name}.{spelling[0]}"] = scale.reshape(())
        if static:
            tensors[f"{name}.{spelling[1]}"] = torch.tensor(0.02)
    return tensors


def old(model=None, prefix="", **options):
    """The same with the old marker and spelling, under a prefix."""
    tensors = files(model, spelling=("scale_weight", "scale_input"), **options)
    marked = {f"{prefix}{name}": t for name, t in tensors.items()}
    return marked | {f"{prefix}scaled_fp8": torch.empty(0, dtype=F8)}


def labelled(tensors, names=("0", "2"), **options):
    return tensors | {f"{name}.comfy_quant": label(**options) for name in names}


def swizzle(grid):
    """cuBLAS's layout by element: tiles of 128 × 4, where row r, column c is at 16 (r % 32) + 4 (r // 32) + c."""
    rows, columns = -(-grid.shape[0] // 128), -(-grid.shape[1] // 4)
    flat = torch.zeros(rows * columns * 512, dtype=grid.dtype)
    for r in range(grid.shape[0]):
        for c in range(grid.shape[1]):
            tile = (r // 128) * columns + c // 4
            flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = grid[r, c]
    return flat.reshape(rows * 128, columns * 4)


def padded(x, multiple):
    rows, columns = (-(-n // multiple) * multiple for n in x.shape)
    out = torch.zeros(rows, columns, dtype=x.dtype)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def mxfp8(out, columns, seed=0):
    """Tensors of a padded MXFP8 layer, and its weight."""
    codes = (randn(out, columns, seed=seed) * 100).clamp(-448, 448).to(F8)
    exponents = torch.randint(118, 132, (out, -(-columns // 32)), generator=torch.Generator().manual_seed(seed))
    scale = (2.0 ** (exponents - 127)).repeat_interleave(32, 1)[:, :columns]
    tensors = {
        "weight": padded(codes.view(torch.uint8), 32).view(F8),
        "weight_scale": swizzle(padded(exponents.to(torch.uint8), 1)),
        "comfy_quant": label("mxfp8"),
    }
    return tensors, codes.double() * scale


def nvfp4(out, columns, seed=0, outer=0.003):
    """Tensors of a padded NVFP4 layer, even column in the high nibble, and its weight."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (out, columns), generator=generator)
    inner = (torch.rand(out, -(-columns // 16), generator=generator) * 400 + 1).to(F8)
    values = torch.tensor(FP4 + [-v for v in FP4])[codes]
    spread = inner.double().repeat_interleave(16, 1)[:, :columns]
    wide = padded(codes, 16)
    tensors = {
        "weight": (wide[:, ::2] << 4 | wide[:, 1::2]).to(torch.uint8),
        "weight_scale": swizzle(inner.view(torch.uint8)).view(F8),
        "weight_scale_2": torch.tensor(outer),
        "comfy_quant": label("nvfp4"),
    }
    return tensors, values.double() * spread * float(torch.tensor(outer))


def alone(layer):
    """One layer as the whole of a model, under the name "fc", with a bias."""
    return {f"fc.{name}": tensor for name, tensor in layer.items()}


class One(nn.Module):
    def __init__(self, out, columns, bias=False):
        super().__init__()
        self.fc = nn.Linear(columns, out, bias)

    def forward(self, x):
        return self.fc(x)


# --- the three generations ---
@pytest.mark.parametrize(
    "make",
    [
        lambda: (old(), None),
        lambda: (old() | {"scaled_fp8": torch.empty(0)}, None),  # a float32 marker means e4m3fn
        lambda: ({n: t for n, t in old().items() if n != "scaled_fp8"}, None),
        lambda: (files() | {"scaled_fp8": torch.empty(0, dtype=F8)}, None),
        lambda: (labelled(files()), None),
        lambda: (labelled(files(), format="fp8"), None),
        lambda: (labelled(files(spelling=("scale_weight", "scale_input"))), None),
        lambda: (files(), header({"0": {"format": E4M3}, "2": {"format": "fp8"}})),
        lambda: (labelled(files()), header({"0": {"format": E4M3}, "2": {"format": E4M3}})),
    ],
)
def test_static_per_tensor_however_it_is_said(tmp_path, make):
    tensors, metadata = make()
    path = write(tmp_path, tensors, metadata)
    manifest = anyfp8.inspect(path)
    assert (manifest.dialect, manifest.problems, manifest.unclaimed, manifest.notes) == ("comfy", (), {}, ())
    model = anyfp8.load(stale(mlp()), path)
    want = encode(mlp()[0].weight)
    assert model[0].scheme == anyfp8.QuantizationScheme.from_preset("FP8")
    assert_same_bytes(model[0].weight_codes, want[0].view(torch.uint8))
    assert_close(model[0].weight, want[0].float() * want[1])
    assert_same_bytes(model[0].input_scale, torch.tensor([0.02]))
    assert_same_bytes(model[0].bias, mlp()[0].bias)


def test_an_absent_input_scale_is_never_one(tmp_path):
    tensors = labelled(files())
    del tensors["0.input_scale"]
    model = anyfp8.load(stale(mlp()), write(tmp_path, tensors))
    assert model[0].scheme.weight_only
    assert model[2].scheme.static
    assert any("weight-only: 0 " in note for note in anyfp8.report(model).notes)


def test_a_marker_of_two_elements_says_never_multiply_in_fp8(tmp_path):
    manifest = anyfp8.inspect(write(tmp_path, old() | {"scaled_fp8": torch.zeros(2, dtype=F8)}))
    assert all(scheme.weight_only for scheme in manifest.layer_config.values())
    assert "not multiplied in FP8" in manifest.exceptions["0.scale_input"]


def test_layers_of_full_precision_multiplication(tmp_path):
    tensors = labelled(files(), ["0"]) | labelled({}, ["2"], full_precision_matrix_mult=True)
    manifest = anyfp8.inspect(write(tmp_path, tensors))
    assert manifest.layer_config["0"].static
    assert manifest.layer_config["2"].weight_only
    assert "not multiplied in FP8" in manifest.exceptions["2.input_scale"]
    assert manifest.unclaimed == {}


def test_e5m2_inputs_go_with_e5m2_weights(tmp_path):
    tensors = labelled(files(dtype=torch.float8_e5m2), format=E5M2)
    scheme = anyfp8.load(stale(mlp()), write(tmp_path, tensors))[0].scheme
    assert (scheme.weight_dtype, scheme.act_dtype, scheme.static) == (E5M2, E5M2, True)


def test_the_weight_decides_its_dtype(tmp_path):
    manifest = anyfp8.inspect(write(tmp_path, labelled(files(dtype=torch.float8_e5m2))))
    assert manifest.layer_config["0"].weight_dtype == E5M2
    assert any("stored in float8_e5m2 (the tensors decide)" in note for note in manifest.notes)


def test_fp8_in_a_container_of_bytes(tmp_path):
    tensors = labelled(files())
    tensors["0.weight"] = tensors["0.weight"].view(torch.uint8)
    model = anyfp8.load(stale(mlp()), write(tmp_path, tensors))
    assert_same_bytes(model[0].weight_codes, tensors["0.weight"])


def test_a_label_on_a_float_layer_is_reported(tmp_path):
    tensors = labelled(files(names=["0"]))
    tensors["2.weight_scale"] = torch.ones(())
    manifest = anyfp8.inspect(write(tmp_path, tensors))
    assert set(manifest.layers) == {"0"}
    assert manifest.exceptions["2.comfy_quant"] == "a format marker"
    assert "beside a weight that is stored in float" in manifest.exceptions["2.weight_scale"]
    assert any("stored in float: 2 " in note for note in manifest.notes)


def test_an_unlabelled_layer_with_a_scale_is_quantized(tmp_path):
    manifest = anyfp8.inspect(write(tmp_path, labelled(files(), ["0"])))
    assert set(manifest.layers) == {"0", "2"}
    assert any("not labelled" in note for note in manifest.notes)


# --- granularity ---
@pytest.mark.parametrize(
    ("scale", "more", "tile"),
    [
        ((), {}, (-1, -1)),
        ((1,), {}, (-1, -1)),
        ((1, 1), {"format": f"{E4M3}_blockwise", "group_size": 64}, (-1, -1)),
        ((64,), {"format": f"{E4M3}_rowwise"}, (1, -1)),
        ((64, 1), {}, (1, -1)),
        ((64,), {"format": f"{E4M3}_blockwise", "group_size": 24}, (1, -1)),  # fell back under the same label
        ((4, 3), {"format": f"{E4M3}_blockwise", "group_size": 16}, (16, 16)),
        ((4, 3), {"format": f"{E4M3}_blockwise", "params": {"group_size": 16}}, (16, 16)),
        ((64, 3, 1), {"format": f"{E4M3}_block3d", "group_size": 16}, (1, 16)),
    ],
)
def test_the_shape_of_the_scale_says_the_granularity(tmp_path, scale, more, tile):
    weight = randn(64, 48).clamp(-3, 3).to(F8)
    value = torch.rand(scale, generator=torch.Generator().manual_seed(1)) + 0.5
    path = write(tmp_path, alone({"weight": weight, "weight_scale": value, "comfy_quant": label(**more)}))
    layer = anyfp8.load(One(64, 48), path).fc
    assert layer.scheme.tile == tile
    spread = value.reshape(value.shape[:2]) if value.dim() == 3 else value
    rows, columns = (64, 48) if not spread.dim() else (spread.shape[0], spread.shape[-1] if spread.dim() == 2 else 1)
    spread = spread.reshape(1, 1) if spread.numel() == 1 else spread.reshape(rows, columns)
    spread = spread.repeat_interleave(64 // spread.shape[0], 0).repeat_interleave(48 // spread.shape[1], 1)
    assert_close(layer.weight, weight.float() * spread)


@pytest.mark.parametrize("scale", [(1, 64), (48,), (4, 3), (64, 3, 1)])
def test_a_scale_that_nothing_explains(tmp_path, scale):
    tensors = {"weight": randn(64, 48).to(F8), "weight_scale": torch.ones(scale), "comfy_quant": label()}
    with pytest.raises(anyfp8.LoadError, match=r"fc\.weight_scale in .* has shape .*no group_size"):
        anyfp8.load(One(64, 48), write(tmp_path, alone(tensors)))


# --- padding and swizzling ---
@pytest.mark.parametrize("shape", [(64, 64), (50, 40), (33, 32), (200, 300), (32, 33)])
@pytest.mark.parametrize("stated", [False, True])
def test_mxfp8_is_unswizzled_and_cropped(tmp_path, shape, stated):
    tensors, weight = mxfp8(*shape)
    if stated:
        tensors["comfy_quant"] = label("mxfp8", orig_shape=list(shape), group_size=32, orig_dtype="torch.bfloat16")
    path = write(tmp_path, alone(tensors))
    assert anyfp8.inspect(path).problems == ()
    model = anyfp8.load(One(*shape), path)
    assert_close(model.fc.weight, weight, 1e-7)
    assert model.fc.weight_codes.shape == shape
    x = randn(3, shape[1])
    assert_close(model(x), (x.double() @ weight.T).float(), 1e-5)


@pytest.mark.parametrize("shape", [(64, 64), (50, 40), (17, 18), (200, 300)])
@pytest.mark.parametrize("raw", [False, True], ids=["e4m3 scales", "scales as bytes"])
def test_nvfp4_has_the_even_column_in_the_high_nibble(tmp_path, shape, raw):
    tensors, weight = nvfp4(*shape)
    if raw:
        tensors["weight_scale"] = tensors["weight_scale"].view(torch.uint8)
    model = anyfp8.load(One(*shape), write(tmp_path, alone(tensors)))
    assert_close(model.fc.weight, weight.float(), 1e-6)
    assert model.fc.scheme.weight_only
    assert model.fc.scheme.scale_dtype == E4M3


def test_nvfp4_inputs_are_quantized_if_their_scale_is_there(tmp_path):
    tensors, weight = nvfp4(32, 48)
    path = write(tmp_path, alone(tensors | {"input_scale": torch.tensor(0.002)}))
    model = anyfp8.load(One(32, 48), path)
    scheme = model.fc.scheme
    assert (scheme.act_dtype, scheme.act_tile, scheme.act_scale) == ("float4_e2m1fn", (1, 16), "e4m3")
    x = randn(5, 48)
    grid = torch.tensor(FP4, dtype=torch.double)
    blocks = x.double().reshape(5, 3, 16)
    inner = (blocks.abs().amax(-1, keepdim=True) / 6 / float(torch.tensor(0.002))).float().to(F8).double()
    spread = inner * float(torch.tensor(0.002))
    nearest = grid[((blocks / spread).abs().clamp(max=6)[..., None] - grid).abs().argmin(-1)] * blocks.sign()
    assert_close(model(x), ((nearest * spread).reshape(5, 48) @ weight.T).float(), 1e-5)


def test_an_input_scale_does_not_make_mxfp8_static(tmp_path):
    tensors, _ = mxfp8(32, 32)
    manifest = anyfp8.inspect(write(tmp_path, alone(tensors | {"input_scale": torch.ones(())})))
    assert manifest.layer_config["fc"].weight_only
    assert "fc.input_scale" in manifest.exceptions


def test_hybrid_mxfp8_is_mxfp8(tmp_path):
    tensors, weight = mxfp8(40, 64)
    tensors |= {"weight_scalar": torch.tensor(0.1), "comfy_quant": label("hybrid_mxfp8")}
    model = anyfp8.load(One(40, 64), write(tmp_path, alone(tensors)))
    assert_close(model.fc.weight, weight.float(), 1e-7)
    assert "fc.weight_scalar" in anyfp8.report(model).skipped


@pytest.mark.parametrize("shape", [(65, 40), (50, 65), (32, 40), (50, 32)])
def test_only_padding_can_explain_another_shape(tmp_path, shape):
    tensors, _ = mxfp8(50, 40)
    model = One(*shape)
    before = Snapshot(model, randn(1, shape[1]))
    with pytest.raises(anyfp8.LoadError, match=r"fc\.weight.*\[64, 64\], but fc\.weight of the model"):
        anyfp8.load(model, write(tmp_path, alone(tensors)))
    before.assert_unchanged()


def test_an_odd_number_of_columns_cannot_be_packed(tmp_path):
    tensors, _ = nvfp4(32, 48)
    with pytest.raises(anyfp8.LoadError, match=r"of the model is float32 \[32, 47\]"):
        anyfp8.load(One(32, 47), write(tmp_path, alone(tensors)))


def test_a_stated_shape_must_be_the_tensors_and_the_models(tmp_path):
    tensors, _ = mxfp8(50, 40)
    tensors["comfy_quant"] = label("mxfp8", orig_shape=[50, 70])
    with pytest.raises(anyfp8.LoadError, match=r"label says shape \[50, 70\].*holds \[64, 64\]"):
        anyfp8.load(One(50, 40), write(tmp_path / "a", alone(tensors)))
    tensors["comfy_quant"] = label("mxfp8", orig_shape=[50, 41])
    with pytest.raises(anyfp8.LoadError, match=r"\[50, 41\], but fc\.weight of the model"):
        anyfp8.load(One(50, 40), write(tmp_path / "b", alone(tensors)))


def test_padded_layers_under_a_prefix(tmp_path):
    tensors, weight = mxfp8(50, 40)
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in alone(tensors).items()}
    tensors |= {"first_stage_model.decoder.conv_in.block.norm.weight": torch.ones(3)}
    model = anyfp8.load(One(50, 40), write(tmp_path, tensors))
    assert_close(model.fc.weight, weight.float(), 1e-7)


def test_padding_is_left_out_where_a_layer_is_decoded_or_saved(tmp_path):
    tensors, weight = mxfp8(50, 40)
    path = write(tmp_path, alone(tensors))
    assert_close(anyfp8.load(One(50, 40), path, exclude="*").fc.weight.detach(), weight.float(), 1e-7)
    anyfp8.save(anyfp8.load(One(50, 40), path), tmp_path / "saved")
    assert_close(anyfp8.load(One(50, 40), tmp_path / "saved").fc.weight, weight.float(), 1e-7)


# --- the model and what lies beside it ---
def test_other_components_are_named_exceptions(tmp_path):
    prefix = "model.diffusion_model."
    beside = old(mlp(i=4, h=4, o=4), "text_encoders.t5xxl.transformer.") | {
        "first_stage_model.decoder.very.deeply.nested.norm.weight": torch.ones(3),
        "model_ema.decay": torch.ones(()),
        "logit_scale": torch.ones(()),
    }
    path = write(tmp_path, old(prefix=prefix) | beside)
    manifest = anyfp8.inspect(path)
    assert set(manifest.layers) == {f"{prefix}0", f"{prefix}2"}
    assert set(beside) <= set(manifest.exceptions)
    assert set(manifest.exceptions.values()) == {"another component's tensor under another prefix", "a format marker"}
    model = anyfp8.load(stale(mlp()), path)
    assert_close(model[2].weight, encode(mlp()[2].weight)[0].float() * encode(mlp()[2].weight)[1])
    assert any("model.diffusion_model." in note for note in anyfp8.report(model).notes)
    assert "logit_scale" in anyfp8.report(model).skipped


def test_the_models_own_prefix_may_stay(tmp_path):
    model = Within("model", Within("diffusion_model", mlp()))
    loaded = anyfp8.load(stale(model), write(tmp_path, old(prefix="model.diffusion_model.")))
    assert loaded.model.diffusion_model[0].scheme.static


def test_a_marker_tells_an_unknown_prefix(tmp_path):
    tensors = old(prefix="backbone.") | {"vision.proj.weight": torch.ones(2, 2)}
    manifest = anyfp8.inspect(write(tmp_path, tensors))
    assert set(manifest.layers) == {"backbone.0", "backbone.2"}
    assert "another component" in manifest.exceptions["vision.proj.weight"]


def test_without_a_marker_an_unknown_prefix_hides_nothing(tmp_path):
    tensors = labelled({f"blocks.{n}": t for n, t in files().items()}, ["blocks.0", "blocks.2"])
    manifest = anyfp8.inspect(write(tmp_path, tensors | {"head.weight": torch.ones(2, 2), "vae.w": torch.ones(2)}))
    assert "head.weight" in manifest.plain
    assert set(manifest.exceptions) == {"blocks.0.comfy_quant", "blocks.2.comfy_quant", "vae.w"}


def test_an_fp8_weight_that_the_model_has_is_never_set_aside(tmp_path):
    """Its name is another component's, but the model has room for it: that must not pass in silence."""
    tensors = old(prefix="model.diffusion_model.") | {"text_encoders.fc.weight": torch.ones(2, 2).to(F8)}
    model = nn.Module()
    model.model, model.text_encoders = Within("diffusion_model", mlp()), nn.ModuleDict({"fc": nn.Linear(2, 2, False)})
    with pytest.raises(anyfp8.LoadError, match=r"text_encoders\.fc\.weight"):
        anyfp8.load(model, write(tmp_path, tensors))


@pytest.mark.parametrize("name", ["__index_timestep_zero__", "spiece_model"])
def test_entries_for_comfyuis_own_loader(tmp_path, name):
    path = write(tmp_path, old() | {name: torch.zeros(3, dtype=torch.uint8)})
    assert "ComfyUI" in anyfp8.report(anyfp8.load(stale(mlp()), path)).skipped[name]


def test_any_other_tensor_is_unexpected(tmp_path):
    with pytest.raises(anyfp8.LoadError, match=r"not in the model:\n.*mystery"):
        anyfp8.load(stale(mlp()), write(tmp_path, old() | {"mystery": torch.zeros(3)}))


def test_a_header_without_the_models_prefix(tmp_path):
    tensors = {f"model.diffusion_model.{name}": t for name, t in files().items()}
    path = write(tmp_path, tensors, header({"0": {"format": E4M3, "full_precision_matrix_mult": True}, "9": {}}))
    manifest = anyfp8.inspect(path)
    assert manifest.layer_config["model.diffusion_model.0"].weight_only
    assert any("not in the file: 9 " in note for note in manifest.notes)


# --- refusals ---
@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        ({"0.comfy_quant": label("int8_tensorwise")}, r"  0 *: its format is 'int8_tensorwise'"),
        ({"0.comfy_quant": label(convrot=True)}, r"0: .*convrot"),
        ({"0.comfy_quant": label(rotate="left")}, r"0: .*unknown key 'rotate'"),
        ({"0.pre_quant_scale": torch.tensor([1.0, 2.0])}, r"0: .*multiplied by 0\.pre_quant_scale"),
        ({"0.weight_scale": None}, r"0\.weight_scale.*0\.weight is F8_E4M3.*has no scale"),
        ({"0.weight": None}, r"0\.weight: its label says that it is float8_e4m3fn"),
        ({"0.scale_weight": torch.tensor(7.0)}, r"0\.scale_weight .*is not the same as 0\.weight_scale"),
        ({"0.weight_scale": torch.tensor(float("nan"))}, r"0\.weight_scale .*NaN"),
        ({"0.bias": torch.zeros(16).to(F8)}, r"0\.bias .*stored in F8_E4M3"),
        ({"0.comfy_quant": label("nvfp4"), "0.weight": torch.zeros(16, 16).byte()}, r"0\.weight_scale_2"),
    ],
)
def test_what_is_refused_and_by_which_name(tmp_path, spoil, match):
    tensors = labelled(files()) | spoil
    path = write(tmp_path, {name: t for name, t in tensors.items() if t is not None})
    model = stale(mlp())
    before = Snapshot(model)
    with pytest.raises(anyfp8.LoadError, match=match):
        anyfp8.load(model, path)
    before.assert_unchanged()


def test_every_refused_layer_is_named_at_once(tmp_path):
    tensors = labelled(files(), format="int8_blockwise")
    problems = anyfp8.inspect(write(tmp_path, tensors)).problems
    assert {problem.name for problem in problems} == {"0", "2"}


def test_a_pre_quant_scale_of_ones_and_two_equal_spellings_change_nothing(tmp_path):
    tensors = labelled(files()) | {"0.pre_quant_scale": torch.ones(8)}
    tensors["0.scale_weight"] = tensors["0.weight_scale"]
    report = anyfp8.report(anyfp8.load(stale(mlp()), write(tmp_path, tensors)))
    assert {"0.pre_quant_scale", "0.scale_weight"} <= set(report.skipped)


@pytest.mark.parametrize("text", [b"{", b"[1]", b'{"format": 1, "format": 2}'])
def test_a_label_that_is_no_json_object(tmp_path, text):
    tensors = files() | {"0.comfy_quant": torch.tensor(list(text), dtype=torch.uint8)}
    with pytest.raises(anyfp8.DialectError, match=r"0\.comfy_quant"):
        anyfp8.inspect(write(tmp_path, tensors))


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": []}', '{"layers": {"0": 1}}', "{}"])
def test_a_header_that_is_no_json_object(tmp_path, text):
    with pytest.raises(anyfp8.DialectError, match="_quantization_metadata"):
        anyfp8.inspect(write(tmp_path, files(), {"_quantization_metadata": text}))


def test_header_and_label_must_not_contradict_each_other(tmp_path):
    path = write(tmp_path, labelled(files()), header({"0": {"format": "float8_e5m2"}, "2": {}}))
    (problem,) = anyfp8.inspect(path).problems
    assert problem.kind == "contradiction"
    assert problem.name == "0"


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "anyfp8.json", "quanto_qmap.json"])
def test_a_file_with_somebody_elses_config_is_theirs(tmp_path, name):
    from anyfp8.checkpoint import Checkpoint
    from anyfp8.dialects import comfy

    path = write(tmp_path, labelled(files()), header({"0": {"format": "fp8"}}))
    assert comfy.match(Checkpoint.open(path)) is not None
    (tmp_path / name).write_text(json.dumps({"quantization_config": {"quant_method": "modelopt"}}))
    assert comfy.match(Checkpoint.open(path)) is None


def test_a_config_without_quantization_is_no_ones(tmp_path):
    path = write(tmp_path, labelled(files()))
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    assert anyfp8.inspect(path).dialect == "comfy"


def test_the_oracles_of_this_file_agree_with_the_shared_ones():
    codes = torch.arange(256, dtype=torch.uint8)
    finite = torch.from_numpy(code_values(E4M3)).isfinite()
    assert torch.equal(oracle_decode(codes, E4M3)[finite], codes.view(F8).double()[finite])
    grid = torch.arange(130 * 5).reshape(130, 5)
    assert sorted(swizzle(grid + 1).flatten().tolist())[-650:] == list(range(1, 651))
    assert swizzle(grid).shape == (256, 8)
