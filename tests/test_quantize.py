"""`quantize`: a float model becomes FP8, with input scales from calibration; or it says why not, and is as it was."""

import copy
import logging

import pytest
import torch
from torch import nn

import anyfp8
from anyfp8 import FP8Conv2d, FP8Embedding, FP8Linear
from anyfp8.scheme import PRESETS, QuantizationScheme
from tests.checkpoints import Doubling, Nested, Shared, Snapshot, Tied, X, encode, mlp, on_meta, seeded
from tests.helpers import assert_close, assert_same_bytes, max_relative_error, randn, sqnr
from tests.sweeps.cycle import oracle


def run(model, *inputs):
    with torch.no_grad():
        return model(*inputs)


class Sum(nn.Module):
    """Takes its inputs in several ways."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y=None, *, scale=1.0):
        out = self.a(x)
        return (out if y is None else out + self.b(input=y)) * scale


# --- presets and schemes ---
@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"NVFP4"}))
def test_every_preset(preset):
    make = lambda: nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))  # noqa: E731
    x = randn(10, 64)
    scheme = QuantizationScheme.from_preset(preset)
    model = anyfp8.quantize(seeded(make), preset, calibration=[x] if scheme.static else None)
    assert type(model[0]) is type(model[2]) is FP8Linear
    assert model[0].scheme == scheme
    bound = {"float4_e2m1fn": 10, "float6_e2m3fn": 20}.get(scheme.weight_dtype, 25)
    assert sqnr(run(model, x), run(seeded(make), x)) > bound
    assert "quantize" in str(anyfp8.report(model))


@pytest.mark.parametrize("channel", [False, True])
def test_weights_are_those_of_an_independent_encoder(channel):
    model = anyfp8.quantize(mlp(), "FP8_WEIGHT_ONLY" if channel else "FPW8A16")
    for layer, original in zip(model, mlp(), strict=True):
        if isinstance(layer, FP8Linear):
            codes, scale = encode(original.weight, channel)
            assert_same_bytes(layer.weight_codes, codes.view(torch.uint8))
            assert_close(layer.weight_scale.flatten(), scale, 1e-7)
            assert_same_bytes(layer.bias.detach(), original.bias.detach())


@pytest.mark.parametrize(
    "scheme",
    [
        "fp8_static",
        QuantizationScheme.from_preset("FP8_STATIC"),
        dict(QuantizationScheme.from_preset("FP8_STATIC")),
        QuantizationScheme.from_preset("FP8_STATIC").to_dict(),
        {"bits": 8, "data_type": "fp", "group_size": -1, "act_bits": 8, "act_group_size": 0, "act_dynamic": False},
        {
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        },
    ],
    ids=["preset", "scheme", "dict", "to_dict", "auto-round", "compressed-tensors"],
)
def test_schemes_in_everybodys_words(scheme):
    model = anyfp8.quantize(mlp(), scheme, calibration=[X])
    assert model[0].scheme == QuantizationScheme.from_preset("FP8_STATIC")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    model = anyfp8.quantize(mlp().to(dtype), "FP8_STATIC", calibration=[X.to(dtype)])
    out = run(model, X.to(dtype))
    assert out.dtype == model[0].weight.dtype == model[0].bias.dtype == dtype
    assert model[0].weight_scale.dtype == model[0].input_scale.dtype == torch.float32
    assert sqnr(out, run(mlp(), X)) > 25


@pytest.mark.parametrize("preset", ["FP8_STATIC", "FP8", "FP8_DYNAMIC", "FP8_WEIGHT_ONLY", "FPW8A16"])
def test_convolutions(preset):
    make = lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1, groups=2))  # noqa: E731
    x = randn(2, 3, 6, 6)
    model = anyfp8.quantize(seeded(make), preset, calibration=[x])
    assert type(model[0]) is FP8Conv2d
    assert len(model[0].scheme.tile) == 4
    assert sqnr(run(model, x), run(seeded(make), x)) > 25


def test_a_block_scheme_leaves_convolutions_and_says_so():
    make = lambda: nn.Sequential(nn.Conv1d(3, 8, 3), nn.Flatten(), nn.Linear(32, 8))  # noqa: E731
    model = anyfp8.quantize(seeded(make), "FP8_BLOCK")
    assert type(model[0]) is nn.Conv1d
    assert type(model[2]) is FP8Linear
    assert "rank" in anyfp8.report(model).skipped["0"]


def test_a_bare_layer_is_returned_new():
    layer = nn.Linear(8, 4)
    model = anyfp8.quantize(layer, "FP8_STATIC", calibration=[X])
    assert type(layer) is nn.Linear
    assert type(model) is FP8Linear
    assert list(anyfp8.report(model).layers) == [""]


# --- calibration ---
def amax_of(model, name):
    return float(model.get_submodule(name).input_scale) * 448


CALIBRATIONS = {
    "batches": lambda: [X, 2 * X],
    "generator": lambda: (i * X for i in (1, 2)),
    "tensor": lambda: 2 * X,
    "tuples": lambda: [(X,), (2 * X, X)],
    "lists": lambda: [[X], [2 * X]],
    "dicts": lambda: [{"x": X}, {"x": 2 * X, "scale": 3.0}],
    "dict": lambda: {"x": 2 * X},
    "callable": lambda: lambda model: (model(X), model(2 * X), model(x=X)),
    "loader": lambda: torch.utils.data.DataLoader(torch.cat([X, 2 * X]), batch_size=3),
}


@pytest.mark.parametrize("kind", CALIBRATIONS)
def test_calibration_data_of_every_kind(kind):
    model = anyfp8.quantize(seeded(Sum), "FP8_STATIC", calibration=CALIBRATIONS[kind](), include="a")
    assert amax_of(model, "a") == pytest.approx(float(2 * X.abs().max()), rel=1e-6)


def test_a_layer_called_by_keyword_is_observed():
    model = anyfp8.quantize(seeded(Sum), "FP8_STATIC", calibration=[(X, 3 * X)])
    assert amax_of(model, "b") == pytest.approx(float(3 * X.abs().max()), rel=1e-6)


def test_calibration_sees_the_float_model_in_eval_mode_without_gradients():
    seen = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.a, self.b = nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled(), type(self.a)))
            return self.b(self.a(self.drop(x)))

    model = seeded(Net).train()
    anyfp8.quantize(model, "FP8_STATIC", calibration=[X])
    assert seen == [(False, False, nn.Linear)]
    original = seeded(Net)
    assert amax_of(model, "b") == pytest.approx(float(run(original.a, X).abs().max()), rel=1e-6)


def test_modes_are_restored():
    model = seeded(Nested).train()
    model.layers[0].eval()
    before = {name: m.training for name, m in model.named_modules()}
    anyfp8.quantize(model, "FP8_STATIC", calibration=[X])
    assert {name: m.training for name, m in model.named_modules()} == before


@pytest.mark.parametrize("mode", [True, False])
def test_a_callable_that_changes_the_mode(mode):
    model = seeded(Nested).train(not mode)
    anyfp8.quantize(model, "FP8_STATIC", calibration=lambda m: m.train(mode)(X))
    assert {m.training for m in model.modules()} == {not mode}


def test_hooks_and_gradients_of_the_user_survive():
    calls = []
    model = mlp()
    model[0].register_forward_pre_hook(lambda m, args: calls.append(type(m)))
    anyfp8.quantize(model, "FP8_STATIC", calibration=[X])
    run(model, X)
    assert calls == [nn.Linear, FP8Linear]
    assert [len(m._forward_pre_hooks) for m in model] == [1, 0, 0]
    model(X).sum().backward()
    assert model[2].bias.grad is not None


@pytest.mark.parametrize(("percentile", "want"), [(100, 1000.0), (99.9, 999.0), (50, 500.0), (0.05, 1.0)])
def test_percentile(percentile, want):
    x = torch.arange(1.0, 1001.0).reshape(125, 8)
    model = anyfp8.quantize(nn.Sequential(nn.Linear(8, 8)), "FP8", calibration=[-x], percentile=percentile)
    assert amax_of(model, "0") == pytest.approx(want, rel=1e-6)


def test_percentile_keeps_the_largest_over_batches():
    x = torch.arange(1.0, 101.0).reshape(25, 4)
    model = anyfp8.quantize(nn.Sequential(nn.Linear(4, 4)), "FP8", calibration=[x, 3 * x, x], percentile=50)
    assert amax_of(model, "0") == pytest.approx(150, rel=1e-6)


@pytest.mark.parametrize("percentile", [0, -1, 100.5, float("nan")])
def test_impossible_percentiles(percentile):
    with pytest.raises(anyfp8.CalibrationError, match="percentile is"):
        anyfp8.quantize(mlp(), "FP8", calibration=[X], percentile=percentile)


def test_an_input_that_was_always_zero_is_warned_of(caplog):
    model = nn.Sequential(nn.Linear(8, 8))
    with caplog.at_level(logging.WARNING, "anyfp8"):
        anyfp8.quantize(model, "FP8_STATIC", calibration=[torch.zeros(2, 8)])
    assert "0: its input was zero" in caplog.text
    assert model[0].input_scale.item() == 1.0


def test_inputs_beyond_the_calibrated_range_saturate():
    model = anyfp8.quantize(nn.Sequential(nn.Linear(8, 8)), "FP8_STATIC", calibration=[X])
    out = run(model, 1e6 * X)
    assert torch.isfinite(out).all()
    assert_close(out, run(model, 1e9 * X), 1e-6)


def test_empty_batches_are_skipped():
    model = anyfp8.quantize(mlp(), "FP8_STATIC", calibration=[torch.empty(0, 8), X])
    assert amax_of(model, "0") == pytest.approx(float(X.abs().max()), rel=1e-6)


@pytest.mark.parametrize(
    "wrap", [lambda m: torch.compile(m, backend="eager"), lambda m: nn.DataParallel(m, device_ids=[])]
)
def test_wrapped_models(wrap):
    model = wrap(mlp())
    run(model, X)
    plain = anyfp8.quantize(mlp(), "FP8_STATIC", calibration=[X])
    anyfp8.quantize(model, "FP8_STATIC", calibration=[X])
    assert_close(run(model, X), run(plain, X), 1e-6)
    assert list(anyfp8.report(model).layers) == ["0", "2"]
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [False, True])
def test_a_transformer_encoder_layer_is_calibrated_past_its_fast_path(training):
    make = lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)  # noqa: E731
    model = anyfp8.quantize(seeded(make).train(training), "FP8_STATIC", calibration=[X[None]], exclude="*out_proj")
    assert type(model.linear1) is FP8Linear
    assert sqnr(run(model, X[None]), run(seeded(make), X[None])) > 25


def test_no_bar_unless_on_a_terminal(capfd):
    anyfp8.quantize(mlp(), "FP8_STATIC", calibration=[X])
    assert capfd.readouterr() == ("", "")
    anyfp8.quantize(mlp(), "FP8_STATIC", calibration=[X], progress=True)
    assert "Calibrating" in capfd.readouterr().err


# --- which layers ---
@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, ["layers.0.0", "layers.1.0", "parts.up", "parts.up_proj"]),
        ({"exclude": "layers.*"}, ["parts.up", "parts.up_proj"]),
        ({"include": "parts.up"}, ["parts.up"]),
        ({"include": ["layers.*", "parts.up_proj"], "exclude": ["layers.1.?"]}, ["layers.0.0", "parts.up_proj"]),
    ],
    ids=str,
)
def test_include_and_exclude(options, want):
    model = anyfp8.quantize(seeded(Nested), "FP8_STATIC", calibration=[X], **options)
    assert sorted(anyfp8.report(model).layers) == want
    assert sorted(n for n, m in model.named_modules() if isinstance(m, FP8Linear)) == want


def test_embeddings_only_if_included():
    make = lambda: nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 4))  # noqa: E731
    index = torch.arange(12)
    model = anyfp8.quantize(seeded(make), "FP8_STATIC", calibration=[index])
    assert (type(model[0]), type(model[1])) == (nn.Embedding, FP8Linear)
    model = anyfp8.quantize(seeded(make), "FP8_STATIC", calibration=[index], include=["0", "1"])
    assert (type(model[0]), type(model[1])) == (FP8Embedding, FP8Linear)
    assert model[0].scheme.weight_only
    assert sqnr(run(model, index), run(seeded(make), index)) > 25


def test_layers_that_cannot_be_quantized_are_reported():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), Doubling(8, 8), nn.Linear(8, 8)
            self.e = nn.Embedding(4, 8, max_norm=1.0)
            inner = self.c.forward
            self.c.forward = lambda x: inner(x)

        def forward(self, x):
            return self.c(self.b(self.a(x)))

    model = anyfp8.quantize(seeded(Net), "FP8_STATIC", calibration=[X], include="*")
    assert type(model.b) is Doubling
    report = anyfp8.report(model)
    assert list(report.layers) == ["a"]
    assert set(report.skipped) == {"b", "c", "e"}
    assert "Doubling" in report.skipped["b"]
    assert "instance" in report.skipped["c"]
    assert "max_norm" in report.skipped["e"]


@pytest.mark.parametrize("name", ["first", "second"])
def test_shared_layers(name):
    model = anyfp8.quantize(seeded(Shared), "FP8_STATIC", calibration=[X])
    assert model.first is model.second
    assert type(model.first) is FP8Linear
    seen = torch.maximum(X.abs().max(), torch.tanh(run(seeded(Shared).first, X)).abs().max())
    assert amax_of(model, "first") == pytest.approx(float(seen), rel=1e-6)
    with pytest.raises(anyfp8.CalibrationError, match="no layer to quantize"):
        anyfp8.quantize(seeded(Shared), "FP8_DYNAMIC", exclude=name)


def test_tied_weights():
    model = anyfp8.quantize(seeded(Tied), "FP8_DYNAMIC")
    assert (type(model.emb), type(model.head)) == (nn.Embedding, FP8Linear)
    assert_same_bytes(model.emb.weight.detach(), seeded(Tied).emb.weight.detach())


def test_a_second_call_takes_what_is_left():
    model = anyfp8.quantize(mlp(), "FP8_DYNAMIC", include="0")
    codes = model[0].weight_codes
    anyfp8.quantize(model, "FP8_WEIGHT_ONLY")
    assert model[0].weight_codes is codes
    assert model[0].scheme.act_dynamic
    assert model[2].scheme.weight_only
    assert set(anyfp8.report(model).layers) == {"0", "2"}


# --- failing ---
def nan_weights():
    model = mlp()
    model[2].weight.data[3, 3] = float("nan")
    return model


def infinite_weights():
    model = mlp()
    model[0].weight.data[0, 0] = float("inf")
    return model


def raising(model):
    model(X)
    raise KeyError("from the user's code")


FAILURES = {
    "no calibration": (mlp, "FP8_STATIC", {}, "needs calibration="),
    "no batches": (mlp, "FP8_STATIC", {"calibration": []}, "no batches"),
    "never called": (lambda: seeded(Sum), "FP8_STATIC", {"calibration": [X]}, r"never called b\b"),
    "callable that does nothing": (mlp, "FP8_STATIC", {"calibration": lambda m: None}, r"never called \{0,2\}"),
    "only empty batches": (mlp, "FP8_STATIC", {"calibration": [torch.empty(0, 8)]}, r"never called \{0,2\}"),
    "nan input": (mlp, "FP8_STATIC", {"calibration": [X, X * float("nan")]}, r"\{0,2\} held NaN"),
    "infinite input": (mlp, "FP8_STATIC", {"calibration": [X / 0]}, r"\b0\b.*held NaN or infinite"),
    "nan under percentile": (mlp, "FP8", {"calibration": [X * float("nan"), X], "percentile": 50}, r"\{0,2\} held NaN"),
    "nan weights": (nan_weights, "FP8_DYNAMIC", {}, r"^2: .*NaN"),
    "infinite weights": (infinite_weights, "FP8_BLOCK", {}, r"^0: .*infinite"),
    "unknown preset": (mlp, "FP8_STATICC", {}, "unknown preset 'FP8_STATICC'; valid: .*FP8_STATIC"),
    "unknown key": (mlp, {"tiles": [1, -1]}, {}, "unknown key 'tiles'"),
    "int8": (mlp, {"bits": 8, "data_type": "int"}, {}, "data_type is 'int'"),
    "nothing included": (mlp, "FP8_DYNAMIC", {"include": "nothing"}, "no layer to quantize"),
    "everything excluded": (mlp, "FP8_DYNAMIC", {"exclude": "*"}, "no layer to quantize"),
    "no layers": (lambda: nn.Sequential(nn.GELU()), "FP8_DYNAMIC", {}, "no layer to quantize"),
    "already fp8": (lambda: anyfp8.quantize(mlp(), "FP8_DYNAMIC"), "FP8_DYNAMIC", {}, "no layer to quantize"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("training", [False, True])
def test_a_failed_call_leaves_the_model_as_it_was(name, training):
    make, scheme, options, match = FAILURES[name]
    model = make().train(training)
    for module in list(model.children())[:1]:
        module.eval()
        module.register_forward_pre_hook(lambda m, args: None)
    before = Snapshot(model)
    with pytest.raises(anyfp8.AnyFP8Error, match=match):
        anyfp8.quantize(model, scheme, **options)
    before.assert_unchanged()


def test_an_error_of_the_calibration_itself_comes_through(tmp_path):
    model = mlp().train()
    before = Snapshot(model, X)
    with pytest.raises(KeyError, match="from the user's code"):
        anyfp8.quantize(model, "FP8_STATIC", calibration=raising)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        anyfp8.quantize(model, "FP8_STATIC", calibration=[X, X[:, :3]])
    before.assert_unchanged()


def test_meta_models_are_refused():
    model = on_meta(mlp)
    before = Snapshot(model)
    with pytest.raises(anyfp8.CalibrationError, match=r"\{0,2\} are on the meta device"):
        anyfp8.quantize(model, "FP8_DYNAMIC")
    before.assert_unchanged()


# --- weights that no call of a layer uses ---
@torch.no_grad()
@pytest.mark.parametrize("scheme", ["FP8_STATIC", "FP8_DYNAMIC", "FP8_BLOCK", "FP8_WEIGHT_ONLY"])
def test_attention_reads_its_weights_and_the_report_says_so(scheme, tmp_path):
    make = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()  # noqa: E731
    x, float_model = X[None], seeded(make)
    model = anyfp8.quantize(copy.deepcopy(float_model), scheme, calibration=[x])
    found = anyfp8.report(model).layers
    assert sorted(found) == ["linear1", "linear2", "self_attn.in_proj_weight", "self_attn.out_proj"]
    weight_only = {name for name, layer in found.items() if layer.scheme.weight_only}
    if scheme == "FP8_WEIGHT_ONLY":
        assert weight_only == set(found)
        assert not any(layer.note for layer in found.values())
    else:
        assert weight_only == {"self_attn.in_proj_weight", "self_attn.out_proj"}
        assert found["self_attn.out_proj"].note == "MultiheadAttention reads its weight and never calls it"
        assert "decoded when used" in found["self_attn.in_proj_weight"].note
    if scheme == "FP8_STATIC":
        assert_close(model(x), oracle(float_model, model)(x), 1e-5)
    assert max_relative_error(model(x), float_model(x)) > 1e-3
    anyfp8.save(model, tmp_path / "q")
    loaded = anyfp8.load(on_meta(make), tmp_path / "q")
    assert_same_bytes(loaded(x), model(x))


class Stack(nn.Module):
    """Experts in one parameter, as transformers has them."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Module()
        self.experts.up_proj = nn.Parameter(randn(3, 16, 8))
        self.experts.down_proj = nn.Parameter(randn(3, 8, 16, seed=1))
        self.table = nn.Parameter(randn(3, 4, 8))

    def forward(self, x):
        for up, down in zip(self.experts.up_proj, self.experts.down_proj, strict=True):
            x = x + torch.tanh(x @ up.T) @ down.T
        return x + self.table.sum((0, 1))


@torch.no_grad()
@pytest.mark.parametrize(
    ("scheme", "tile"),
    [("FP8_STATIC", (1, 1, -1)), ("FP8", (1, -1, -1)), ("FP8_BLOCK", (1, 128, 128)), ("FP8_WEIGHT_ONLY", (1, 1, -1))],
)
def test_stacked_experts_stay_fp8_and_come_back(scheme, tile, tmp_path):
    original = Stack()
    model = anyfp8.quantize(Stack(), scheme, calibration=[X])
    found = anyfp8.report(model).layers
    assert list(found) == ["experts.up_proj", "experts.down_proj"]
    assert {layer.scheme.tile for layer in found.values()} == {tile}
    assert all(layer.scheme.weight_only for layer in found.values())
    for name in ("up_proj", "down_proj"):
        got, want = getattr(model.experts, name), getattr(original.experts, name)
        assert 20 < sqnr(got, want) < 45
        if tile == (1, -1, -1):
            for one, float_one in zip(got, want, strict=True):  # every expert has a scale of its own
                scale = float_one.abs().max() / 448
                assert_close(one, (float_one / scale).to(torch.float8_e4m3fn).float() * scale)
    anyfp8.save(model, tmp_path / "q")
    with pytest.raises(anyfp8.AnyFP8Error, match=r"up_proj.*no module's `weight`"):
        anyfp8.save(model, tmp_path / "ct", format="compressed-tensors")
    loaded = anyfp8.load(on_meta(Stack), tmp_path / "q")
    assert_same_bytes(loaded(X), model(X))
    assert not [p for p in loaded.parameters() if p.numel() >= 3 * 8 * 16]


def test_experts_can_be_left_out():
    model = anyfp8.quantize(nn.Sequential(Stack(), nn.Linear(8, 8)), "FP8_DYNAMIC", exclude="*experts*")
    assert list(anyfp8.report(model).layers) == ["1"]


def test_layers_without_an_fp8_version_are_named():
    layers = {"up": nn.ConvTranspose2d(4, 4, 2), "two": nn.Bilinear(4, 4, 4), "rnn": nn.LSTM(4, 4)}
    layers["normed"] = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3))
    layers["spectral"] = nn.utils.spectral_norm(nn.Linear(4, 4))
    own = nn.Module()  # somebody's own layer
    own.weight, own.norm_weight = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(1, 4))
    layers["own"] = own
    model = nn.ModuleDict(layers | {"fc": nn.Linear(4, 4)})
    skipped = anyfp8.report(anyfp8.quantize(model, "FP8_DYNAMIC")).skipped
    assert set(skipped) == set(layers)
    assert skipped["up"] == "ConvTranspose2d is no layer type that has an FP8 version"
    assert skipped["own"] == "Module is no layer type that has an FP8 version"
    assert skipped["rnn"] == "LSTM is no layer type that has an FP8 version"
    assert skipped["normed"] == "its weight is computed, by weight norm or another parametrization"
    assert skipped["spectral"] == "its weight is computed at each call, by a hook"


def test_lazy_layers_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    anyfp8.quantize(model, "FP8_DYNAMIC")
    assert type(model[1]) is nn.LazyLinear
    assert "LazyLinear" in anyfp8.report(model).skipped["1"]
