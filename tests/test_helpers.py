"""The helpers themselves: each comparison must be able to fail."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import (
    E4M3,
    ORACLES,
    assert_close,
    assert_same_bytes,
    code_values,
    float_linear,
    make_fp8,
    max_relative_error,
    oracle_codes,
    oracle_expand,
    oracle_forward,
    randn,
    sqnr,
    write_tensors,
)


def test_same_bytes_accepts_equal_nan_bytes_and_other_strides():
    x = torch.tensor([[1.0, math.nan], [-0.0, 3.0]])
    assert_same_bytes(x.t().contiguous().t(), x)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (torch.tensor([1.0, 0.0]), "bytes differ"),
        (torch.tensor([1.0, -0.0], dtype=torch.float64), "torch.float64 is not"),
        (torch.tensor([[1.0, -0.0]]), r"\(1, 2\) is not \(2,\)"),
    ],
)
def test_same_bytes_fails(got, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_bytes(got, torch.tensor([1.0, -0.0]))


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ([1.0, 2.0 + 1e-3], "max relative error 0.0005"),
        ([1.0, math.nan], "not finite"),
        ([1.0], "is not"),
        ([2.0, 4.0], "max relative error 1"),  # a wrong scale, which cosine similarity can't see
    ],
)
def test_close_fails(got, message):
    assert_close(torch.tensor([1.0, 2.0 + 1e-7]), torch.tensor([1.0, 2.0]))
    with pytest.raises(AssertionError, match=message):
        assert_close(torch.tensor(got), torch.tensor([1.0, 2.0]))


def test_errors_of_zero_and_empty():
    assert max_relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert max_relative_error(torch.ones(2), torch.zeros(2)) == 2
    assert max_relative_error(torch.zeros(0), torch.zeros(0)) == 0


def test_sqnr_sees_a_wrong_scale():
    x = randn(100)
    assert sqnr(x, x) == math.inf
    assert sqnr(x * 1.1, x) == pytest.approx(20, abs=1e-3)
    assert sqnr(x * 2, x) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("format", ORACLES)
def test_oracle_agrees_with_ml_dtypes(format):
    """Two independent roundings, inside the finite range; the scan of all midpoints is where they could differ."""
    values = code_values(format)
    grid = np.unique(values[np.isfinite(values)])
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, (grid[1:] * 3 + grid[:-1]) / 4])
    want = points.astype(getattr(ml_dtypes, format)).astype(np.float64)
    got = values[oracle_codes(points, format).numpy()]
    assert np.array_equal(got, want)
    assert not np.array_equal(values[oracle_codes(points * 1.5, format).numpy()], want)


def test_oracle_expand_clips_edge_tiles():
    assert oracle_expand(torch.tensor([[1.0, 2.0]]), (1, 3), (-1, 2)).tolist() == [[1, 1, 2]]
    scale = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
    assert oracle_expand(scale, (3, 2, 2), (2, 1, -1)).tolist() == [[[1, 1], [2, 2]]] * 2 + [[[3, 3], [4, 4]]]


def test_oracle_forward_by_hand():
    layer = make_fp8(float_linear(2, 1), "FP8", input_scale=0.5)
    layer.weight_codes.copy_(torch.tensor([[0x38, 0x40]], dtype=torch.uint8))  # 1 and 2
    layer.weight_scale.fill_(3.0)
    layer.bias.data.fill_(0.25)
    # 1.03 / 0.5 = 2.06 → 2; 500 / 0.5 = 1000 → 448
    assert oracle_forward(layer, torch.tensor([1.03, 500.0])).item() == 3 * (1 * 2 * 0.5 + 2 * 448 * 0.5) + 0.25


def test_written_file_is_what_safetensors_reads(tmp_path):
    tensors = {"a": randn(2, 3), "b": randn(4).to(getattr(torch, E4M3)), "c": torch.zeros(0, 3)}
    read = load_file(write_tensors(tmp_path / "x.safetensors", tensors, {"format": "pt"}))
    for name, tensor in tensors.items():
        assert_same_bytes(read[name], tensor)
