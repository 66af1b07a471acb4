import pytest
import torch
from torch import nn

from anyfp8 import FP8Embedding, QuantizationScheme
from anyfp8.layers import embedding as module_under_test
from tests.helpers import ORACLES, assert_same_bytes, make_fp8, oracle_weight

TILES = [(-1, -1), (1, -1), (-1, 4), (1, 4), (4, 4), (3, 5), (7, -1), (100, 100)]
INDICES = {
    "scalar": torch.tensor(3),
    "1-D": torch.tensor([0, 9, 3, 3]),
    "2-D": torch.tensor([[1, 2], [8, 0]]),
    "3-D": torch.arange(8).reshape(2, 2, 2),
    "int32": torch.tensor([1, 5], dtype=torch.int32),
    "strided": torch.arange(10)[::3],
    "empty": torch.empty(0, dtype=torch.int64),
    "empty 2-D": torch.empty(2, 0, dtype=torch.int64),
}


def table(tile=(1, -1), dtype=torch.float32, weight_dtype="float8_e4m3fn", **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make_fp8(nn.Embedding(10, 8, **options).to(dtype), QuantizationScheme(weight_dtype, tile))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_rows_are_those_of_the_decoded_table(tile, index):
    layer = table(tile)
    got = layer(index)
    assert got.shape == (*index.shape, 8)
    assert_same_bytes(got, oracle_weight(layer).float()[index.long()])
    assert_same_bytes(got, layer.weight.clone()[index.long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", ORACLES)
def test_output_is_in_the_compute_dtype(dtype, weight_dtype):
    layer = table(dtype=dtype, weight_dtype=weight_dtype)
    got = layer(torch.arange(10))
    assert got.dtype == dtype
    assert_same_bytes(got, layer.weight.clone())
    layer.half()
    assert layer(torch.arange(10)).dtype == torch.float16


def test_is_an_embedding():
    layer = table(padding_idx=2)
    assert isinstance(layer, nn.Embedding)
    assert type(layer) is FP8Embedding
    assert (layer.num_embeddings, layer.embedding_dim, layer.padding_idx) == (10, 8, 2)
    assert list(layer.parameters()) == []


def test_padding_row_is_a_row_like_any_other():
    layer = table(padding_idx=2)
    assert layer(torch.tensor([2])).abs().sum() == 0  # nn.Embedding initialises it to zero


@pytest.mark.parametrize("tile", TILES)
def test_only_the_rows_that_are_looked_up_are_decoded(monkeypatch, tile):
    layer = table(tile)
    decode, sizes = module_under_test.decode, []
    monkeypatch.setattr(
        module_under_test, "decode", lambda codes, *rest: sizes.append(codes.numel()) or decode(codes, *rest)
    )
    layer(torch.tensor([[1, 2, 2]]))
    assert sizes == [3 * 8]


def test_output_needs_no_gradient_and_is_fresh_memory():
    layer = table()
    got = layer(torch.tensor([1, 1]))
    assert not got.requires_grad
    codes = layer.weight_codes.clone()
    got[0] = 7
    assert (got[1] != 7).all()
    assert_same_bytes(layer.weight_codes, codes)


@pytest.mark.parametrize("index", [torch.tensor([10]), torch.tensor([0, 1000]), torch.tensor([-1]), torch.tensor([-3])])
def test_indices_out_of_range(index):
    """As in nn.Embedding: −1 (or a loss's ignore index) is an error, not the last row."""
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        nn.Embedding(10, 8)(index)
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        table()(index)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.int16])
def test_indices_of_another_dtype(dtype):
    """A mask would select rows instead of looking them up."""
    index = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0, 0, 1]).to(dtype)
    for layer in (nn.Embedding(10, 8), table()):
        with pytest.raises((RuntimeError, IndexError), match=r"[Ii]nd(ices|ex)"):
            layer(index)


def test_set_backend_leaves_embeddings_alone():
    layer = table()
    want = layer(torch.arange(10))
    layer.select_backend("dequantized")
    assert_same_bytes(layer(torch.arange(10)), want)


def test_functional_call():
    layer = table()
    index = torch.arange(10)
    doubled = torch.func.functional_call(layer, {"weight_scale": layer.weight_scale * 2}, (index,))
    assert_same_bytes(doubled, layer(index) * 2)


def test_autocast_leaves_embeddings_alone():
    layer = table()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.arange(3)).dtype == nn.Embedding(10, 8)(torch.arange(3)).dtype == torch.float32
