"""Which backend runs a layer, on any machine: the decision is a function of plain values."""

import re

import pytest

import anyfp8
from anyfp8 import backends
from anyfp8.backends import BACKENDS, DeviceInfo, check_name, register_backend, select
from anyfp8.backends.emulated import Emulated
from anyfp8.errors import BackendError
from anyfp8.scheme import QuantizationScheme
from tests.helpers import E4M3, E4M3Z, E5M2, E5M2Z, assert_same_bytes, float_linear, make_fp8, randn

OCP = (E4M3, E5M2)
FNUZ = (E4M3Z, E5M2Z)
NO_CORES = r"has no FP8 tensor cores \(sm89 and newer have\)"
NO_ROCM = r"has no FP8 matmul \(gfx942, gfx950 and gfx12 have\)"
#: device → the formats it multiplies, or why it can't
DEVICES = {
    "sm75": (DeviceInfo("cuda", (7, 5)), f"cuda sm75 {NO_CORES}"),
    "sm80": (DeviceInfo("cuda", (8, 0)), f"cuda sm80 {NO_CORES}"),
    "sm86": (DeviceInfo("cuda", (8, 6)), f"cuda sm86 {NO_CORES}"),
    "sm89": (DeviceInfo("cuda", (8, 9)), OCP),
    "sm90": (DeviceInfo("cuda", (9, 0)), OCP),
    "sm100": (DeviceInfo("cuda", (10, 0)), OCP),
    "sm120": (DeviceInfo("cuda", (12, 0)), OCP),
    "gfx90a": (DeviceInfo("cuda", arch="gfx90a"), f"ROCm gfx90a {NO_ROCM}"),
    "gfx942": (DeviceInfo("cuda", arch="gfx942"), FNUZ),
    "gfx950": (DeviceInfo("cuda", arch="gfx950"), OCP),
    "gfx1100": (DeviceInfo("cuda", arch="gfx1100"), f"ROCm gfx1100 {NO_ROCM}"),
    "gfx1201": (DeviceInfo("cuda", arch="gfx1201"), OCP),
    "xpu": (DeviceInfo("xpu"), OCP),
    "cpu": (DeviceInfo("cpu"), OCP),
    "mps": (DeviceInfo("mps"), "mps has no FP8 matmul in torch"),
    "meta": (DeviceInfo("meta"), "meta has no FP8 matmul in torch"),
}
LINEAR = (64, 32)
devices = pytest.mark.parametrize("device", DEVICES)


def static(weight=E4M3, act=E4M3, tile=(-1, -1)):
    return QuantizationScheme(weight, tile, act_dtype=act)


def dynamic(act_tile, tile=(-1, -1)):
    return QuantizationScheme(tile=tile, act_dtype=E4M3, act_dynamic=True, act_tile=act_tile)


@pytest.fixture
def registry():
    """Undoes every registration."""
    kept, order = dict(backends._REGISTRY), list(backends._AUTO)
    yield
    backends._REGISTRY.clear()
    backends._REGISTRY.update(kept)
    backends._AUTO[:] = order


# --- native ---
@devices
@pytest.mark.parametrize(
    "scheme",
    [static(), static(tile=(1, -1)), dynamic((-1, -1)), dynamic((1, -1)), dynamic((1, -1), tile=(1, -1))],
    ids=lambda s: str(s).replace(" ", "-"),
)
def test_native_takes_tensor_and_row_scales(device, scheme):
    info, formats = DEVICES[device]
    reason = BACKENDS["native"].check(scheme, LINEAR, info)
    if isinstance(formats, str):
        assert_matches(reason, formats)
    elif formats == OCP:
        assert reason is None
    else:
        assert_matches(reason, "ROCm gfx942 multiplies float8_e4m3fnuz and float8_e5m2fnuz only")


def assert_matches(text, pattern):
    assert text is not None, "accepted"
    assert re.search(pattern, text), f"{text!r} does not match {pattern!r}"


@devices
@pytest.mark.parametrize("weight", [E4M3, E5M2, E4M3Z, E5M2Z])
@pytest.mark.parametrize("act", [E4M3, E5M2, E4M3Z, E5M2Z])
def test_native_takes_the_formats_of_the_device(device, weight, act):
    info, formats = DEVICES[device]
    reason = BACKENDS["native"].check(static(weight, act), LINEAR, info)
    if weight == act == E5M2:
        assert_matches(reason, "scaled_mm has no e5m2 × e5m2")
    elif isinstance(formats, str):
        assert_matches(reason, formats)
    elif weight in formats and act in formats:
        assert reason is None
    else:
        assert_matches(reason, f"multiplies {formats[0]} and {formats[1]} only")


@devices
@pytest.mark.parametrize(
    ("scheme", "shape", "reason"),
    [
        (QuantizationScheme(), LINEAR, "weight-only: the input is not quantized, so there is no FP8 matmul"),
        (QuantizationScheme(tile=(1, 32)), LINEAR, "weight-only"),
        (static(tile=(1, -1, -1, -1)), (8, 4, 3, 3), "torch has no FP8 convolution"),
        (static(tile=(-1, -1, -1)), (8, 4, 3), "torch has no FP8 convolution"),
        (static(tile=(1, 32)), LINEAR, "per-tensor and per-row scales only, not for e4m3fn per 1×32"),
        (static(tile=(-1, 32)), LINEAR, "per-tensor and per-row scales only, not for e4m3fn per ·×32"),
        (static(tile=(2, -1)), LINEAR, "per-tensor and per-row scales only, not for e4m3fn per 2×·"),
        (dynamic((1, 128), tile=(128, 128)), LINEAR, "per-tensor and per-row scales only, not for e4m3fn per 128×128"),
        (dynamic((1, 128)), LINEAR, "per-tensor and per-row scales only, not for .* input dynamic e4m3fn per 1×128"),
    ],
)
def test_native_refuses_other_schemes_everywhere(device, scheme, shape, reason):
    assert_matches(BACKENDS["native"].check(scheme, shape, DEVICES[device][0]), reason)


@devices
def test_native_is_avoided_on_a_cpu_only(device):
    reason = BACKENDS["native"].avoid(DEVICES[device][0])
    if device == "cpu":
        assert_matches(reason, "scaled_mm on a CPU is hundreds to thousands of times slower than emulation")
    else:
        assert reason is None


# --- the others ---
@devices
@pytest.mark.parametrize("scheme", [QuantizationScheme(), static(), static(E5M2Z, E5M2), dynamic((1, 32), (16, 16))])
def test_emulated_and_dequantized_take_everything(device, scheme):
    for name in ("emulated", "dequantized"):
        for shape in (LINEAR, (8, 4, 3, 3)):
            assert BACKENDS[name].check(scheme, shape, DEVICES[device][0]) is None
    assert BACKENDS["emulated"].avoid(DEVICES[device][0]) is None
    assert_matches(BACKENDS["dequantized"].avoid(DEVICES[device][0]), "leaves the input unquantized, another contract")


ALIAS = "auto_round:torch_fp8_static"


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (static(), None),
        (static(tile=(1, -1)), None),
        (static(tile=(1, 32)), None),
        (dynamic((1, -1)), r"needs a static input scale \(act_dynamic false\)"),
        (QuantizationScheme(), "needs a static input scale"),
        (static(E5M2, E4M3), "needs e4m3fn weights and inputs"),
        (static(E4M3, E5M2), "needs e4m3fn weights and inputs"),
        (static(E4M3Z, E4M3Z), "needs e4m3fn weights and inputs"),
    ],
)
def test_auto_rounds_alias(scheme, reason):
    found = BACKENDS[ALIAS].check(scheme, LINEAR, DeviceInfo("cpu"))
    if reason is None:
        assert found is None
        assert select(ALIAS, scheme, LINEAR, DeviceInfo("cpu")) == (BACKENDS[ALIAS], {})
    else:
        assert_matches(found, f"{ALIAS} {reason}")
        assert select(ALIAS, scheme, LINEAR, DeviceInfo("cpu")) == (None, {ALIAS: found})


def test_auto_rounds_alias_computes_the_emulation():
    layer = make_fp8(float_linear())
    x = randn(3, 32)
    want = layer(x)
    layer.select_backend(ALIAS)
    assert_same_bytes(layer(x), want)


# --- select ---
@devices
def test_auto_takes_the_best_that_accepts(device):
    info, formats = DEVICES[device]
    backend, refusals = select("auto", static(), LINEAR, info)
    if formats == OCP and device != "cpu":
        assert (backend.name, refusals) == ("native", {})
    else:
        assert backend.name == "emulated"
        assert list(refusals) == ["native"]


@devices
@pytest.mark.parametrize("scheme", [QuantizationScheme(), static(tile=(1, 32)), dynamic((1, 128))])
def test_auto_never_changes_the_contract(device, scheme):
    backend, refusals = select("auto", scheme, LINEAR, DEVICES[device][0])
    assert backend.name == "emulated"
    assert list(refusals) == ["native"]


def test_a_name_takes_that_one_or_nothing():
    sm80 = DeviceInfo("cuda", (8, 0))
    backend, refusals = select("native", static(), LINEAR, sm80)
    assert backend is None
    assert_matches(refusals["native"], NO_CORES)
    for name in ("native", "emulated", "dequantized", ALIAS):  # asked for by name, nothing is avoided
        assert select(name, static(), LINEAR, DeviceInfo("cpu")) == (BACKENDS[name], {})


@pytest.mark.parametrize("name", ["cutlass", "", "Native", None])
def test_unknown_names(name):
    message = f"unknown backend {name!r}; known: auto, native, emulated, dequantized, {ALIAS}"
    for call in (lambda: check_name(name), lambda: select(name, static(), LINEAR, DeviceInfo("cpu"))):
        with pytest.raises(BackendError, match=message):
            call()


def test_check_name_knows_auto_and_every_backend():
    for name in ("auto", *BACKENDS):
        check_name(name)


def test_the_registry_is_read_only():
    with pytest.raises(TypeError, match="does not support item assignment"):
        BACKENDS["mine"] = Emulated()


# --- registering ---
class Doubling(Emulated):
    """Accepts linear layers of one size, and doubles what they compute."""

    def __init__(self, name="doubling"):
        self.name = name

    def check(self, scheme, shape, device):
        return None if tuple(shape) == (16, 32) else "only for 16 × 32"

    def linear(self, layer, x):
        return super().linear(layer, x) * 2


def test_registered_backends_come_first(registry):
    plain = make_fp8(float_linear())
    anyfp8.register_backend(Doubling())
    layer, other = make_fp8(float_linear()), make_fp8(float_linear(32, 8))
    assert (layer.backend.name, layer.refusals) == ("doubling", {})
    assert other.backend.name == "emulated"
    assert list(other.refusals) == ["doubling", "native"]
    assert other.refusals["doubling"] == "only for 16 × 32"
    x = randn(2, 32)
    assert_same_bytes(layer(x), plain(x) * 2)
    assert plain.backend.name == "emulated"  # chosen before, and not inside the forward


def test_registered_backends_can_be_asked_for(registry):
    register_backend(Doubling())
    layer = make_fp8(float_linear(32, 8))
    with pytest.raises(BackendError, match=r"backend 'doubling' can't run this layer\n.*FP8Linear: only for 16 × 32"):
        layer.select_backend("doubling")
    assert layer.backend.name == "emulated"
    with pytest.raises(BackendError, match=r"known: auto, .*doubling"):
        check_name("tripling")


@pytest.mark.parametrize("name", ["native", "emulated", "auto", ALIAS])
def test_taken_names(registry, name):
    with pytest.raises(ValueError, match=f"backend '{name}' is already registered"):
        register_backend(Doubling(name))


def test_registering_twice(registry):
    register_backend(Doubling())
    with pytest.raises(ValueError, match="backend 'doubling' is already registered"):
        register_backend(Doubling())


def test_the_fixture_cleans_up():
    assert list(BACKENDS) == ["native", "emulated", "dequantized", ALIAS]
    assert make_fp8(float_linear()).backend.name == "emulated"
