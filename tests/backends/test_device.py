import types

import pytest
import torch

from anyfp8.backends import DeviceInfo


def test_of_this_machines_cpu():
    assert DeviceInfo.of("cpu") == DeviceInfo.of(torch.device("cpu")) == DeviceInfo("cpu")


def test_of_meta_asks_no_driver():
    assert DeviceInfo.of("meta") == DeviceInfo("meta")


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (12, 0)])
def test_of_cuda(monkeypatch, capability):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert DeviceInfo.of("cuda:1") == DeviceInfo("cuda", capability=capability)


@pytest.mark.parametrize(("name", "arch"), [("gfx942:sramecc+:xnack-", "gfx942"), ("gfx1201", "gfx1201")])
def test_of_rocm(monkeypatch, name, arch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(gcnArchName=name))
    assert DeviceInfo.of("cuda") == DeviceInfo("cuda", arch=arch)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        (DeviceInfo("cpu"), "cpu"),
        (DeviceInfo("mps"), "mps"),
        (DeviceInfo("cuda", (8, 9)), "cuda sm89"),
        (DeviceInfo("cuda", (10, 0)), "cuda sm100"),
        (DeviceInfo("cuda", arch="gfx942"), "ROCm gfx942"),
    ],
)
def test_str(device, text):
    assert str(device) == text


def test_is_a_value():
    assert {DeviceInfo("cuda", (9, 0)), DeviceInfo("cuda", (9, 0))} == {DeviceInfo("cuda", (9, 0))}
