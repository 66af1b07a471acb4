"""The command line: `anyfp8 inspect` and `anyfp8 env`. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from typing import Any

import click
import torch

from anyfp8 import __version__
from anyfp8.backends import DeviceInfo, select
from anyfp8.errors import AnyFP8Error
from anyfp8.load import inspect as read_manifest
from anyfp8.scheme import PRESETS


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="anyfp8")
def main() -> None:
    """Load any FP8 checkpoint into any PyTorch module."""


@main.command(
    epilog="Examples:  anyfp8 inspect ./ckpt   |   anyfp8 inspect org/model --json",
)
@click.argument("source", metavar="CKPT")
@click.option("--dialect", help="Read it in this dialect instead of detecting one.")
@click.option("--revision", help="Branch, tag or commit, if CKPT is a hub id.")
@click.option("--subfolder", default="", help="Folder inside CKPT, e.g. transformer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def inspect(
    context: click.Context, source: str, dialect: str | None, revision: str | None, subfolder: str, as_json: bool
) -> None:
    """Say what a checkpoint holds, from its headers alone.

    CKPT is a folder, a .safetensors file, an index JSON or a hub id. Printed: the dialect and its evidence, schemes
    with their layers (folded), exceptions and unclaimed tensors, problems, bytes. Exit status: 0 if all is explained,
    1 if something is unclaimed, a problem, or unreadable.
    """
    try:
        manifest = read_manifest(source, dialect=dialect, revision=revision, subfolder=subfolder)
    except AnyFP8Error as error:
        click.echo(f"Error: {error}", err=True)
        context.exit(1)
    click.echo(json.dumps(manifest.to_dict(), indent=2) if as_json else str(manifest))
    if manifest.unclaimed or manifest.problems:
        context.exit(1)


@main.command(epilog="Examples:  anyfp8 env   |   anyfp8 env --json")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(as_json: bool) -> None:
    """Print versions, the devices here, and which backend would run each scheme on them: a block for bug reports."""
    packages = ("torch", "safetensors", "huggingface_hub", "timm", "transformers", "diffusers", "accelerate", "peft")
    versions = {"anyfp8": __version__, "python": platform.python_version(), "platform": platform.platform()}
    versions |= {name: found for name in packages if (found := _version(name))}
    devices = {str(DeviceInfo.of(device)): _choices(DeviceInfo.of(device)) for device in _devices()}
    if as_json:
        click.echo(json.dumps({"versions": versions, "backends": devices}, indent=2))
        return
    for name, version in versions.items():
        click.echo(f"{name:16} {version}")
    for device, choices in devices.items():
        click.echo(f"\nbackends for a linear layer on {device}:")
        for scheme, choice in choices.items():
            why = "".join(f"; not {name}: {reason}" for name, reason in choice["refusals"].items())
            click.echo(f"  {scheme:16} {choice['backend']}{why}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[torch.device]:
    found = [torch.device("cpu")]
    if torch.accelerator.is_available():
        found.append(torch.accelerator.current_accelerator() or found[0])
    return found


def _choices(device: DeviceInfo) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for name, scheme in PRESETS.items():
        backend, refusals = select("auto", scheme, (4096, 4096), device)
        assert backend is not None
        table[name] = {"backend": backend.name, "refusals": refusals}
    return table


if __name__ == "__main__":
    sys.exit(main())
