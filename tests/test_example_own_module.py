"""examples/own_module.py, run as its reader runs it."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import anyfp8

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "own_module.py")


def decibels(text):
    return float(re.search(r"SQNR (-?[\d.]+) dB", text)[1])


def test_what_it_prints_holds(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 FP8 layers" in done.stdout
    assert re.search(r"^  stem: .* static .* emulated", done.stdout, re.MULTILINE)
    assert "bit for bit what was saved: True" in done.stdout
    assert "still one layer under two names: True" in done.stdout
    assert 22 < decibels(done.stdout) < 36  # rounding to e4m3 alone costs about 31 dB
    assert list(tmp_path.iterdir()) == []


def test_it_says_so_if_what_was_loaded_is_not_what_was_saved(monkeypatch, capsys):
    load = anyfp8.load

    def wrong(model, source):
        load(model, source).stem.weight_scale.mul_(2)

    monkeypatch.setattr(anyfp8, "load", wrong)
    runpy.run_path(EXAMPLE, run_name="__main__")
    printed = capsys.readouterr().out
    assert "bit for bit what was saved: False" in printed
    assert decibels(printed) < 20
