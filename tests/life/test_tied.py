"""Tied weights of a loaded model: one set of codes under several names."""

import copy

import pytest
import torch
from safetensors.torch import load_file

import anyfp8
from tests.life.models import CASES, E4M3, assert_same_codes, build, fp8_layers, output, quantized, stored
from tests.life.test_copies import COPIES

TIED = ["encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]


def tied_t5():
    """T5 from a file that has the table once: encoder, decoder and head share its codes."""
    state = {k: v for k, v in build("t5").state_dict().items() if k.removesuffix(".weight") not in TIED}
    tensors = {k: v.to(E4M3) if v.dim() > 1 else v for k, v in state.items()}
    return anyfp8.load(build("t5"), tensors, dialect="bare")


def tables(model):
    return [model.get_submodule(name) for name in ("shared", *TIED)]


@pytest.mark.parametrize("how", COPIES)
def test_what_is_tied_stays_tied(how, tmp_path):
    """One set of codes under all names, also after a cast, a copy, and in a file."""
    model = tied_t5()
    twin = COPIES[how](model).half().float()
    for net, path in ((model, tmp_path / "a"), (twin, tmp_path / "b")):
        assert [type(m).__name__ for m in tables(net)] == ["FP8Embedding"] * 3 + ["FP8Linear"]
        assert len({m.weight_codes.data_ptr() for m in tables(net)}) == 1
        anyfp8.save(net, path)
    sizes = [(tmp_path / p / "model.safetensors").stat().st_size for p in "ab"]
    assert sizes[0] == sizes[1]
    again = anyfp8.load(build("t5"), tmp_path / "b")
    assert len({m.weight_codes.data_ptr() for m in tables(again)}) == 1
    assert torch.equal(output(again, "t5"), output(twin, "t5"))


MOVES = {
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "clone": lambda m: m._apply(lambda t: t.clone()),  # as a move to another device
    "double": lambda m: m.double(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_moves_keep_ties(move):
    """As they do for the parameters of a float model; else a tied table would be on the GPU four times."""
    plain, model = move(build("t5")), move(tied_t5())
    assert len({m.weight.data_ptr() for m in tables(plain)}) == 1
    assert len({m.weight_codes.data_ptr() for m in tables(model)}) == 1


def test_tied_weights_that_are_quantized_here_stay_tied(folder):
    """`save` writes tied tensors once, so `quantize` must not make four tables of one."""
    model = quantized(CASES["t5"])
    assert len({m.weight_codes.data_ptr() for m in tables(model)}) == 1
    names = [n for n in load_file(folder("t5") / "model.safetensors") if n.removesuffix(".weight") in ("shared", *TIED)]
    assert len(names) == 1


def test_dequantized_copies_are_tied_and_independent():
    model = tied_t5()
    want = output(model, "t5")
    twin = anyfp8.dequantize(copy.deepcopy(model))
    assert not fp8_layers(twin)
    assert len({id(m.weight) for m in tables(twin)}) == 1
    assert len(fp8_layers(model)) > 4
    assert torch.equal(output(model, "t5"), want)
    assert torch.equal(output(twin, "t5"), want)  # bare: weight-only


def test_tie_weights_of_transformers_finds_no_parameter():
    """It looks for parameters by name; a table that is codes is none. Nothing may be half done by then."""
    model = tied_t5()
    before, want = stored(model), output(model, "t5")
    with pytest.raises(AttributeError, match=r"shared\.weight. is neither a parameter, buffer"):
        model.tie_weights()
    assert_same_codes(model, before)
    assert torch.equal(output(model, "t5"), want)
