"""Loading into a meta model takes little more memory than the file: the mapped file is the model's memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import DYNAMIC, F8, STATIC, write_json

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")

LAYERS, SIZE = 12, 4096

CODE = """
import json, sys, torch, anyfp8
from torch import nn

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))

def load(folder, layers, size):
    with torch.device("meta"):
        layers = [nn.Linear(size, size, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
        model = nn.Sequential(*layers, nn.LayerNorm(size, dtype=torch.bfloat16))
    return anyfp8.load(model, folder)

torch.set_num_threads(1)
folder, warm_up, layers, size = json.loads(sys.argv[1])
load(warm_up, layers, 16)  # touches the pages of torch's own code that any load needs
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # from here on VmHWM counts anew
before = status("VmRSS")
model = load(folder, layers, size)
peak = status("VmHWM") - before
assert not [n for n, t in model.state_dict().items() if t.is_meta]
print(json.dumps({"peak": peak, "after": status("VmRSS") - before}))
"""


def write(folder, size):
    """A checkpoint of LAYERS matrices size × size, one a file; returns its bytes."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 0x7F, (size, size), dtype=torch.uint8, generator=generator).view(F8)
    weight_map, layers = {}, {}
    for i in range(LAYERS):
        tensors = {f"{i}.weight": codes, f"{i}.weight_scale": torch.full((size,), 1e-3)}
        layers[str(i)] = (STATIC if i % 2 else DYNAMIC) | {"tile": [1, -1]}
        if i % 2:
            tensors[f"{i}.input_scale"] = torch.ones(1)
        if i == 0:
            tensors |= {f"{LAYERS}.{n}": torch.ones(size, dtype=torch.bfloat16) for n in ("weight", "bias")}
        save_file(tensors, folder / f"model-{i:05d}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{i:05d}.safetensors")
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    write_json(folder / "anyfp8.json", {"format": "anyfp8", "version": 1, "layer_config": layers})
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def test_the_peak_of_a_load_into_a_meta_model(tmp_path):
    size = write(tmp_path / "big", SIZE)
    write(tmp_path / "small", 16)
    assert size > 200e6
    given = json.dumps([str(tmp_path / "big"), str(tmp_path / "small"), LAYERS, SIZE])
    done = subprocess.run([sys.executable, "-c", CODE, given], capture_output=True, text=True, timeout=120, check=False)
    for path in tmp_path.glob("big/*.safetensors"):  # pytest keeps the folders of its last runs
        path.unlink()
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    print(f"file {size / 1e6:.1f} MB, peak {got['peak'] / size:.3f} of it, after {got['after'] / size:.3f}")
    assert got["peak"] <= 1.15 * size
    assert got["peak"] >= 0.5 * size, "the codes were never read: the measurement is wrong"
