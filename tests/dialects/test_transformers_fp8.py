"""transformers' FP8 files and what others write under the same name: scales, blocks, inputs, lists, experts."""

import pytest
import torch
from torch import nn

import anyfp8
from tests.checkpoints import F8, encode, seeded, stale, write_json, write_tensors
from tests.helpers import assert_close, bytes_of, code_values, oracle_expand, oracle_forward, randn

E8M0 = torch.float8_e8m0fnu
SCALES = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")
INPUTS = ("activation_scale", "input_scale", "act_scale", "qscale_act")


def write(folder, tensors, **config):
    """A checkpoint with this quantization config (quant_method fp8 unless it says otherwise)."""
    write_tensors(folder, tensors)
    write_json(folder / "config.json", {"quantization_config": {"quant_method": "fp8"} | config})
    return folder


def linears(*names, k=8, n=8):
    return seeded(lambda: nn.ModuleDict({name: nn.Linear(k, n, bias=False) for name in names}))


def grid_of(rows, columns, block, seed=3):
    """A random scale for each block."""
    shape = (-(-rows // block[0]), -(-columns // block[1]))
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.01 + 0.001


def codes(*shape, seed=0):
    return (randn(*shape, seed=seed) * 100).to(F8)


def real(stored, scale, tile):
    """float64 values of a quantized tensor."""
    values = torch.from_numpy(code_values("float8_e4m3fn"))[stored.view(torch.uint8).long()]
    return values * oracle_expand(scale, stored.shape, tile)


def check_layer(layer, weight, scheme):
    """It holds these values, says this scheme, and computes what the scheme says."""
    assert str(layer.scheme) == scheme
    assert_close(layer.weight, weight, 1e-6)
    x = randn(3, layer.in_features, seed=9)
    assert_close(layer(x).detach(), oracle_forward(layer, x), 1e-5)


# --- blocks ---
@pytest.mark.parametrize("block", [[4, 4], [8, 4], [2, 16], [5, 3], [128, 128]], ids=str)
def test_blocks_of_any_size_with_clipped_edges(tmp_path, block):
    model = linears("a", k=10, n=12)
    weight, scale = codes(12, 10), grid_of(12, 10, block)
    folder = write(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, weight_block_size=block)
    loaded = anyfp8.load(stale(model), folder)
    rows, columns = block
    scheme = f"e4m3fn per {rows}×{columns}, input dynamic e4m3fn per 1×{columns}"
    check_layer(loaded["a"], real(weight, scale, block), scheme)


def test_a_block_is_never_the_shape_divided_by_the_grid(tmp_path):
    """192 rows with two scales are 128 + 64 rows, not 96 + 96 as transformers' reader has it."""
    model = linears("a", k=4, n=192)
    weight, scale = codes(192, 4), torch.tensor([[1.0], [2.0]])
    folder = write(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, weight_block_size=[128, 128])
    loaded = anyfp8.load(stale(model), folder)
    want = weight.float() * torch.tensor([1.0] * 128 + [2.0] * 64)[:, None]
    assert_close(loaded["a"].weight, want, 0)


def test_without_the_key_the_scales_tell(tmp_path):
    """transformers takes blocks of 128×128 then, vLLM one scale a weight."""
    model = linears("a", "b", "c", k=130, n=130)
    weight, blocks = codes(130, 130), grid_of(130, 130, (128, 128))
    one, each = torch.tensor(0.01), torch.rand(130, 1) * 0.01
    tensors = {f"{name}.weight": weight for name in "abc"}
    scales = {"a.weight_scale_inv": blocks, "b.weight_scale": one, "c.weight_scale": each}
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors | scales))
    check_layer(loaded["a"], real(weight, blocks, (128, 128)), "e4m3fn per 128×128, input dynamic e4m3fn per 1×128")
    check_layer(loaded["b"], weight.double() * 0.01, "e4m3fn per tensor, input dynamic e4m3fn per token")
    check_layer(loaded["c"], weight.double() * each, "e4m3fn per channel, input dynamic e4m3fn per token")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (8,), (8, 1)], ids=str)
@pytest.mark.parametrize("block", [None, [4, 4]], ids=str)
def test_one_scale_a_weight_or_a_row_whatever_the_config_says(tmp_path, shape, block):
    model = linears("a", k=12)
    weight, scale = codes(8, 12), torch.rand(shape) * 0.01 + 0.001
    folder = write(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, weight_block_size=block)
    loaded = anyfp8.load(stale(model), folder)
    kind = "channel" if scale.numel() > 1 else "tensor"
    want = weight.double() * (scale.reshape(-1, 1) if scale.numel() > 1 else scale)
    check_layer(loaded["a"], want, f"e4m3fn per {kind}, input dynamic e4m3fn per token")
    assert [note for note in anyfp8.report(loaded).notes if "not in the config's blocks" in note] == (
        ["not in the config's blocks: a (one scale a weight or a row)"] if block else []
    )


@pytest.mark.parametrize("shape", [(1, 8), (4,), (2, 1), (3, 2), (8, 8), (1, 1, 4)], ids=str)
def test_a_scale_of_another_shape_is_refused(tmp_path, shape):
    model = linears("a")
    tensors = {"a.weight": codes(8, 8), "a.weight_scale_inv": torch.ones(shape)}
    with pytest.raises(anyfp8.LoadError, match=r"a\.weight_scale_inv.*shape .*one for each block of 4×4"):
        anyfp8.load(model, write(tmp_path, tensors, weight_block_size=[4, 4]))
    with pytest.raises(anyfp8.LoadError, match=r"a\.weight_scale_inv.*one a row$"):
        anyfp8.load(model, write(tmp_path / "null", tensors, weight_block_size=None))


# --- how scales are stored ---
@pytest.mark.parametrize("name", SCALES)
def test_names_of_the_weights_scale(tmp_path, name):
    model = linears("a")
    weight, scale = codes(8, 8), torch.tensor([0.02])
    loaded = anyfp8.load(stale(model), write(tmp_path, {"a.weight": weight, f"a.{name}": scale}))
    assert_close(loaded["a"].weight, weight.double() * 0.02, 1e-6)


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_names_and_shapes_of_a_static_inputs_scale(tmp_path, name, shape):
    model = linears("a")
    weight = codes(8, 8)
    tensors = {"a.weight": weight, "a.weight_scale": torch.tensor(0.02), f"a.{name}": torch.full(shape, 0.03)}
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors, activation_scheme="static"))
    check_layer(loaded["a"], weight.double() * 0.02, "e4m3fn per tensor, input static e4m3fn per tensor")
    assert float(loaded["a"].input_scale) == pytest.approx(0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, E8M0, torch.uint8], ids=str)
def test_dtypes_of_scales(tmp_path, dtype):
    model = linears("a")
    weight, powers = codes(8, 8), torch.tensor([[0.5, 2.0**-9], [2.0**-3, 4.0]])
    exponents = (powers.log2() + 127).to(torch.uint8)
    stored = exponents.view(E8M0) if dtype == E8M0 else exponents if dtype == torch.uint8 else powers.to(dtype)
    tensors = {"a.weight": weight, "a.weight_scale_inv": stored}
    fmt = "ue8m0" if stored.element_size() == 1 else "float"
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors, weight_block_size=[4, 4], scale_fmt=fmt))
    assert_close(loaded["a"].weight, real(weight, powers, (4, 4)), 1e-6)
    assert loaded["a"].weight_scale.dtype == torch.float32
    assert loaded["a"].scheme.act_scale == "float32"


def test_a_scale_that_is_no_number_of_any_kind(tmp_path):
    tensors = {"a.weight": codes(8, 8), "a.weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)}
    with pytest.raises(anyfp8.LoadError, match=r"a\.weight_scale_inv.*a scale can't be I32"):
        anyfp8.load(linears("a"), write(tmp_path, tensors, weight_block_size=[4, 4]))


def test_mxfp8(tmp_path):
    model = linears("a", k=64)
    weight, powers = codes(8, 64), 2.0 ** torch.randint(-12, -4, (8, 2)).float()
    exponents = (powers.log2() + 127).to(torch.uint8)
    tensors = {"a.weight": weight, "a.weight_scale_inv": exponents}
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors, quant_method="mxfp8", scale_fmt="ue8m0"))
    assert_close(loaded["a"].weight, real(weight, powers, (1, 32)), 1e-6)
    want = "e4m3fn per 1×32 (e8m0 scales), input dynamic e4m3fn per 1×32 (e8m0_ceil scales)"
    assert str(loaded["a"].scheme) == want


# --- inputs ---
def test_activation_scheme_null_is_weight_only(tmp_path):
    """Quark's fp8 mode writes it so."""
    weight = codes(8, 8)
    tensors = {"a.weight": weight, "a.weight_scale": torch.tensor(0.02)}
    loaded = anyfp8.load(stale(linears("a")), write(tmp_path, tensors, activation_scheme=None))
    check_layer(loaded["a"], weight.double() * 0.02, "e4m3fn per tensor, weight-only")


def test_a_static_scheme_without_an_input_scale(tmp_path):
    tensors = {"a.weight": codes(8, 8), "a.weight_scale": torch.tensor(0.02)}
    with pytest.raises(anyfp8.LoadError, match=r"a\.input_scale: .*says activation_scheme static"):
        anyfp8.load(linears("a"), write(tmp_path, tensors, activation_scheme="static"))


@pytest.mark.parametrize("name", INPUTS)
def test_a_dynamic_scheme_with_an_input_scale(tmp_path, name):
    tensors = {"a.weight": codes(8, 8), "a.weight_scale": torch.tensor(0.02), f"a.{name}": torch.tensor(0.1)}
    with pytest.raises(anyfp8.LoadError, match=rf"a\.{name}"):
        anyfp8.load(linears("a"), write(tmp_path, tensors, activation_scheme="dynamic"))


def test_fbgemm(tmp_path):
    model = linears("a")
    weight, scale = codes(8, 8), torch.rand(8, 1) * 0.01
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.input_scale_ub": torch.tensor([1200.0])}
    folder = write(tmp_path, tensors, quant_method="fbgemm_fp8", activation_scale_ub=1200.0)
    loaded = anyfp8.load(stale(model), folder)
    check_layer(loaded["a"], weight.double() * scale, "e4m3fn per channel, input dynamic e4m3fn per token")
    assert anyfp8.inspect(folder).exceptions == {"a.input_scale_ub": "a copy of the config's activation_scale_ub"}
    assert any("activation_scale_ub (1200.0)" in note for note in anyfp8.report(loaded).notes)


def test_dequantize_is_an_option_of_a_loader(tmp_path):
    weight = codes(8, 8)
    tensors = {"a.weight": weight, "a.weight_scale_inv": torch.tensor(0.02)}
    loaded = anyfp8.load(stale(linears("a")), write(tmp_path, tensors, dequantize=True))
    assert loaded["a"].scheme.act_dynamic
    assert any("dequantize" in note for note in anyfp8.report(loaded).notes)


# --- incomplete or contradictory tensors ---
def test_a_weight_without_a_scale(tmp_path):
    tensors = {"a.weight": codes(8, 8), "a.activation_scale": torch.tensor(1.0)}
    match = r"a\.weight in model\.safetensors: is F8_E4M3, but has no scale \(looked for weight_scale_inv, weight_scale"
    with pytest.raises(anyfp8.LoadError, match=match):
        anyfp8.load(linears("a"), write(tmp_path, tensors, activation_scheme="static"))


def test_two_scales(tmp_path):
    tensors = {"a.weight": codes(8, 8), "a.weight_scale": torch.tensor(1.0), "a.weight_scale_inv": torch.tensor(1.0)}
    with pytest.raises(
        anyfp8.LoadError, match=r"a\.weight .*more than one scale: a\.weight_scale_inv, a\.weight_scale"
    ):
        anyfp8.load(linears("a"), write(tmp_path, tensors))


def test_e5m2_is_no_weight_of_this_format(tmp_path):
    tensors = {"a.weight": codes(8, 8).float().to(torch.float8_e5m2), "a.weight_scale": torch.tensor(1.0)}
    with pytest.raises(anyfp8.LoadError, match=r"a\.weight .*is F8_E5M2; weights of this format are F8_E4M3"):
        anyfp8.load(linears("a"), write(tmp_path, tensors))


@pytest.mark.parametrize("value", [float("nan"), 1e35])
@pytest.mark.parametrize("name", [*SCALES, *INPUTS])
def test_a_junk_scale_beside_a_float_weight_is_a_named_exception(tmp_path, name, value):
    """transformers leaves a weight that is no whole number of blocks in float, with a scale it never filled."""
    model = linears("a", "b")
    weight, kept = codes(8, 8), randn(8, 8, seed=4)
    spelling = name if name in SCALES else "weight_scale_inv"
    tensors = {"a.weight": weight, f"a.{spelling}": torch.tensor(0.02), "b.weight": kept}
    folder = write(tmp_path, tensors | {f"b.{name}": torch.full((2, 2), value)})
    loaded = anyfp8.load(stale(model), folder)
    assert_close(loaded["b"].weight, kept, 0)
    reason = "a scale beside a weight that is stored in float: the weight is taken as it is"
    assert anyfp8.inspect(folder).exceptions == {f"b.{name}": reason}


def test_a_parameter_called_scale_is_not_taken_for_one(tmp_path):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.weight = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "norm": Norm()})
    tensors = {"a.weight": codes(8, 8), "norm.scale": randn(8, seed=1), "norm.weight": randn(8, seed=2)}
    for spelling in ("weight_scale_inv", "scale"):
        folder = write(tmp_path / spelling, tensors | {f"a.{spelling}": torch.tensor(0.02)})
        loaded = anyfp8.load(stale(model), folder)
        assert_close(loaded["norm"].scale, tensors["norm.scale"], 0)


def test_kv_cache_scales_are_named_exceptions(tmp_path):
    model = linears("k_proj")
    names = ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale")
    tensors = {"k_proj.weight": codes(8, 8), "k_proj.weight_scale": torch.tensor(0.02)}
    folder = write(tmp_path, tensors | dict.fromkeys(names, torch.tensor(1.0)), kv_cache_scheme="static")
    loaded = anyfp8.load(stale(model), folder)
    assert set(anyfp8.inspect(folder).exceptions) == set(names)
    assert "the KV-cache scheme is reported, not applied" in anyfp8.report(loaded).notes


# --- lists only explain ---
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    ("entry", "name", "before", "now"),
    [
        ("layers.1", "layers.11.up_proj", True, False),
        ("layers.0.mlp.gate", "layers.0.mlp.gate_proj", True, False),
        ("o_proj", "layers.0.attn.o_proj", True, True),
        ("proj", "layers.0.attn.o_proj", True, True),
        ("layers.1", "model.layers.1.o_proj", False, False),
        ("visual", "model.visual.qkv", False, False),
        ("model.visual", "model.visual.qkv", True, True),
        ("layers.*.gate", "layers.3.gate", True, True),
        ("layers.0.", "layers.0.fc", True, True),
        ("a(", "a(.fc", True, True),
    ],
)
def test_entries_of_both_generations(tmp_path, key, entry, name, before, now):
    tensors = {f"{name}.weight": codes(8, 8), f"{name}.weight_scale": torch.tensor(0.02)}
    notes = anyfp8.inspect(write(tmp_path, tensors, **{key: [entry]})).notes
    assert any(note.startswith("to be left alone by the config, but stored in FP8") for note in notes) == now
    assert any(note.startswith("left alone by transformers before 5.24") for note in notes) == (before and not now)


def test_a_layer_that_the_list_does_not_name_may_be_float(tmp_path):
    model = linears("a", "b", "head")
    tensors = {"a.weight": codes(8, 8), "a.weight_scale": torch.tensor(0.02)}
    tensors |= {"b.weight": randn(8, 8), "head.weight": randn(8, 8, seed=1)}
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors, modules_to_not_convert=["head"]))
    assert "targeted by the config, but stored in float: b (the tensors decide)" in anyfp8.report(loaded).notes
    for config in ({}, {"modules_to_not_convert": ["b", "head"]}):
        loaded = anyfp8.load(stale(model), write(tmp_path, tensors, **config))
        assert anyfp8.report(loaded).notes == ()


# --- experts ---
class Experts(nn.Module):
    """gate_up [E, 2I, H] and down [E, H, I], as transformers 5 stacks them."""

    def __init__(self, count, hidden, inner):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.zeros(count, hidden, inner))


class Stacked(nn.Module):
    def __init__(self, count=3, hidden=10, inner=6):
        super().__init__()
        self.experts = Experts(count, hidden, inner)


class Single(nn.Module):
    """The same, one by one."""

    def __init__(self, count=3, hidden=10, inner=6):
        super().__init__()
        shapes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()}) for _ in range(count)
        )


BLOCK = (4, 4)


def expert_tensors(count=3, hidden=10, inner=6, block=BLOCK):
    """Per expert and part: codes and block scales; and the real values of the stacked parameters."""
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    weights, scales, values = {}, {}, {}
    for e in range(count):
        for p, (name, shape) in enumerate(shapes.items()):
            weights[e, name], scales[e, name] = codes(*shape, seed=10 * e + p), grid_of(*shape, block, 10 * e + p)
            values[e, name] = real(weights[e, name], scales[e, name], block)
    return weights, scales, values


def stack(parts, *names):
    """[experts, rows of all parts, columns]; float8 is joined as bytes."""
    count = 1 + max(e for e, _ in parts)
    raw = [torch.cat([parts[e, name].view(torch.uint8) for name in names]) for e in range(count)]
    first = parts[0, names[0]]
    return torch.stack(raw).view(first.dtype).reshape(count, -1, first.shape[1])


def check_experts(folder, values):
    """Both kinds of model hold the values."""
    stacked, single = anyfp8.load(Stacked(), folder), anyfp8.load(Single(), folder)
    for (e, name), want in values.items():
        assert_close(single.experts[e][name].weight, want, 1e-6)
        got = stacked.experts.down_proj[e] if name == "down_proj" else stacked.experts.gate_up_proj[e]
        half = slice(0, 6) if name == "gate_proj" else slice(6, 12) if name == "up_proj" else slice(None)
        assert_close(got[half], want, 1e-6)
    return single


def layouts(weights, scales):
    """The three ways in which experts are stored, with scales that are clipped at the end of each part."""
    alone = {f"experts.{e}.{name}.weight": tensor for (e, name), tensor in weights.items()}
    own = {f"experts.{e}.{name}.weight_scale_inv": tensor for (e, name), tensor in scales.items()}
    fused = {
        "experts.gate_up_proj": stack(weights, "gate_proj", "up_proj"),
        "experts.down_proj": stack(weights, "down_proj"),
    }
    shared = {
        "experts.gate_up_proj_scale_inv": stack(scales, "gate_proj", "up_proj"),
        "experts.down_proj_scale_inv": stack(scales, "down_proj"),
    }
    return {"single": alone | own, "fused": fused | shared, "hybrid": alone | shared}


@pytest.mark.parametrize("layout", ["single", "fused", "hybrid"])
def test_experts_in_blocks(tmp_path, layout):
    weights, scales, values = expert_tensors()
    single = check_experts(write(tmp_path, layouts(weights, scales)[layout], weight_block_size=list(BLOCK)), values)
    x = randn(3, 10, seed=5)
    layer = single.experts[1]["up_proj"]
    assert_close(layer(x).detach(), oracle_forward(layer, x), 1e-5)


@pytest.mark.parametrize("layout", ["fused", "hybrid"])
@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (3, 2, 1), (1,), (3, 12, 1), (3, 12)], ids=str)
def test_stacked_scales_that_are_no_blocks(tmp_path, layout, shape):
    weights, scales, _ = expert_tensors()
    tensors = layouts(weights, scales)[layout]
    scale = torch.rand(shape) * 0.01 + 0.001
    tensors |= {"experts.gate_up_proj_scale_inv": scale, "experts.down_proj_scale_inv": torch.tensor([1.0, 2.0, 3.0])}
    spread = (
        scale.reshape(-1, 1, 1)
        if scale.numel() <= 3
        else scale.reshape(3, -1, 1).repeat_interleave(12 // scale.shape[1], 1)
    )
    spread = spread.expand(3, 12, 10)
    values = {(e, "down_proj"): weights[e, "down_proj"].double() * (e + 1) for e in range(3)}
    for e in range(3):
        values[e, "gate_proj"] = weights[e, "gate_proj"].double() * spread[e, :6]
        values[e, "up_proj"] = weights[e, "up_proj"].double() * spread[e, 6:]
    check_experts(write(tmp_path, tensors, weight_block_size=None), values)


def test_blocks_that_run_on_from_gate_to_up(tmp_path):
    """12 rows in blocks of 4: three scales, of which the second is for rows of both."""
    weights, scales, _ = expert_tensors()
    tensors = layouts(weights, scales)["fused"]
    scale = torch.rand(3, 3, 3) * 0.01
    tensors["experts.gate_up_proj_scale_inv"] = scale
    loaded = anyfp8.load(Stacked(), write(tmp_path, tensors, weight_block_size=list(BLOCK)))
    want = real(tensors["experts.gate_up_proj"], scale, (1, 4, 4))
    assert_close(loaded.experts.gate_up_proj, want, 1e-6)


def test_such_blocks_beside_single_experts_are_refused(tmp_path):
    weights, scales, _ = expert_tensors()
    tensors = layouts(weights, scales)["hybrid"] | {"experts.gate_up_proj_scale_inv": torch.ones(3, 3, 3)}
    with pytest.raises(anyfp8.LoadError, match=r"experts\.gate_up_proj_scale_inv.*shape \[3, 3\].*shape \[6, 10\]"):
        anyfp8.load(Stacked(), write(tmp_path, tensors, weight_block_size=list(BLOCK)))


@pytest.mark.parametrize("layout", ["fused", "hybrid"])
def test_static_inputs_of_experts(tmp_path, layout):
    weights, scales, values = expert_tensors()
    tensors = layouts(weights, scales)[layout]
    tensors |= {f"experts.{p}_activation_scale": torch.tensor([0.1, 0.2, 0.3]) for p in ("gate_up_proj", "down_proj")}
    folder = write(tmp_path, tensors, weight_block_size=list(BLOCK), activation_scheme="static")
    single = check_experts(folder, values)
    assert [float(single.experts[e]["up_proj"].input_scale) for e in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def test_more_experts_than_scales(tmp_path):
    weights, scales, _ = expert_tensors()
    tensors = layouts(weights, scales)["hybrid"]
    tensors["experts.down_proj_scale_inv"] = tensors["experts.down_proj_scale_inv"][:2]
    with pytest.raises(anyfp8.LoadError, match=r"experts\.down_proj_scale_inv.*there is an expert 2"):
        anyfp8.load(Stacked(), write(tmp_path, tensors, weight_block_size=list(BLOCK)))


@pytest.mark.parametrize("layout", ["fused", "hybrid"])
def test_stacked_experts_without_a_scale(tmp_path, layout):
    weights, scales, _ = expert_tensors()
    tensors = layouts(weights, scales)[layout]
    del tensors["experts.down_proj_scale_inv"]
    with pytest.raises(anyfp8.LoadError, match=r"experts\..*down_proj.* is F8_E4M3, but has no scale"):
        anyfp8.load(Stacked(), write(tmp_path, tensors, weight_block_size=list(BLOCK)))


@pytest.mark.parametrize("layout", ["fused", "hybrid"])
def test_junk_scales_of_float_experts(tmp_path, layout):
    weights, scales, _ = expert_tensors()
    tensors = {k: t.float() for k, t in layouts(weights, scales)[layout].items()}
    tensors |= {"experts.down_proj_scale_inv": torch.full((3, 3, 2), float("nan"))}
    folder = write(tmp_path, tensors)
    loaded = anyfp8.load(Stacked(), folder)
    assert_close(loaded.experts.down_proj, stack(weights, "down_proj").float(), 0)
    assert set(anyfp8.inspect(folder).exceptions) == {f"experts.{p}_scale_inv" for p in ("gate_up_proj", "down_proj")}


@pytest.mark.parametrize("layout", ["single", "fused"])
def test_fp4_experts(tmp_path, layout):
    """DeepSeek-V4's: two codes a byte, the even column low, scales for 32 columns."""
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    raw = torch.randint(0, 256, (2, 8, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    powers = torch.tensor([1.0, 0.25]).repeat(2, 8, 1)
    exponents = (powers.log2() + 127).to(torch.uint8).view(E8M0)
    tensors = {"experts.down_proj": raw.view(torch.int8), "experts.down_proj_scale_inv": exponents}
    if layout == "single":
        tensors = {f"experts.{e}.w2.weight": raw[e].view(torch.int8) for e in range(2)}
        tensors |= {f"experts.{e}.w2.scale": exponents[e] for e in range(2)}
    values = torch.tensor(table)[torch.stack((raw & 15, raw >> 4), -1).long()].flatten(2)
    model = Stacked(2, 8, 64)
    del model.experts.gate_up_proj
    config = {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    loaded = anyfp8.load(model, write(tmp_path, tensors, expert_dtype="fp4", **config))
    assert_close(loaded.experts.down_proj, values * powers.repeat_interleave(32, 2), 0)
    model = Stacked(2, 8, 64)
    del model.experts.gate_up_proj
    with pytest.raises(anyfp8.LoadError, match=r"experts.*I8"):
        anyfp8.load(model, write(tmp_path / "fp8", tensors, **config))


def test_fbgemms_stacked_experts(tmp_path):
    """Llama 4's: [experts, in, out], and the scales of down_proj stored the other way round."""
    model = Stacked(2, 6, 4)
    model.experts.gate_up_proj = nn.Parameter(torch.zeros(2, 6, 8))
    model.experts.down_proj = nn.Parameter(torch.zeros(2, 4, 6))
    up, down = codes(2, 6, 8), codes(2, 4, 6, seed=1)
    a, b = torch.rand(2, 1, 8), torch.rand(2, 6, 1)
    tensors = {"experts.gate_up_proj": up, "experts.gate_up_proj_scale": a}
    tensors |= {"experts.down_proj": down, "experts.down_proj_scale": b}
    loaded = anyfp8.load(model, write(tmp_path, tensors, quant_method="fbgemm_fp8"))
    assert_close(loaded.experts.gate_up_proj, up.double() * a, 1e-6)
    assert_close(loaded.experts.down_proj, down.double() * b.transpose(1, 2), 1e-6)


def test_bytes_of_shared_tensors_are_counted_once(tmp_path):
    weights, scales, _ = expert_tensors()
    for layout, tensors in layouts(weights, scales).items():
        counted = anyfp8.inspect(write(tmp_path / layout, tensors, weight_block_size=list(BLOCK))).to_dict()["bytes"]
        assert counted["quantized"] == counted["total"] == sum(len(bytes_of(t)) for t in tensors.values())


# --- other modules and the config ---
def test_an_embedding(tmp_path):
    model = nn.ModuleDict({"table": nn.Embedding(12, 8)})
    weight = codes(12, 8)
    tensors = {"table.weight": weight, "table.weight_scale": torch.tensor([0.02])}
    config = {"modules_to_convert": ["table"], "weight_block_size": [128, 128]}
    loaded = anyfp8.load(stale(model), write(tmp_path, tensors, **config))
    assert_close(loaded["table"](torch.arange(12)), weight.double() * 0.02, 1e-6)


@pytest.mark.parametrize("method", ["fp8", "mxfp8", "fbgemm_fp8"])
def test_recognised_by_quant_method(tmp_path, method):
    manifest = anyfp8.inspect(write(tmp_path, {"a.weight": randn(2, 2)}, quant_method=method))
    assert (manifest.dialect, manifest.evidence) == (
        "transformers-fp8",
        f"config.json: quantization_config: quant_method '{method}'",
    )


def test_named_by_the_caller_without_a_config(tmp_path):
    weight, scale = encode(randn(8, 8))
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
    loaded = anyfp8.load(stale(linears("a")), tensors, dialect="transformers-fp8")
    assert_close(loaded["a"].weight, weight.double() * scale, 1e-6)


@pytest.mark.parametrize(
    "config",
    [
        {"activation_scheme": "sometimes"},
        {"scale_fmt": "e8m1"},
        {"expert_dtype": "int4"},
        {"fmt": "e5m2"},
        {"weight_block_size": [128]},
        {"weight_block_size": [0, 128]},
        {"weight_block_size": 128},
        {"weight_block_size": "128x128"},
        {"data_type": "fp8_e5m2"},
    ],
    ids=str,
)
def test_a_config_that_is_not_understood(tmp_path, config):
    ((key, _),) = config.items()
    tensors = {"a.weight": codes(8, 8), "a.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(anyfp8.AnyFP8Error, match=f"config.json: quantization_config has {key}"):
        anyfp8.load(linears("a"), write(tmp_path, tensors, **config))


def test_modelopts_manifest_goes_before_an_old_config(tmp_path):
    """Its exports of DeepSeek's files keep DeepSeek's config.json."""
    folder = write(tmp_path, {"a.weight": randn(8, 8)})
    write_json(folder / "hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}})
    assert anyfp8.inspect(folder).dialect == "modelopt"
