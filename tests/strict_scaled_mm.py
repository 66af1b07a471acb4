"""A stand-in for `torch.nn.functional.scaled_mm` that with the CUDA op's rules; a CPU accepts almost anything.

The rules are those of torch 2.14's aten/src/ATen/native/cuda/ScaledBlas.cpp for TensorWise and RowWise scales. Where
cuBLAS would round differently (float32 accumulation in another order) this computes in float32 as well.
"""

import torch
from torch.nn.functional import ScalingType

OCP = (torch.float8_e4m3fn, torch.float8_e5m2)
SHORT = (torch.bfloat16, torch.float16)


class RuleBroken(ValueError):
    """The CUDA op would have refused this call."""


def rule(kept, text):
    if not kept:
        raise RuleBroken(text)


class StrictScaledMM:
    """Callable like the op; remembers its calls as (recipe, output dtype, bias?, (M, K, N)).

    row_wise_outputs: the output dtypes of row-wise kernels; ROCm's, and CUDA's in older torch, give bfloat16 only.
    """

    def __init__(self, row_wise_outputs=SHORT, formats=OCP):
        self.row_wise_outputs, self.formats = row_wise_outputs, formats
        self.calls = []

    def __call__(
        self,
        mat_a,
        mat_b,
        scale_a,
        scale_recipe_a,
        scale_b,
        scale_recipe_b,
        swizzle_a=None,
        swizzle_b=None,
        bias=None,
        output_dtype=torch.bfloat16,
        contraction_dim=(),
        use_fast_accum=False,
    ):
        rule(swizzle_a is None and swizzle_b is None and not contraction_dim, "no swizzle, no contraction_dim")
        rule(not use_fast_accum, "fast accumulation is less than float32")
        self._operands(mat_a, mat_b)
        (scale_a, recipe), (scale_b, recipe_b) = _single(scale_a, scale_recipe_a), _single(scale_b, scale_recipe_b)
        (m, k), n = mat_a.shape, mat_b.shape[1]
        rule(recipe == recipe_b, f"recipes {recipe} and {recipe_b} differ")
        rule(scale_a.dtype == scale_b.dtype == torch.float32, "scales must be float32")
        if recipe == ScalingType.TensorWise:
            rule(scale_a.numel() == scale_b.numel() == 1, "TensorWise scales must have 1 element")
        else:
            rule(recipe == ScalingType.RowWise, f"recipe {recipe}")
            rule(tuple(scale_a.shape) == (m, 1), f"RowWise scale_a must be {(m, 1)}, not {tuple(scale_a.shape)}")
            rule(tuple(scale_b.shape) == (1, n), f"RowWise scale_b must be {(1, n)}, not {tuple(scale_b.shape)}")
            rule(scale_a.is_contiguous() and scale_b.is_contiguous(), "RowWise scales must be contiguous")
            rule(output_dtype in self.row_wise_outputs, f"no RowWise kernel for a {output_dtype} output")
        rule(output_dtype in (torch.float32, *SHORT), f"no kernel for a {output_dtype} output")
        if bias is not None:
            rule(output_dtype != torch.float32, "bias is not supported with a float32 output")
            rule(bias.dtype == output_dtype, f"a {bias.dtype} bias for a {output_dtype} output")
            rule(tuple(bias.shape) == (n,) and bias.is_contiguous(), f"bias must be {(n,)} and contiguous")
        needs_grad = any(t is not None and t.requires_grad for t in (mat_a, mat_b, bias))
        rule(not (needs_grad and torch.is_grad_enabled()), "no derivative")
        self.calls.append((recipe.name, output_dtype, bias is not None, (m, k, n)))
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y = (mat_a.float() @ mat_b.float()) * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
            return (y if bias is None else y + bias.float()).to(output_dtype)

    def _operands(self, a, b):
        rule(a.dim() == b.dim() == 2, "operands must be matrices")
        rule(a.shape[1] == b.shape[0], "shapes can't be multiplied")
        rule(a.dtype in self.formats and b.dtype in self.formats, f"operands are {a.dtype} and {b.dtype}")
        rule(not (a.dtype == b.dtype == torch.float8_e5m2), "e5m2 × e5m2 is not supported")
        rule(a.shape[0] > 0 and a.shape[1] > 0 and b.shape[1] > 0, "empty operand")
        rule(a.shape[1] % 16 == 0, f"K = {a.shape[1]} is no multiple of 16")
        rule(b.shape[1] % 16 == 0, f"N = {b.shape[1]} is no multiple of 16")
        rule(a.stride(1) == 1 and a.stride(0) >= a.shape[1], f"a must be row-major, its strides are {a.stride()}")
        rule(b.stride(0) == 1 and b.stride(1) >= b.shape[0], f"b must be column-major, its strides are {b.stride()}")
        rule(a.stride(0) % 16 == 0 and b.stride(1) % 16 == 0, "rows must start at multiples of 16 bytes")


def _single(scale, recipe):
    if isinstance(scale, (list, tuple)):
        (scale,) = scale
    if isinstance(recipe, (list, tuple)):
        (recipe,) = recipe
    return scale, recipe
