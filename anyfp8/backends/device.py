"""`DeviceInfo`: what a backend needs to know of a device, as a plain value: any machine can be reasoned about."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceInfo:
    """A device. type: "cpu", "cuda", "xpu", "mps" ... capability: CUDA's (major, minor). arch: ROCm's gfx name."""

    type: str
    capability: tuple[int, int] | None = None
    arch: str = ""

    @classmethod
    def of(cls, device: torch.device | str) -> DeviceInfo:
        """The value that describes a real device of this machine."""
        device = torch.device(device)
        if device.type != "cuda":
            return cls(device.type)
        if torch.version.hip:
            return cls("cuda", arch=torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
        return cls("cuda", capability=torch.cuda.get_device_capability(device))

    def __str__(self) -> str:
        if self.capability:
            return f"{self.type} sm{self.capability[0]}{self.capability[1]}"
        return f"ROCm {self.arch}" if self.arch else self.type
