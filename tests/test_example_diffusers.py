"""examples/diffusers_pipeline.py, with diffusers_assets.py beside it."""

import csv
import importlib.util
import json
import math
import runpy
import shutil
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import anyfp8
from tests.helpers import assert_same_bytes, randn

missing = [
    name for name in ("diffusers", "accelerate", "sklearn", "matplotlib") if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
EXAMPLES = Path(__file__).parent.parent / "examples"
LABELS = torch.arange(10)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example, imported as the script imports its assets; what matplotlib caches goes to a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        import diffusers_pipeline

        yield diffusers_pipeline


@pytest.fixture(scope="module")
def assets(example):
    import diffusers_assets

    return diffusers_assets


@pytest.fixture(scope="module")
def finished(example, tmp_path_factory):
    """The folder and the output of a short run of the command."""
    out = tmp_path_factory.mktemp("run") / "unet"
    return out, command(example, out)


def command(example, out, *more):
    arguments = ["--steps", 30, "-b", 16, "--num-per-class", 4, "--inference-steps", 5, "--seed", 1, "--out", out]
    done = CliRunner().invoke(example.main, list(map(str, [*arguments, *more])), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


# --- the command ---
def test_fp8_stays_near_float_at_a_quarter_of_the_size(example, finished):
    out, output = finished
    with (out / "results.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert tuple(rows[0]) == tuple(example.COLUMNS)
    assert [(row["format"], row["n"]) for row in rows] == [
        ("real", "599"),
        ("untrained", "40"),
        ("float32", "40"),
        ("FP8_STATIC", "40"),
    ]
    real, untrained, full, fp8 = rows
    assert float(real["accuracy"]) > 95  # otherwise the classifier says nothing about samples
    assert float(fp8["psnr_db"]) > 30  # 37; if one layer's scale is wrong by a factor of 2: 20
    assert float(fp8["psnr_db"]) > float(untrained["psnr_db"]) + 10
    assert float(fp8["agreement"]) >= 80
    assert abs(float(fp8["accuracy"]) - float(full["accuracy"])) <= 20
    assert (full["psnr_db"], real["psnr_db"], real["disk_mb"], untrained["disk_mb"]) == ("", "", "", "")
    assert 0.25 < float(fp8["disk_mb"]) / float(full["disk_mb"]) < 0.3
    assert float(fp8["seconds"]) > 0
    assert "bit for bit" in output
    assert "51 FP8 layers" in output
    assert "trained on 1198 digits, 30 steps" in output


def test_the_picture_shows_both_grids(example, finished):
    from matplotlib.image import imread

    picture = imread(finished[0] / "samples.png")
    assert picture.shape == (560, 1200, 4)
    left, right = picture[100:-20, 40:580, 0], picture[100:-20, 640:1180, 0]
    for half in (left, right):  # paper and ink
        assert half.min() < 0.3
        assert half.max() == 1
        assert half.std() > 0.1
    assert (left != right).any()


def test_the_folder_holds_the_pipeline_that_quantizing_the_float_one_gives(example, assets, finished):
    pipeline = assets.DigitsPipeline.from_pretrained(finished[0] / "float")
    full, labels = pipeline(LABELS, 1, 5), LABELS.repeat_interleave(4)
    anyfp8.quantize(pipeline.denoiser, calibration=lambda _: pipeline(labels, 2, 5))
    loaded = example.load_fp8("unet", finished[0] / "fp8")
    assert type(loaded) is assets.DigitsPipeline
    assert_same_bytes(loaded(LABELS, 1, 5), pipeline(LABELS, 1, 5))
    assert not torch.equal(loaded(LABELS, 1, 5), full)


def test_a_trained_model_is_used_again_unless_settings_differ(assets, tmp_path, monkeypatch):
    trained = []

    def train(name, digits, **settings):
        trained.append((name, settings["steps"]))
        return assets.DigitsPipeline(assets.build(name), assets.diffusers.DDIMScheduler())

    monkeypatch.setattr(assets, "train", train)
    digits, _ = assets.real_digits()
    for name, steps, retrain in (
        ("unet", 2, 0),
        ("unet", 2, 0),
        ("unet", 2, 1),
        ("unet", 3, 0),
        ("dit", 3, 0),
        ("dit", 3, 0),
    ):
        pipeline = assets.float_pipeline(name, digits, tmp_path, retrain, steps=steps)
        assert type(pipeline.denoiser) is assets.MODELS[name][0]
        assert not pipeline.denoiser.training
    assert trained == [("unet", 2), ("unet", 2), ("unet", 3), ("dit", 3)]


def test_another_scheme_and_format_with_the_model_of_an_earlier_run(example, finished, tmp_path):
    shutil.copytree(finished[0] / "float", tmp_path / "float")
    output = command(example, tmp_path, "--scheme", "fp8_dynamic", "--results-format", "json", "--num-per-class", 1)
    assert "trained by an earlier run" in output
    rows = json.loads((tmp_path / "results.json").read_text())
    assert tuple(rows[0]) == tuple(example.COLUMNS)
    assert [(row["format"], row["n"]) for row in rows][2:] == [("float32", 10), ("FP8_DYNAMIC", 10)]
    assert rows[3]["psnr_db"] > 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "FP9"], "unknown preset 'FP9'"),
        (["--model", "vae"], "'vae' is not one of"),
        (["--steps", 1], "1 is not"),
    ],
)
def test_wrong_options_are_usage_errors(example, arguments, message):
    done = CliRunner().invoke(example.main, list(map(str, arguments)))
    assert done.exit_code == 2
    assert message in done.output


def test_a_folder_with_somebodys_files_is_not_touched(example, tmp_path):
    foreign = tmp_path / "fp8" / "denoiser" / "config.json"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine")
    arguments = ["--steps", "2", "-b", "2", "--num-per-class", "1", "--inference-steps", "1", "--out", str(tmp_path)]
    done = CliRunner().invoke(example.main, arguments)
    assert done.exit_code == 1
    assert "holds other files (config.json)" in done.output
    assert foreign.read_text() == "mine"


def test_without_a_package_it_says_what_to_install(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setitem(sys.modules, "sklearn.svm", None)
    with pytest.raises(SystemExit, match=r"sklearn\.svm.*: pip install anyfp8\[diffusers,plots\] scikit-learn"):
        runpy.run_path(str(EXAMPLES / "diffusers_pipeline.py"))


# --- its parts ---
def test_a_dit_loads_from_meta_bit_for_bit(example, assets, tmp_path):
    digits, _ = assets.real_digits()
    pipeline = assets.train("dit", digits, steps=3, batch_size=4, seed=0)
    full = pipeline(LABELS, 0, 3)
    anyfp8.quantize(pipeline.denoiser, calibration=lambda _: pipeline(LABELS, 1, 3))
    example.save_fp8(pipeline, tmp_path / "fp8")
    example.save_fp8(pipeline, tmp_path / "fp8")  # its own folder is replaced
    loaded = example.load_fp8("dit", tmp_path / "fp8")
    tensors = dict(loaded.denoiser.named_parameters()) | dict(loaded.denoiser.named_buffers())
    assert not [n for n, t in tensors.items() if t.is_meta]
    for n, tensor in (*pipeline.denoiser.named_parameters(), *pipeline.denoiser.named_buffers()):
        assert_same_bytes(tensors[n], tensor)
    assert len(anyfp8.report(loaded.denoiser).layers) == 39
    assert_same_bytes(loaded(LABELS, 0, 3), pipeline(LABELS, 0, 3))
    assert 20 < example.psnr(loaded(LABELS, 0, 3), full) < 80


def test_the_check_after_loading_sees_one_changed_number(example, assets):
    pipeline = assets.DigitsPipeline(assets.build("unet"), assets.diffusers.DDIMScheduler())
    anyfp8.quantize(pipeline.denoiser, calibration=lambda _: pipeline(LABELS, 1, 2))
    samples = pipeline(LABELS, 0, 2)
    example.check_same(pipeline, samples, LABELS, 0, 2)
    with torch.no_grad():
        pipeline.denoiser.conv_out.bias += 1e-3
    with pytest.raises(click.ClickException, match=r"samples other than the quantized one, by up to 0\.00"):
        example.check_same(pipeline, samples, LABELS, 0, 2)


def test_psnr_is_over_a_range_of_two(example):
    reference = randn(3, 1, 8, 8).clamp(-1, 1)
    assert example.psnr(reference + 0.02, reference) == pytest.approx(40, abs=1e-3)
    assert example.psnr(reference, reference) == math.inf


def test_the_same_seed_draws_the_same_and_labels_matter(assets):
    torch.manual_seed(0)
    pipeline = assets.DigitsPipeline(assets.build("unet"), assets.diffusers.DDIMScheduler())
    first = pipeline(LABELS, 0, 2)
    assert_same_bytes(pipeline(LABELS, 0, 2), first)
    assert not torch.equal(pipeline(LABELS, 1, 2), first)
    assert not torch.equal(pipeline(LABELS.flip(0), 0, 2), first)
    assert float(first.abs().max()) <= 1
