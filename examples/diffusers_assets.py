"""The pipeline that diffusers_pipeline.py quantizes: a small UNet or DiT that learns to draw scikit-learn's digits."""

from __future__ import annotations

import json
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import diffusers
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm.auto import tqdm

#: name → diffusers' class and what it is built with: 8 x 8 pixels, one channel, ten classes
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "unet": (
        diffusers.UNet2DModel,
        {
            "block_out_channels": (32, 64),
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "layers_per_block": 1,
            "attention_head_dim": 16,
            "norm_num_groups": 8,
            "num_class_embeds": 10,
        },
    ),
    "dit": (
        diffusers.DiTTransformer2DModel,
        {
            "num_layers": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "num_embeds_ada_norm": 10,
            "norm_num_groups": 1,
            "patch_size": 2,
        },
    ),
}


class DigitsPipeline(diffusers.DiffusionPipeline):
    """Draws digits: a denoiser that is told the class, a UNet or a DiT, and a scheduler."""

    def __init__(self, denoiser: nn.Module, scheduler: Any) -> None:
        """As every pipeline: its components by name."""
        super().__init__()
        self.register_modules(denoiser=denoiser, scheduler=scheduler)
        self.set_progress_bar_config(disable=None, leave=False, desc="Sampling", unit="step")

    @torch.no_grad()
    def __call__(self, labels: Tensor, seed: int, num_inference_steps: int = 25) -> Tensor:
        """One sample [1, 8, 8] between -1 and 1 for each label; the seed decides the noise that they start from."""
        x = torch.randn(len(labels), 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.progress_bar(self.scheduler.timesteps):
            noise = self.denoiser(x, t.expand(len(x)), class_labels=labels).sample
            x = self.scheduler.step(noise, t, x).prev_sample
        return x.clamp(-1, 1)


# --- real digits, and the float model ---


@dataclass(frozen=True)
class Digits:
    """Pictures [n, 1, 8, 8] between -1 and 1, and their labels."""

    images: Tensor
    labels: Tensor


def real_digits() -> tuple[Digits, Digits]:
    """scikit-learn's 1,797 scanned digits: two thirds to learn from, every third one to test with."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1  # 0 to 16
    held_out = torch.arange(len(labels)) % 3 == 0
    targets = torch.tensor(labels)
    return Digits(images[~held_out], targets[~held_out]), Digits(images[held_out], targets[held_out])


def build(name: str) -> nn.Module:
    """A model as it is before training, in eval mode."""
    model_type, config = MODELS[name]
    model: nn.Module = model_type(sample_size=8, in_channels=1, out_channels=1, **config)
    return model.eval()


def train(name: str, digits: Digits, *, steps: int, batch_size: int, seed: int) -> DigitsPipeline:
    """Learn to predict the noise that was added to a digit; the weights are averaged over the last steps (EMA)."""
    torch.manual_seed(seed)
    scheduler = diffusers.DDIMScheduler(beta_schedule="squaredcos_cap_v2")
    model = build(name)
    average = deepcopy(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, total_steps=steps)
    for step in tqdm(range(steps), desc=f"Training {name}", unit="step", disable=None, leave=False):
        chosen = torch.randint(len(digits.images), (batch_size,))
        images, noise = digits.images[chosen], torch.randn(batch_size, 1, 8, 8)
        t = torch.randint(scheduler.config.num_train_timesteps, (batch_size,))
        noisy = scheduler.add_noise(images, noise, t)
        found = model(noisy, t, class_labels=digits.labels[chosen]).sample
        loss = nn.functional.mse_loss(found, noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            weight = max(0.005, 9 / (step + 10))  # of the newest
            for kept, newest in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(newest, weight)
    return DigitsPipeline(average, scheduler)


def float_pipeline(name: str, digits: Digits, folder: Path, retrain: bool, **settings: int) -> DigitsPipeline:
    """The trained pipeline, from `folder` if an earlier run with the same settings (those of `train`) left it there."""
    made, note = {"model": name, **settings}, folder / "training.json"
    if not retrain and note.exists() and json.loads(note.read_text()) == made:
        click.echo(f"{name}: trained by an earlier run, from {folder} (--retrain: train it again).")
        pipeline: DigitsPipeline = DigitsPipeline.from_pretrained(folder)
        return pipeline
    note.unlink(missing_ok=True)
    start = time.perf_counter()
    pipeline = train(name, digits, **settings)
    took = f"{settings['steps']} steps, {time.perf_counter() - start:.0f} s"
    click.echo(f"{name}: trained on {len(digits.images)} digits, {took}.")
    pipeline.save_pretrained(folder)
    note.write_text(json.dumps(made))
    return pipeline
