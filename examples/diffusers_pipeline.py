"""Train a small diffusers model on real digits, quantize it to static FP8, save, load from meta, compare the samples.

    pip install anyfp8[diffusers,plots] scikit-learn

    python examples/diffusers_pipeline.py                 # a UNet; some minutes on 2 cores, most of them for training
    python examples/diffusers_pipeline.py --scheme FP8_DYNAMIC        # the trained model is kept and used again
    python examples/diffusers_pipeline.py --model dit --out results/dit --results-format json

The model (see diffusers_assets.py) learns to draw the digit it is asked for, from the 8 x 8 scans that scikit-learn
holds. Float and FP8 start from the same noise, so that their samples can be put side by side: PSNR, and how many of
them a classifier of real digits reads as what was asked for. Two rows show what these numbers are worth: real digits,
and the model before training. The folder --out then holds both pipelines, the results, and the samples as one picture.
"""

from __future__ import annotations

import csv
import json
import time
from math import inf, isfinite, log10
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

import anyfp8

try:
    from diffusers.utils.logging import disable_progress_bar
    from diffusers_assets import MODELS, DigitsPipeline, build, float_pipeline, real_digits
    from matplotlib.figure import Figure
    from sklearn.svm import SVC
except ImportError as error:
    raise SystemExit(f"{error}: pip install anyfp8[diffusers,plots] scikit-learn") from None

#: what the results file holds, and how the table calls it
COLUMNS = {
    "model": "model",
    "format": "format",
    "n": "n",
    "accuracy": "class %",
    "agreement": "agree %",
    "psnr_db": "PSNR dB",
    "disk_mb": "disk MB",
    "seconds": "sampling s",
}
LEGEND = "class %: read by a classifier of real digits as what was asked for; agree %, PSNR: compared with float32."
SHOWN = 12  # samples of each class in the picture


# --- FP8 ---


def save_fp8(pipeline: DigitsPipeline, folder: Path) -> None:
    """Write a pipeline with an FP8 denoiser as diffusers lays pipelines out, anyfp8's files in the place of weights."""
    if (folder / "denoiser" / "anyfp8.json").exists():  # ours, and anyfp8.save replaces only files that it wrote itself
        (folder / "denoiser" / "config.json").unlink(missing_ok=True)
    anyfp8.save(pipeline.denoiser, folder / "denoiser")
    pipeline.denoiser.save_config(folder / "denoiser")
    pipeline.scheduler.save_pretrained(folder / "scheduler")
    pipeline.save_config(folder)


def load_fp8(name: str, folder: Path) -> DigitsPipeline:
    """The pipeline that `save_fp8` wrote. The denoiser is built on meta: its float weights never exist."""
    model_type, _ = MODELS[name]
    with torch.device("meta"):
        denoiser = model_type.from_config(model_type.load_config(folder / "denoiser"))
    anyfp8.load(denoiser, folder / "denoiser").eval()
    pipeline: DigitsPipeline = DigitsPipeline.from_pretrained(folder, denoiser=denoiser)
    return pipeline


# --- comparison ---


def psnr(samples: Tensor, reference: Tensor) -> float:
    """Peak signal to noise ratio in dB, for values between -1 and 1."""
    error = float((samples.double() - reference.double()).square().mean())
    return 10 * log10(2**2 / error) if error else inf


def compare(
    name: str,
    out: Path,
    *,
    scheme: str = "FP8_STATIC",
    steps: int = 1000,
    batch_size: int = 32,
    seed: int = 0,
    num_per_class: int = 40,
    inference_steps: int = 25,
    retrain: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Train (or reuse), quantize, save, load, sample: rows with the keys of COLUMNS, and the samples by format."""
    train_set, test_set = real_digits()
    classifier = SVC(gamma=0.064, C=10).fit(train_set.images.flatten(1).numpy(), train_set.labels.numpy())
    labels = torch.arange(10).repeat_interleave(num_per_class)

    def predict(images: Tensor) -> Tensor:
        return torch.from_numpy(classifier.predict(images.flatten(1).numpy()))

    pipeline = float_pipeline(name, train_set, out / "float", retrain, steps=steps, batch_size=batch_size, seed=seed)
    torch.manual_seed(seed)
    untrained = DigitsPipeline(build(name), pipeline.scheduler)
    samples, seconds = {}, {}
    for title, source in (("untrained", untrained), ("float32", pipeline)):
        start = time.perf_counter()
        samples[title] = source(labels, seed, inference_steps)
        seconds[title] = time.perf_counter() - start

    calibrating = torch.arange(10).repeat_interleave(min(10, num_per_class))
    anyfp8.quantize(
        pipeline.denoiser,
        scheme,
        calibration=lambda _: pipeline(calibrating, seed + 1, inference_steps),  # other noise than is compared
    )
    save_fp8(pipeline, out / "fp8")
    loaded = load_fp8(name, out / "fp8")
    start = time.perf_counter()
    samples[scheme] = loaded(labels, seed, inference_steps)
    seconds[scheme] = time.perf_counter() - start
    click.echo(anyfp8.report(loaded.denoiser))
    check_same(pipeline, samples[scheme], labels, seed, inference_steps)

    read, wanted = predict(samples["float32"]), dict.fromkeys(samples, labels) | {"real": test_set.labels}
    disk = {"float32": size_mb(out / "float" / "denoiser"), scheme: size_mb(out / "fp8" / "denoiser")}
    table = []
    for title, images in {"real": test_set.images, **samples}.items():
        found, compared = predict(images), title in ("untrained", scheme)
        row = {
            "model": name,
            "format": title,
            "n": len(images),
            "accuracy": 100 * float((found == wanted[title]).double().mean()),
            "agreement": 100 * float((found == read).double().mean()) if compared else None,
            "psnr_db": psnr(images, samples["float32"]) if compared else None,
            "disk_mb": disk.get(title),
            "seconds": seconds.get(title),
        }
        numbers = {key: round(v, 3) if isfinite(v) else None for key, v in row.items() if isinstance(v, float)}
        table.append(row | numbers)
    return table, samples


def check_same(quantized: DigitsPipeline, samples: Tensor, labels: Tensor, seed: int, inference_steps: int) -> None:
    """Raises click.ClickException unless the samples of what was loaded are, bit for bit, those of what was saved."""
    again = quantized(labels, seed, inference_steps)
    if not torch.equal(samples, again):
        distance = float((samples - again).abs().max())
        raise click.ClickException(f"the loaded model samples other than the quantized one, by up to {distance:.3g}")
    click.echo("The loaded model's samples are those of the quantized one, bit for bit.")


def size_mb(folder: Path) -> float:
    """What the files in a folder take, in MB (1e6 bytes)."""
    return sum(f.stat().st_size for f in folder.iterdir()) / 1e6


# --- results ---


def table_text(table: list[dict[str, Any]]) -> str:
    """The rows as aligned text."""
    lines = [list(COLUMNS.values())]
    for row in table:
        lines.append(
            ["-" if (v := row[key]) is None else f"{v:.1f}" if isinstance(v, float) else str(v) for key in COLUMNS]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = [key in ("model", "format") for key in COLUMNS]
    padded = [[(c.ljust if at else c.rjust)(w) for c, w, at in zip(line, widths, left, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def write_results(table: list[dict[str, Any]], file: Path) -> None:
    """The rows as JSON or CSV, as the file's name ends."""
    with file.open("w", newline="") as stream:
        if file.suffix == ".json":
            json.dump(table, stream, indent=2)
            return
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(table)


def draw(table: list[dict[str, Any]], samples: dict[str, Tensor], file: Path) -> None:
    """The first samples of each class as one picture of 1200 x 560 pixels: float on the left, FP8 on the right."""
    figure = Figure(figsize=(12, 5.6), dpi=100, layout="constrained")
    figure.suptitle(f"{table[0]['model']}: digits drawn from the same noise, one row for each class")
    rows = [row for row in table if row["format"] not in ("real", "untrained")]
    for axes, row in zip(figure.subplots(1, 2), rows, strict=True):
        tiles = nn.functional.pad(samples[row["format"]].unflatten(0, (10, -1))[:, :SHOWN, 0], (1, 1, 1, 1), value=-1)
        axes.imshow(tiles.transpose(1, 2).flatten(2).flatten(0, 1).numpy(), cmap="gray_r", vmin=-1, vmax=1)
        axes.set_yticks([10 * digit + 4.5 for digit in range(10)], range(10))
        axes.set_xticks([])
        distance = "" if row["psnr_db"] is None else f", {row['psnr_db']:.1f} dB PSNR"
        axes.set_title(f"{row['format']}: {row['accuracy']:.1f} % as asked for, {row['disk_mb']:.2f} MB{distance}")
    figure.savefig(file)


# --- command line ---


def checked(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """A callback: a usage error for a scheme that anyfp8 doesn't know."""
    try:
        anyfp8.QuantizationScheme.from_preset(value)
    except anyfp8.AnyFP8Error as error:
        raise click.BadParameter(str(error)) from None
    return value.upper()


@click.command(context_settings={"show_default": True})
@click.option("-m", "--model", type=click.Choice(list(MODELS)), default="unet", help="What to train.")
@click.option("--steps", type=click.IntRange(2), default=1000, help="Training steps.")
@click.option("-b", "--batch-size", type=click.IntRange(1), default=32, help="Digits in a training step.")
@click.option("--retrain", is_flag=True, help="Train, even if an earlier run has left a trained model in --out.")
@click.option("--scheme", default="FP8_STATIC", callback=checked, help="Preset of anyfp8.")
@click.option("--num-per-class", type=click.IntRange(1), default=40, help="Samples of each of the ten classes.")
@click.option("--inference-steps", type=click.IntRange(1, 1000), default=25, help="Denoising steps of a sample.")
@click.option("--seed", type=int, default=0, help="Of training and of the noise that samples start from.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="[default: results/diffusers/MODEL]")
@click.option("--results-format", type=click.Choice(["csv", "json"]), default="csv")
def main(model: str, out: Path | None, results_format: str, **options: Any) -> None:
    """Sample digits from a diffusers pipeline in float and in FP8, side by side: PSNR, class accuracy, size."""
    start = time.perf_counter()
    disable_progress_bar()  # of loading a pipeline
    torch.set_num_threads(1)  # the tensors are so small that threads would mostly wait for each other
    out = out or Path("results", "diffusers", model)
    try:
        table, samples = compare(model, out, **options)
    except anyfp8.AnyFP8Error as error:
        raise click.ClickException(str(error)) from None
    write_results(table, out / f"results.{results_format}")
    draw(table, samples, out / "samples.png")
    click.echo(
        f"\n{table_text(table)}\n{LEGEND}\n\nTotal: {time.perf_counter() - start:.0f} s. Everything is in {out}."
    )


if __name__ == "__main__":
    main()
