"""torch.compile and torch.export of whole loaded models."""

import copy

import pytest
import torch

import anyfp8
from tests.helpers import assert_close
from tests.life.models import CASES, as_dtype, build, call, inputs, output

NO_GRAD = torch.no_grad()


def slow(*values):
    """Tracing takes 10 to 30 seconds for each: with `-m sweep`."""
    return [pytest.param(*[v] if isinstance(v, str) else v, marks=pytest.mark.sweep) for v in values]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, backend="eager"):
    """With one graph for every batch size."""
    return torch.compile(model, fullgraph=True, dynamic=True, backend=backend)


@pytest.mark.parametrize("key", ["vit", *slow("vit-dynamic", "efficientnet", "unet", "llama", "nfnet")])
def test_a_whole_model_is_one_graph_for_any_batch(key, loaded):
    model, name = loaded(key), CASES[key].name
    graph = compiled(model)
    for n in (2, 5):
        assert_close(output(graph, name, n=n), output(model, name, n=n), 1e-6)


@pytest.mark.parametrize("key", slow("vit", "efficientnet"))
def test_a_compiled_model_is_trained(key, loaded):
    model = loaded(key)
    found = []
    for run in (model, compiled(model, "aot_eager")):
        arguments = inputs(key)
        x = arguments["x"].requires_grad_()
        model.zero_grad()
        call(run, arguments).square().mean().backward()
        found.append({"x": x.grad} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, want in found[0].items():
        assert_close(found[1][name], want, 1e-4)


def test_torchs_encoder_compiles(loaded):
    model = loaded("encoder").train()  # in eval mode its fast path is one op
    graph = compiled(model)
    for n in (2, 3):
        x = inputs("encoder", n)["src"].requires_grad_()
        assert_close(graph(x), model(x), 1e-6)


def test_another_backend_after_compiling(loaded):
    model = loaded("vit")
    graph = compiled(model)
    want = output(graph, "vit")
    anyfp8.set_backend(model, "dequantized")
    got = output(graph, "vit")
    assert_close(got, output(model, "vit"), 1e-6)
    assert not torch.allclose(got, want)
    anyfp8.set_backend(graph, "auto")  # through the wrapper
    assert_close(output(graph, "vit"), want, 1e-6)


@pytest.mark.parametrize("place", slow("wrapper", "in place"))
def test_loading_into_a_compiled_model(place, loaded, folder):
    model = build("vit")
    if place == "wrapper":
        graph = compiled(model)
    else:
        model.compile(fullgraph=True, dynamic=True, backend="eager")
        graph = model
    output(graph, "vit")
    anyfp8.load(graph, folder("vit"))
    assert_close(output(graph, "vit"), output(loaded("vit"), "vit"), 1e-6)
    anyfp8.load(graph, folder("vit-dynamic"))
    assert_close(output(graph, "vit"), output(loaded("vit-dynamic"), "vit"), 1e-6)


@pytest.mark.parametrize("place", ["layer", *slow("in place")])
def test_dequantize_of_a_compiled_model(place, loaded):
    model, want = loaded("vit"), output(anyfp8.dequantize(loaded("vit")), "vit")
    graph = model
    if place == "in place":
        model.compile(fullgraph=True, backend="eager")
    else:
        for block in model.blocks:
            block.mlp.fc1.compile(fullgraph=True, backend="eager")
    before = output(graph, "vit")
    anyfp8.dequantize(graph)
    assert_close(output(graph, "vit"), want, 1e-6)
    assert not torch.allclose(before, want)


def test_a_compiled_model_is_saved(loaded, tmp_path):
    model = loaded("vit")
    anyfp8.save(compiled(model), tmp_path / "out")
    assert torch.equal(output(anyfp8.load(build("vit"), tmp_path / "out"), "vit"), output(model, "vit"))


@pytest.mark.sweep
def test_a_copy_of_a_compiled_model(loaded):
    graph = compiled(loaded("vit"))
    want = output(graph, "vit")
    assert torch.equal(output(copy.deepcopy(graph), "vit"), want)


# --- export ---
def batches(arguments):
    """Every tensor's first dimension is the batch."""
    batch = torch.export.Dim("batch", min=2, max=64)
    return {k: {0: batch} if isinstance(v, torch.Tensor) else None for k, v in arguments.items()}


@pytest.mark.parametrize("key", ["vit", *slow("vit-dynamic", "efficientnet", "unet", "nfnet")])
def test_export_for_any_batch(key, loaded, tmp_path):
    model, name = loaded(key), CASES[key].name
    arguments = inputs(name)
    with NO_GRAD:
        exported = torch.export.export(model, (), arguments, dynamic_shapes=batches(arguments))
    for n in (2, 5):
        assert_close(output(exported.module(), name, n=n), output(model, name, n=n), 1e-6)
    codes = [v for n, v in exported.state_dict.items() if n.endswith("weight_codes")]
    assert codes
    assert all(v.dtype == torch.uint8 for v in codes)


@pytest.mark.parametrize("key", slow("vit", "unet"))
def test_an_exported_program_through_a_file(key, loaded, tmp_path):
    model = loaded(key)
    with NO_GRAD:
        exported = torch.export.export(model, (), inputs(key))
    torch.export.save(exported, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2")
    assert_close(output(again.module(), key), output(model, key), 1e-6)


@pytest.mark.sweep
def test_export_of_a_cast_model(loaded):
    model, arguments = loaded("vit").bfloat16(), as_dtype(inputs("vit"), torch.bfloat16)
    with NO_GRAD:
        exported = torch.export.export(model, (), arguments)
        assert_close(exported.module()(**arguments).float(), model(**arguments).float(), 1e-6)
