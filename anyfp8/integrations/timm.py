"""timm: models by name with weights from any checkpoint that anyfp8 reads, and what FP8 does to their accuracy."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from anyfp8.load import Source, load
from anyfp8.naming import Rename


def create_model(
    model_name: str,
    checkpoint_path: Source,
    *,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    dialect: str | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    progress: bool | None = None,
    revision: str | None = None,
    subfolder: str = "",
    token: str | None = None,
    **kwargs: Any,
) -> nn.Module:
    """A timm model with the weights of a checkpoint, FP8 or float, in eval mode.

    The model is built on the meta device, so its float weights never exist: memory holds the checkpoint's bytes.

    model_name: any name that `timm.create_model` knows, also `hf-hub:...` and `local-dir:...`.
    checkpoint_path: the `source` of `anyfp8.load`: a folder, a `.safetensors` file, a hub id, a mapping of tensors.
    kwargs: go to `timm.create_model` (num_classes, img_size, in_chans, global_pool ...); the other arguments are those
        of `anyfp8.load`, which also says what is raised.

    Needs timm (`pip install anyfp8[timm]`).

    >>> import anyfp8, timm, torch
    >>> from anyfp8.integrations.timm import create_model
    >>> model = anyfp8.quantize(timm.create_model("test_vit").eval(), calibration=torch.randn(2, 3, 160, 160))
    >>> anyfp8.save(model, folder / "fp8")
    >>> type(create_model("test_vit", folder / "fp8").head).__name__
    'FP8Linear'
    """
    import timm

    with torch.device("meta"):
        model: nn.Module = timm.create_model(model_name, pretrained=False, **kwargs)
    return load(
        model,
        checkpoint_path,
        dialect=dialect,
        backend=backend,
        dtype=dtype,
        device=device,
        include=include,
        exclude=exclude,
        rename=rename,
        strict=strict,
        progress=progress,
        revision=revision,
        subfolder=subfolder,
        token=token,
    ).eval()


@dataclass(frozen=True)
class Evaluation:
    """What a classifier said about labelled images.

    logits: float32 [n, classes], on the CPU. targets: int64 [n]. seconds: in the model, data loading not included.
    Shares are between 0 and 1. An image with NaN or infinite logits counts as wrong and agrees with nothing.
    """

    logits: Tensor
    targets: Tensor
    seconds: float

    def topk(self, k: int = 1) -> float:
        """Share of images whose target is among the k largest logits."""
        best = self.logits.topk(min(k, self.logits.shape[1]), dim=1).indices
        return _share((best == self.targets[:, None]).any(1) & _finite(self.logits))

    def agreement(self, other: Evaluation) -> float:
        """Share of images for which both predict the same class, right or wrong."""
        self._same_images(other)
        finite = _finite(self.logits) & _finite(other.logits)
        return _share((self.logits.argmax(1) == other.logits.argmax(1)) & finite)

    def sqnr(self, reference: Evaluation) -> float:
        """Signal to quantization noise of the logits in dB, 10·log10(Σ reference² / Σ (self − reference)²)."""
        self._same_images(reference)
        noise = (self.logits.double() - reference.logits.double()).square().sum()
        return float(10 * torch.log10(reference.logits.double().square().sum() / noise))

    def _same_images(self, other: Evaluation) -> None:
        if self.logits.shape != other.logits.shape:
            shapes = f"{list(self.logits.shape)} and {list(other.logits.shape)}"
            raise ValueError(f"the evaluations are of different images or classes: logits {shapes}")
        if not torch.equal(self.targets, other.targets):
            raise ValueError("the evaluations are of different images, or in another order: their targets differ")


def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    amp_dtype: torch.dtype | None = None,
    progress: bool | None = None,
) -> Evaluation:
    """Run a classifier over labelled images; the model goes to eval mode and stays where it is.

    batches: (images [b, c, h, w], targets [b]), for example a DataLoader or timm's `create_loader`.
    amp_dtype: run under autocast in this dtype. progress: a bar over batches; None: only on a terminal.

    Raises ValueError if there are no batches.
    """
    from tqdm.auto import tqdm

    model.eval()
    device = next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))
    logits: list[Tensor] = []
    targets: list[Tensor] = []
    seconds = 0.0
    autocast = torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None)
    disable = None if progress is None else not progress
    with torch.inference_mode(), autocast:
        for images, labels in tqdm(batches, desc="Evaluating", unit="batch", disable=disable, leave=False):
            images = images.to(device)
            start = time.perf_counter()
            logits.append(model(images).float().cpu())  # .cpu() waits for the device
            seconds += time.perf_counter() - start
            targets.append(labels.cpu())
    if not logits:
        raise ValueError("there are no batches to evaluate")
    return Evaluation(torch.cat(logits), torch.cat(targets), seconds)


def _finite(logits: Tensor) -> Tensor:
    return logits.isfinite().all(1)


def _share(hits: Tensor) -> float:
    return float(hits.double().mean())
