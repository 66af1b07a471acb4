"""FP8 codes behind any parameter of any module: a parametrization that decodes on access.

For weights whose owner is no class we know (`nn.MultiheadAttention.in_proj_weight`, a Linear subclass with a forward of
its own, a bare parameter). The module's own forward runs, so its input is not quantized; the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from anyfp8.layers.storage import FP8Storage
from anyfp8.scheme import QuantizationScheme


class DecodedParameter(FP8Storage):
    """The parametrization. What it parametrizes is an empty tensor that only carries dtype and device."""

    def forward(self, original: Tensor) -> Tensor:
        """The decoded weight in the dtype of `original`."""
        return self.decoded(original.dtype)


def parametrize_codes(
    module: nn.Module,
    name: str,
    scheme: QuantizationScheme,
    values: Mapping[str, Tensor | None],
    dtype: torch.dtype,
) -> None:
    """Replace the parameter `name` of `module`, in place, by codes that are decoded at each access."""
    if parametrize.is_parametrized(module, name):  # loaded over: the codes are there already
        decoder = module.parametrizations[name][0]  # type: ignore[index]
        assert isinstance(decoder, DecodedParameter)
        decoder._store(scheme, values, dtype)
        return
    decoder = DecodedParameter()
    decoder._store(scheme, values, dtype)
    carrier = nn.Parameter(torch.empty(0, dtype=dtype, device=decoder.weight_codes.device), requires_grad=False)
    setattr(module, name, carrier)
    parametrize.register_parametrization(module, name, decoder, unsafe=True)  # unsafe: its shape changes on purpose


def unparametrize(module: nn.Module, name: str, weight: Tensor) -> None:
    """Undo `parametrize_codes`: an ordinary parameter with this float weight again."""
    parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    setattr(module, name, nn.Parameter(weight))
