"""Somebody's own network in FP8: quantize it, save it, load it without float weights. Needs nothing but anyfp8."""

import tempfile

import torch
from torch import nn

import anyfp8


class Net(nn.Module):
    """A convolution, a layer under two names, a bare parameter: any module, with any forward, will do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 4, stride=4)
        self.first = self.second = nn.Linear(64, 64)
        self.temperature = nn.Parameter(torch.tensor(0.1))
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [n, 3, 32, 32] to logits [n, 10]."""
        x = self.stem(images).flatten(2).mean(2)
        return self.head(x + self.second(self.first(x).relu())) / self.temperature


def main() -> None:
    """Quantize, save, load, compare."""
    torch.manual_seed(0)
    net, images = Net().eval(), torch.randn(16, 3, 32, 32)  # to calibrate with: some dozens of your own
    wanted = net(images)
    anyfp8.quantize(net, "FP8_STATIC", calibration=[images])
    with tempfile.TemporaryDirectory() as folder:
        anyfp8.save(net, folder)
        with torch.device("meta"):
            fresh = Net().eval()
        anyfp8.load(fresh, folder)
    got = fresh(images)
    noise = (got - wanted).square().sum()
    print(anyfp8.report(fresh))
    print("bit for bit what was saved:", torch.equal(got, net(images)))
    print("still one layer under two names:", fresh.first is fresh.second)
    print(f"against float: SQNR {10 * torch.log10(wanted.square().sum() / noise):.1f} dB")


if __name__ == "__main__":
    main()
