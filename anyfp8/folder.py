"""Writing a checkpoint folder: whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyfp8.errors import AnyFP8Error, CheckpointError
from anyfp8.header import read_header

#: what we write under any format
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
#: what we write under some formats, with our name in it
_CONFIGS = ("anyfp8.json", "config.json", "quantization_config.json", "hf_quant_config.json")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that becomes `path` on success and vanishes on failure.

    An existing folder is replaced if anyfp8 wrote it (its anyfp8.json or its configs name us as producer) and nothing
    else is in it; any other non-empty one is an AnyFP8Error.
    """
    _refuse_foreign(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # mkdtemp's folders are private
        _exchange(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_foreign(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise AnyFP8Error(f"{path} is a file: save to a folder of its own")
    names = sorted(p.name for p in path.iterdir())
    # without our word for it, even a model.safetensors is somebody else's
    ours = [name for name in names if _names_us(path / name)]
    foreign = [name for name in names if name not in ours and not (ours and name == "model.safetensors.index.json")]
    if foreign:
        raise AnyFP8Error(f"{path} holds other files ({', '.join(foreign[:5])}): save to a folder of its own")


def _names_us(path: Path) -> bool:
    """Is it one of the files that we write, and does it name us as its producer?"""
    try:
        if _WEIGHTS.fullmatch(path.name):
            with open(path, "rb") as file:
                _, metadata = read_header(file, path.stat().st_size, path.name)
            return metadata.get("producer", "").startswith("anyfp8 ")
        return path.name in _CONFIGS and '"anyfp8 ' in path.read_text("utf-8")
    except (OSError, ValueError, CheckpointError):
        return False


def _exchange(new: Path, path: Path) -> None:
    if not path.exists():
        new.rename(path)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    path.rename(aside / "old")
    try:
        new.rename(path)
    except BaseException:
        (aside / "old").rename(path)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
