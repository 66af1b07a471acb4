import itertools
import math
import os

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from anyfp8.numerics import (
    AMAX_FLOOR,
    FORMATS,
    codes,
    count_nonfinite,
    decode,
    decode_e5m3,
    decode_e8m0,
    dequantize,
    dtype_name,
    dynamic_scale,
    expand_scale,
    grid_shape,
    logical_shape,
    quantize,
    quantize_tiled,
    round_to_grid,
    tile_amax,
    unpack,
    unswizzle,
)
from anyfp8.scheme import ACT_SCALES
from tests.helpers import (
    E4M3,
    E4M3Z,
    E5M2,
    E5M2Z,
    FLOATS,
    ORACLES,
    assert_same_bytes,
    bytes_of,
    code_values,
    oracle_codes,
    oracle_expand,
    oracle_round,
    randn,
)

formats = pytest.mark.parametrize("format", ORACLES)
floats32 = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32))


def finite_grid(format):
    values = code_values(format)
    return np.unique(values[np.isfinite(values)])


def hard_points(format):
    """Every value, every midpoint (a tie) and its float32 neighbours: where roundings go wrong."""
    grid = finite_grid(format)
    middle = (grid[1:] + grid[:-1]) / 2
    points = np.concatenate([grid, middle]).astype(np.float32)
    up, down = (np.nextafter(points, np.float32(side)) for side in (np.inf, -np.inf))
    return torch.from_numpy(np.concatenate([points, up, down]))


def codes_of(x, format):
    return quantize(x, format).view(torch.uint8)


# --- the table of formats ---
@formats
def test_table_agrees_with_ml_dtypes(format):
    spec, info, values = FORMATS[format], ml_dtypes.finfo(getattr(ml_dtypes, format)), code_values(format)
    assert spec.dtype == getattr(torch, format)
    assert spec.max == float(info.max)
    assert spec.mantissa == info.nmant
    assert 2.0 ** (1 - spec.bias) == float(info.smallest_normal)
    assert spec.nan_codes == tuple(np.flatnonzero(np.isnan(values)))


def test_dtype_name():
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"
    assert dtype_name(torch.bfloat16) == "bfloat16"


# --- quantize ---
@formats
@given(x=floats32)
@example(x=np.array([0.0, -0.0, 448.0, 464.0, 465.0, 240.0, 57344.0, 61440.0, 1e38, 2**-17, 2**-10], np.float32))
def test_quantize_is_nearest_even_saturating(format, x):
    got = codes_of(torch.from_numpy(x), format)
    want = oracle_codes(x, format)
    nan = torch.from_numpy(np.isnan(x))
    values = code_values(format)
    assert all(math.isnan(values[c]) for c in got[nan].tolist())
    assert np.array_equal(values[got[~nan].numpy()], values[want[~nan].numpy()])


@formats
@given(x=floats32)
def test_quantize_agrees_with_ml_dtypes(format, x):
    spec = FORMATS[format]
    want = np.clip(x, -spec.max, spec.max).astype(getattr(ml_dtypes, format))
    got = codes_of(torch.from_numpy(x), format).numpy()
    nan = np.isnan(x)
    assert np.array_equal(got[~nan], want.view(np.uint8)[~nan])
    assert np.isnan(code_values(format)[got[nan]]).all()


@formats
def test_quantize_at_every_tie_by_naive_search(format):
    """A loop over all codes per element: nearest, ties to the even code."""
    values, x = code_values(format), hard_points(format)
    codes = [c for c in range(256) if math.isfinite(values[c]) and (c < 128 or values[c] != 0)]
    got = codes_of(x, format).tolist()
    for value, code in zip(x.tolist(), got, strict=True):
        nearest = min(codes, key=lambda c: (abs(values[c] - value), c % 2))
        assert values[code] == values[nearest], f"{value!r} became {values[code]}, not {values[nearest]}"


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_takes_narrow_inputs(format, dtype):
    x = hard_points(format).to(dtype)
    assert code_values(format)[codes_of(x, format).numpy()].tolist() == oracle_round(x, format).tolist()


@formats
def test_quantize_saturates_and_keeps_nan(format):
    spec = FORMATS[format]
    x = torch.tensor([math.inf, -math.inf, 3e38, -3e38, math.nan])
    values = code_values(format)[codes_of(x, format).numpy()]
    assert values[:4].tolist() == [spec.max, -spec.max, spec.max, -spec.max]
    assert math.isnan(values[4])


@formats
def test_quantize_of_negative_zero(format):
    codes = codes_of(torch.tensor([-0.0, 0.0, -1e-30]), format).tolist()
    assert codes == ([0, 0, 0] if format.endswith("fnuz") else [0x80, 0, 0x80])


@formats
@given(x=floats32)
def test_quantize_is_symmetric_and_idempotent(format, x):
    x = torch.from_numpy(x)
    once = quantize(x, format)
    assert quantize(once.float(), format).float().nan_to_num(-1).tolist() == once.float().nan_to_num(-1).tolist()
    assert quantize(-x, format).float().nan_to_num(0).tolist() == (-once.float()).nan_to_num(0).tolist()


@formats
def test_quantize_clamps_before_the_cast(format, monkeypatch):
    """torch before 2.12 turned e4m3fn overflow into NaN; e5m2 still becomes infinite."""
    cast, largest = torch.Tensor.to, []

    def guarded(self, *args, **kwargs):
        if FORMATS[format].dtype in (*args, *kwargs.values()):
            largest.append(float(self.abs().max()))
        return cast(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", guarded)
    quantize(torch.tensor([1e9, -1e9, math.inf]), format)
    assert largest == [FORMATS[format].max]


@formats
def test_quantize_keeps_shape(format):
    for shape in [(), (0,), (2, 0, 3), (2, 3, 4, 5)]:
        got = quantize(torch.ones(shape), format)
        assert got.shape == shape
        assert got.dtype == FORMATS[format].dtype


# --- decode ---
def all_codes():
    return torch.arange(256, dtype=torch.uint8)


def assert_decodes_exactly(format, dtype):
    want = torch.from_numpy(code_values(format))
    got = decode(all_codes(), format, dtype)
    assert got.dtype == dtype
    assert torch.equal(got.isnan(), want.isnan())
    real = ~want.isnan()
    assert got.double()[real].tolist() == want[real].tolist()
    assert torch.equal(torch.signbit(got[real]), torch.signbit(want[real]))


@formats
@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_is_exact_for_every_code(format, dtype):
    assert_decodes_exactly(format, dtype)


@formats
@pytest.mark.parametrize("dtype", FLOATS)
def test_decode_is_exact_when_denormals_are_flushed(format, dtype):
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU can't flush denormals")
    try:
        assert float(torch.tensor([1e-39]) * 1.0) == 0, "denormals aren't flushed, so this shows nothing"
        assert_decodes_exactly(format, dtype)
        x = code_values(format)[np.isfinite(code_values(format))]
        assert round_to_grid(torch.from_numpy(x).float(), format).tolist() == x.tolist()
    finally:
        torch.set_flush_denormal(False)


@formats
def test_decode_of_negative_zero(format):
    value = decode(torch.tensor([0x80], dtype=torch.uint8), format)
    if format.endswith("fnuz"):
        assert value.isnan().all()
    else:
        assert bytes_of(value) == bytes_of(torch.tensor([-0.0]))


def test_decode_of_e5m2_infinities():
    values = decode(torch.tensor([0x7C, 0xFC], dtype=torch.uint8), E5M2)
    assert values.tolist() == [math.inf, -math.inf]


@formats
def test_decode_keeps_shape_and_reads_strided_codes(format):
    codes = all_codes().reshape(2, 8, 16)
    want = decode(codes, format)
    assert want.shape == (2, 8, 16)
    assert_same_bytes(decode(codes.transpose(0, 2), format), want.transpose(0, 2))
    assert_same_bytes(decode(codes[:, ::3, 1::5], format), want[:, ::3, 1::5])
    assert_same_bytes(decode(codes[1, 2, 3], format), want[1, 2, 3])
    assert decode(codes[:, :0], format).shape == (2, 0, 16)


@formats
def test_decode_leaves_its_input_alone(format):
    codes = all_codes()
    decode(codes, format, torch.float16)
    assert_same_bytes(codes, all_codes())


@formats
def test_quantize_inverts_decode(format):
    codes = all_codes()[torch.from_numpy(np.isfinite(code_values(format)))]
    assert_same_bytes(codes_of(decode(codes, format), format), codes)


# --- round_to_grid ---
@formats
@given(x=floats32)
def test_round_to_grid_is_decode_of_quantize(format, x):
    x = torch.from_numpy(x)
    got, want = round_to_grid(x, format), decode(codes_of(x, format), format)
    assert torch.equal(got.isnan(), want.isnan())
    assert got.nan_to_num(0).tolist() == want.nan_to_num(0).tolist()  # by value: the sign of a zero is not kept


@formats
def test_round_to_grid_at_every_tie(format):
    x = hard_points(format)
    assert round_to_grid(x, format).double().tolist() == oracle_round(x, format).tolist()


@formats
def test_round_to_grid_without_saturation_agrees_up_to_the_largest(format):
    top = FORMATS[format].max
    x = torch.cat([hard_points(format).clamp(-top, top), torch.tensor([top, -top]) * (1 + 2**-22)])
    assert round_to_grid(x, format, saturate=False).double().tolist() == oracle_round(x, format).tolist()


@formats
def test_round_to_grid_leaves_its_input_alone(format):
    x = hard_points(format)
    for saturate in (True, False):
        kept = x.clone()
        round_to_grid(x, format, saturate=saturate)
        assert_same_bytes(x, kept)


@formats
def test_round_to_grid_has_the_straight_through_gradient(format):
    top = FORMATS[format].max
    points = [0.0, 1e-9, 0.3, -1.7, top * 0.99, -top * 0.99, top * 1.01, -top * 1.01, math.inf, -math.inf]
    x = torch.tensor(points, requires_grad=True)
    weights = torch.arange(1.0, 11.0)
    (round_to_grid(x, format) * weights).sum().backward()
    assert x.grad.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0, 0]
    x.grad = None
    (round_to_grid(x[:6], format, saturate=False) * weights[:6]).sum().backward()
    assert x.grad.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0, 0]


@formats
def test_round_to_grid_compiles_into_one_graph(format):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: round_to_grid(x, format), fullgraph=True, backend="aot_eager")
    x = torch.cat([hard_points(format), torch.tensor([math.inf, -math.inf])])
    assert_same_bytes(compiled(x), round_to_grid(x, format))


@pytest.mark.skipif(not os.environ.get("ANYFP8_SLOW"), reason="compiles C++ for 20 s; set ANYFP8_SLOW=1 to run it")
def test_round_to_grid_survives_inductor():
    """A compiler that simplified (x + step) − step would round nothing."""
    torch._dynamo.reset()
    x = hard_points(E4M3)
    got = torch.compile(lambda x: round_to_grid(x, E4M3), fullgraph=True)(x)
    assert got.double().tolist() == oracle_round(x, E4M3).tolist()


# --- grids ---
def tiles_for(shape):
    """Tiles worth trying for a shape: whole, single, a divisor, one that clips, one that is too large."""
    return st.tuples(*[st.sampled_from([-1, 1, 2, 3, max(1, n), n + 1]) for n in shape])


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda s: math.prod(s) <= 200).map(tuple)
shaped = shapes.flatmap(lambda s: st.tuples(st.just(s), tiles_for(s)))


def naive_grid(shape, tile):
    counts = []
    for n, t in zip(shape, tile, strict=True):
        count, start = 0, 0
        while t != -1 and start < n:
            count, start = count + 1, start + t
        counts.append(1 if t == -1 else count)
    return tuple(counts)


def naive_amax(x, tile):
    out = torch.zeros(naive_grid(x.shape, tile))
    for index in np.ndindex(*x.shape):
        cell = tuple(0 if t == -1 else i // t for i, t in zip(index, tile, strict=True))
        out[cell] = max(float(out[cell]), abs(float(x[index])))
    return out


@given(case=shaped)
@example(case=((300, 64), (128, -1)))
@example(case=((257, 129), (128, 128)))
def test_grid_shape(case):
    shape, tile = case
    assert grid_shape(shape, tile) == naive_grid(shape, tile)


def test_grid_shape_of_empty_axes():
    assert grid_shape((0, 8), (1, -1)) == (0, 1)
    assert grid_shape((0, 8), (-1, 4)) == (1, 2)


@pytest.mark.parametrize("tile", [(-1,), (1, -1, -1)])
def test_grid_shape_refuses_another_rank(tile):
    with pytest.raises(ValueError, match=r"has \d axes, the tensor \(4, 6\) has 2"):
        grid_shape((4, 6), tile)


@given(case=shaped)
def test_expand_scale(case):
    shape, tile = case
    grid = grid_shape(shape, tile)
    scale = torch.arange(1.0, 1 + math.prod(grid)).reshape(grid)
    got = expand_scale(scale, shape, tile).expand(shape)
    assert_same_bytes(got.double(), oracle_expand(scale, shape, tile))


@given(case=shaped, seed=st.integers(0, 9))
def test_tile_amax(case, seed):
    shape, tile = case
    x = randn(*shape, seed=seed)
    assert_same_bytes(tile_amax(x, tile), naive_amax(x, tile))
    assert_same_bytes(tile_amax(x.transpose(0, -1).contiguous().transpose(0, -1), tile), naive_amax(x, tile))


@pytest.mark.parametrize("dtype", FLOATS)
def test_tile_amax_is_float32(dtype):
    assert_same_bytes(tile_amax(torch.tensor([[-3.0, 2.0]], dtype=dtype), (1, -1)), torch.tensor([[3.0]]))


@pytest.mark.parametrize("tile", [(-1, -1), (1, -1), (1, 2), (2, 2), (-1, 2)])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_tile_amax_of_nothing_is_zero(shape, tile):
    assert_same_bytes(tile_amax(torch.empty(shape), tile), torch.zeros(grid_shape(shape, tile)))


def test_tile_amax_of_nan_stays_in_its_tile():
    x = torch.ones(2, 4)
    x[0, 3] = math.nan
    assert tile_amax(x, (1, 2)).isnan().tolist() == [[False, True], [False, False]]


# --- whole weights ---
@formats
@given(case=shaped, seed=st.integers(0, 9), size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]))
def test_quantize_tiled_is_amax_over_max(format, case, seed, size):
    shape, tile = case
    x = randn(*shape, seed=seed) * size
    codes, scale = quantize_tiled(x, format, tile)
    want = naive_amax(x, tile) / FORMATS[format].max
    assert codes.dtype == FORMATS[format].dtype
    assert_same_bytes(scale, torch.where(want > 0, want, torch.ones(())))
    spread = oracle_expand(scale, shape, tile).float()
    assert_same_bytes(codes.view(torch.uint8), quantize(x / spread, format).view(torch.uint8))
    back = dequantize(codes.view(torch.uint8), scale, format, tile, torch.float64)
    step = 2.0 ** -(FORMATS[format].mantissa + 1)  # half a unit of the last place, or half the smallest subnormal
    tiny = 2.0 ** (1 - FORMATS[format].bias) * step
    bound = torch.maximum(x.double().abs() * step, spread.double() * tiny) * (1 + 1e-6)
    assert ((back - x.double()).abs() <= bound).all()


@formats
def test_quantize_tiled_of_zero_tiles(format):
    x = torch.zeros(4, 4)
    x[0, 0] = 2.0
    codes, scale = quantize_tiled(x, format, (2, 2))
    assert_same_bytes(scale, torch.tensor([[2.0 / FORMATS[format].max, 1.0], [1.0, 1.0]]))
    assert codes.float().sum() == FORMATS[format].max


@formats
def test_quantize_tiled_of_denormals_gives_a_normal_scale(format):
    codes, scale = quantize_tiled(torch.full((2, 2), 1e-42), format, (-1, -1))
    assert scale.item() == torch.finfo(torch.float32).tiny
    assert codes.float().isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantize_tiled_refuses_what_is_not_finite(bad):
    x = torch.ones(3, 3)
    x[1, 1] = bad
    with pytest.raises(ValueError, match="the weight holds NaN or infinite values"):
        quantize_tiled(x, E4M3, (1, -1))


def test_quantize_tiled_takes_parameters_of_any_dtype():
    for dtype in FLOATS:
        x = torch.nn.Parameter(randn(4, 6).to(dtype))
        codes, scale = quantize_tiled(x, E4M3, (1, -1))
        assert not scale.requires_grad
        assert codes.shape == (4, 6)


@formats
@given(case=shaped, seed=st.integers(0, 9), dtype=st.sampled_from(FLOATS))
def test_dequantize_is_code_times_scale_rounded_once(format, case, seed, dtype):
    shape, tile = case
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scale = torch.rand(grid_shape(shape, tile), generator=generator) + 0.1
    exact = torch.from_numpy(code_values(format))[codes.long()] * oracle_expand(scale, shape, tile)
    got = dequantize(codes, scale, format, tile, dtype)
    want = exact if dtype == torch.float64 else exact.float().to(dtype)
    assert got.dtype == dtype
    assert torch.equal(got.isnan(), want.isnan())
    assert_same_bytes(got.nan_to_num(7.0), want.nan_to_num(7.0))


# --- inputs ---
def naive_dynamic_scale(x, format, act_tile):
    rows, group = act_tile
    top = FORMATS[format].max
    if rows == -1:
        amax = torch.tensor([max([abs(v) for v in x.flatten().tolist()], default=0.0)]).reshape((1,) * x.dim())
    else:
        width = x.shape[-1] if group == -1 else group
        cells = [x[..., i : i + width] for i in range(0, x.shape[-1], width)]
        amax = torch.stack([cell.abs().amax(-1) for cell in cells], -1)
    return amax.clamp_min(AMAX_FLOOR) / top


@pytest.mark.parametrize("act_tile", [(-1, -1), (1, -1), (1, 4), (1, 3), (1, 100)])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8), (2, 3, 2, 8), (2, 1, 3, 2, 8)])
@pytest.mark.parametrize("format", [E4M3, E5M2Z])
def test_dynamic_scale_of_any_rank(shape, act_tile, format):
    x = randn(*shape)
    assert_same_bytes(dynamic_scale(x, format, act_tile), naive_dynamic_scale(x, format, act_tile))


def test_dynamic_scale_of_a_scalar():
    for act_tile in [(-1, -1), (1, -1)]:
        assert_same_bytes(dynamic_scale(torch.tensor(-3.0), E4M3, act_tile), torch.tensor([3 / 448]))


@pytest.mark.parametrize("act_tile", [(-1, -1), (1, -1), (1, 4)])
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_dynamic_scale_of_an_empty_batch(shape, act_tile):
    want = {(-1, -1): (1,) * len(shape), (1, -1): (*shape[:-1], 1), (1, 4): (*shape[:-1], 2)}[act_tile]
    assert dynamic_scale(torch.empty(shape), E4M3, act_tile).shape == want


def test_dynamic_scale_of_zero_rows_is_the_floor():
    x = torch.zeros(2, 4)
    x[1, 2] = -6.0
    scale = dynamic_scale(x, E4M3, (1, -1))
    assert_same_bytes(scale, torch.tensor([[AMAX_FLOOR], [6.0]]) / 448)
    assert (x / scale).isfinite().all()


def test_dynamic_scale_of_nan_and_inf_stays_in_its_row():
    x = torch.ones(4, 4)
    x[1, 2], x[2, 0] = math.nan, math.inf
    scale = dynamic_scale(x, E4M3, (1, -1)).flatten()
    assert scale[[0, 3]].tolist() == torch.full((2,), 1 / 448).tolist()
    assert scale[1].isnan()
    assert scale[2].isinf()


@pytest.mark.parametrize("dtype", FLOATS)
def test_dynamic_scale_is_float32_and_has_no_gradient(dtype):
    x = randn(3, 8, dtype=dtype).requires_grad_()
    scale = dynamic_scale(x, E4M3, (1, -1))
    assert scale.dtype == torch.float32
    assert not scale.requires_grad


# --- counting ---
@formats
def test_count_nonfinite(format):
    bad = (~np.isfinite(code_values(format))).sum()
    codes = all_codes()
    assert count_nonfinite(codes, format) == bad
    assert count_nonfinite(codes.reshape(4, 8, 8), format) == bad
    assert count_nonfinite(codes.reshape(16, 16).t(), format) == bad
    assert sum(count_nonfinite(code, format) for code in codes.split(1)) == bad
    assert count_nonfinite(codes[:0], format) == 0


@pytest.mark.parametrize("chunk", [1, 7, 100, 1000])
def test_count_nonfinite_in_chunks(chunk):
    codes = torch.tensor([0x7F, 0, 0xFF, 0x7E], dtype=torch.uint8).repeat(25)
    assert count_nonfinite(codes, E4M3, chunk=chunk) == 50
    assert count_nonfinite(codes, E4M3Z, chunk=chunk) == 0


def test_count_nonfinite_reads_no_more_than_a_chunk_at_once(monkeypatch):
    sizes, check = [], codes._is_nonfinite
    monkeypatch.setattr(codes, "_is_nonfinite", lambda part, spec: sizes.append(part.numel()) or check(part, spec))
    count_nonfinite(torch.zeros(10, dtype=torch.uint8), E4M3, chunk=4)
    assert sizes == [4, 4, 2]


def test_every_pair_of_codes_is_multiplied_exactly_in_float32():
    """What the emulation relies on: a product of two codes is exact in float32."""
    for left, right in itertools.product(ORACLES, ORACLES):
        a, b = code_values(left), code_values(right)
        a, b = a[np.isfinite(a)], b[np.isfinite(b)]
        exact = np.outer(a, b)
        assert np.array_equal(exact.astype(np.float32), exact)


# --- packed formats ---
PACKED = {"float4_e2m1fn": 4, "float6_e2m3fn": 6}
packed = pytest.mark.parametrize("format", PACKED)


def packed_values(format):
    """float64 values of the codes of a packed format."""
    raw = np.arange(1 << PACKED[format], dtype=np.uint8)
    return raw.view(getattr(ml_dtypes, format)).astype(np.float64)


def pack_by_hand(codes, format):
    """Little-endian: the first code is in the lowest bits."""
    word = sum(code << i * PACKED[format] for i, code in enumerate(codes))
    return list(word.to_bytes(len(codes) * PACKED[format] // 8, "little"))


@packed
def test_packed_table_agrees_with_ml_dtypes(format):
    spec, info = FORMATS[format], ml_dtypes.finfo(getattr(ml_dtypes, format))
    assert (spec.bits, spec.max, spec.mantissa) == (PACKED[format], float(info.max), info.nmant)
    assert 2.0 ** (1 - spec.bias) == float(info.smallest_normal)
    assert spec.nan_codes == ()


@packed
@given(data=st.data())
def test_unpack(format, data):
    per_word = {4: 2, 6: 4}[PACKED[format]]
    codes = data.draw(st.lists(st.integers(0, (1 << PACKED[format]) - 1), min_size=per_word * 2, max_size=per_word * 2))
    raw = torch.tensor(pack_by_hand(codes, format), dtype=torch.uint8)
    assert unpack(raw, format).tolist() == codes
    assert logical_shape((3, raw.numel()), format) == (3, len(codes))


@packed
@pytest.mark.parametrize("dtype", FLOATS)
def test_packed_decode_is_exact_for_every_code(format, dtype):
    values = packed_values(format)
    raw = torch.tensor(pack_by_hand(list(range(len(values))), format), dtype=torch.uint8).reshape(2, -1)
    got = decode(raw, format, dtype)
    assert got.dtype == dtype
    assert got.double().flatten().tolist() == values.tolist()
    assert torch.equal(torch.signbit(got).flatten(), torch.from_numpy(np.signbit(values)))


@packed
@given(x=hnp.arrays(np.float32, 8, elements=st.floats(-20, 20, width=32)))
@example(x=np.array([0.25, 0.75, -0.25, 2.5, -3.5, 5.0, 1e9, 0.0625], np.float32))
@example(x=np.array([0.0625, 0.1875, 7.25, -7.75, np.inf, -np.inf, -0.0, 3.875], np.float32))
def test_packed_quantize_is_nearest_even_saturating(format, x):
    values = packed_values(format)
    top = FORMATS[format].max
    got = decode(quantize(torch.from_numpy(x), format), format)
    want = np.clip(x, -top, top).astype(getattr(ml_dtypes, format)).astype(np.float64)
    assert got.double().tolist() == want.tolist()
    for value, found in zip(x.tolist(), got.tolist(), strict=True):
        assert abs(found - value) == min(abs(values - value))
    assert round_to_grid(torch.from_numpy(x), format).tolist() == got.tolist()


@packed
def test_packed_codes_are_never_nan(format):
    assert count_nonfinite(torch.arange(256, dtype=torch.uint8), format) == 0


@packed
def test_packed_weights(format):
    x = randn(4, 24)
    raw, scale = quantize_tiled(x, format, (1, 8))
    assert raw.dtype == torch.uint8
    assert logical_shape(raw.shape, format) == (4, 24)
    back = dequantize(raw, scale, format, (1, 8), torch.float32)
    assert back.shape == (4, 24)
    assert ((back - x).abs() <= scale.repeat_interleave(8, 1) * FORMATS[format].max / 6).all()


def test_zero_points_are_taken_off_before_the_scale():
    raw = torch.tensor([[0x38, 0x40, 0x38, 0x40]], dtype=torch.uint8)  # 1 2 1 2
    scale, zero = torch.tensor([[2.0, 10.0]]), torch.tensor([[1.0, -1.0]])
    assert dequantize(raw, scale, E4M3, (1, 2), torch.float32, zero).tolist() == [[0, 2, 20, 30]]


# --- scales of other dtypes ---
def test_decode_e8m0():
    want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    got = decode_e8m0(all_codes())
    assert got.dtype == torch.float32
    assert got[:255].tolist() == want[:255].tolist()
    assert got[255].isnan()


def test_decode_e5m3():
    """Unsigned, 5 exponent bits with bias 15, 3 mantissa bits, 0xFF is NaN."""
    got = decode_e5m3(all_codes())
    for code in range(255):
        exponent, mantissa = divmod(code, 8)
        want = mantissa / 8 * 2.0**-14 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 15)
        assert got[code] == want
    assert got[255].isnan()


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (130, 5), (256, 8), (100, 9)])
def test_unswizzle(rows, columns):
    """Put every scale where cuBLAS's documentation says that it lies, and read it back."""
    want = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
    flat = torch.full((row_tiles * column_tiles * 512,), -1.0)
    for r, c in np.ndindex(rows, columns):
        tile = (r // 128) * column_tiles + c // 4
        flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = want[r, c]
    assert_same_bytes(unswizzle(flat, rows, columns).contiguous(), want)
    assert_same_bytes(unswizzle(flat.reshape(row_tiles * 128, -1), rows, columns).contiguous(), want)


def naive_power_of_two(amax, top, rounding):
    if amax == 0:
        return 2.0**-127
    if rounding == "ceil":
        exponent = math.ceil(math.log2(amax / top) - 1e-12)
    else:
        exponent = math.floor(math.log2(amax)) - math.floor(math.log2(top))
    return 2.0 ** max(-127, min(127, exponent))


@pytest.mark.parametrize("rounding", ["floor", "ceil"])
@pytest.mark.parametrize("format", ["float8_e4m3fn", "float4_e2m1fn", "float6_e2m3fn"])
@given(amax=st.one_of(st.floats(1e-30, 1e30), st.sampled_from([0.0, 1.0, 448.0, 6.0, 7.5, 3.0, 256.0, 2.0**-20])))
def test_power_of_two_scales(rounding, format, amax):
    amax = float(np.float32(amax))
    x = torch.tensor([[amax, -amax / 3, 0.0, 0.0]])
    got = dynamic_scale(x, format, (1, 4), f"e8m0_{rounding}")
    assert got.shape == (1, 1)
    assert got.item() == naive_power_of_two(amax, FORMATS[format].max, rounding)


@pytest.mark.parametrize("kind", ACT_SCALES)
@pytest.mark.parametrize("shape", [(32,), (3, 32), (2, 3, 40)])
def test_every_kind_of_dynamic_scale(kind, shape):
    """Positive, finite, one per group; no value is lost by more than saturating a fifth."""
    x = randn(*shape) * 5
    x[..., :16] = 0
    outer = torch.tensor([0.01]) if kind == "e4m3" else None
    scale = dynamic_scale(x, "float4_e2m1fn", (1, 16), kind, outer)
    assert scale.shape == (*shape[:-1], -(-shape[-1] // 16))
    assert scale.isfinite().all()
    assert (scale > 0).all()
    spread = expand_scale(scale, shape, (1,) * (len(shape) - 1) + (16,))
    back = round_to_grid(x / spread, "float4_e2m1fn") * spread
    amax = expand_scale(tile_amax(x, (1,) * (len(shape) - 1) + (16,)), shape, (1,) * (len(shape) - 1) + (16,))
    assert ((back - x).abs() <= amax / 3 + 1e-12).all()
    assert (back[..., :16] == 0).all()


def test_e4m3_scales_have_two_levels():
    x = torch.tensor([[6.0, 1.0, 0.0, 0.0, 3.0, -1.5, 0.0, 0.0]])
    outer = torch.tensor([0.5])
    got = dynamic_scale(x, "float4_e2m1fn", (1, 4), "e4m3", outer)
    want = oracle_round(torch.tensor([[6.0, 3.0]]) / 6 / 0.5, E4M3) * 0.5
    assert got.double().tolist() == want.tolist()
