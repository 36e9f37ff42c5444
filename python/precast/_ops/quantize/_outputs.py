# SPDX-License-Identifier: Apache-2.0
"""The tensors that 8-bit quantisation writes: those that it makes, and checks of those given.

A caller who gives one and also says what it should be like must not contradict it. The other checks
are those of reference mode, in the words of the bindings.
"""

from __future__ import annotations

from typing import Any

from precast._base.dtypes import dtype_word
from precast._base.torch import torch
from precast._op.validation import (
    check_dtype,
    check_elements_apart,
    check_half,
    check_memory_apart,
)

#: Public arguments that follow from a given or new ``out``, and from scales of groups.
DTYPE = {"dst_dtype": lambda out: out.dtype}
GROUPS = {**DTYPE, "use_packed_ue8m0": lambda out_scale: out_scale.dtype == torch.int32}


def quantized_like(
    export: str, x: torch.Tensor, dst_dtype: torch.dtype | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Return ``out``, or a contiguous tensor of the shape of ``x``, in e4m3 by default."""
    if out is None:
        dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if dst_dtype is not None:
        check_output_dtype(export, "dst_dtype", dst_dtype, out)
    return out


def quantized_half(
    export: str, input: torch.Tensor, dst_dtype: torch.dtype | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Return ``out``, or a tensor with half the columns of ``input``, in e4m3 by default."""
    if out is None:
        dtype = torch.float8_e4m3fn if dst_dtype is None else dst_dtype
        if not input.shape:  # The check of the arguments raises.
            return torch.empty_like(input, dtype=dtype)
        # Sizes one by one, here and elsewhere: a tuple of them costs torch half a microsecond.
        return input.new_empty(*input.shape[:-1], input.shape[-1] // 2, dtype=dtype)
    if dst_dtype is not None:
        check_output_dtype(export, "dst_dtype", dst_dtype, out)
    return out


def check_output_dtype(export: str, name: str, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Raise ValueError if the argument ``name`` asks for another dtype than ``out`` has."""
    if out.dtype != dtype:
        raise ValueError(
            f"{export}: {name} must be out's dtype {dtype_word(out.dtype)}, got "
            f"{dtype_word(dtype)}; give one of them"
        )


def group_scales(
    export: str,
    out: torch.Tensor,
    group_size: int,
    column_major_scales: bool,
    scale_tma_aligned: bool,
    scale_ue8m0: bool,
    use_packed_ue8m0: bool,
    out_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``out_scale``, or new scales of the groups of ``out`` in the layout of the flags."""
    if scale_tma_aligned and not column_major_scales:
        raise ValueError(f"{export}: scale_tma_aligned needs column_major_scales=True")
    if use_packed_ue8m0 and not scale_ue8m0:
        raise ValueError(f"{export}: use_packed_ue8m0 needs scale_ue8m0=True")
    if out_scale is not None:
        if use_packed_ue8m0 and out_scale.dtype != torch.int32:
            raise ValueError(
                f"{export}: use_packed_ue8m0 needs an int32 out_scale, got "
                f"{dtype_word(out_scale.dtype)}"
            )
        if column_major_scales and out_scale.dim() > 1:
            _check_columns(export, out_scale, scale_tma_aligned)
        return out_scale
    if out.dim() == 0 or group_size < 1:  # The check of the arguments raises.
        return out.new_empty((), dtype=torch.float32)
    *leading, columns = out.shape
    count = columns // group_size
    dtype = torch.float32
    if use_packed_ue8m0:
        count, dtype = (count + 3) // 4, torch.int32
    if not column_major_scales:
        return out.new_empty(*leading, count, dtype=dtype)
    if not leading:
        raise ValueError(
            f"{export}: column_major_scales needs a tensor of two dimensions or more, got shape "
            f"{[*out.shape]}"
        )
    *batch, tokens = leading
    padded = (tokens + 3) // 4 * 4 if scale_tma_aligned else tokens
    if padded == tokens and not batch:
        return out.new_empty_strided((tokens, count), (1, tokens), dtype=dtype)
    columns_first = out.new_empty(*batch, count, padded, dtype=dtype)
    return columns_first.transpose(-1, -2)[..., :tokens, :]


def _check_columns(export: str, out_scale: torch.Tensor, aligned: bool) -> None:
    """Raise ValueError if columns of ``out_scale`` are not contiguous, or not aligned."""
    (tokens, columns), (row_step, step) = out_scale.shape[-2:], out_scale.stride()[-2:]
    if tokens > 1 and row_step != 1:
        raise ValueError(
            f"{export}: column_major_scales needs an out_scale with stride 1 along the tokens, got "
            f"strides {[*out_scale.stride()]}"
        )
    if aligned and columns > 1 and step % 4:
        raise ValueError(
            f"{export}: scale_tma_aligned needs an out_scale whose columns are a multiple of 4 "
            f"elements apart, got strides {[*out_scale.stride()]}"
        )


def check_scales(
    export: str,
    out: torch.Tensor,
    out_scale: torch.Tensor,
    group_size: int | None = None,
    scale_ue8m0: bool = True,
    **given: Any,
) -> None:
    """Check that each row of ``x``, or of the gated ``input``, has a scale, or one a group."""
    name = "input" if "input" in given else "x"
    source = given[name]
    count = 1
    if group_size is not None:
        if group_size not in (16, 32, 64, 128):
            raise ValueError(f"{export}: group_size must be 16, 32, 64 or 128, got {group_size}")
        count, rest = divmod(out.shape[-1], group_size)
        if rest:
            raise ValueError(
                f"{export}: {name}'s last dimension must be a multiple of "
                f"{'2 x ' if name == 'input' else ''}group_size {group_size}, got "
                f"{source.shape[-1]}"
            )
    if out_scale.dtype != torch.int32:
        check_dtype(export, "out_scale", out_scale, torch.float32)
    elif scale_ue8m0:
        count = (count + 3) // 4  # Words of four exponents.
    else:
        raise ValueError(
            f"{export}: out_scale must be float32 unless scale_ue8m0 is true, got int32"
        )
    if name == "input":
        check_half(export, out, source, out.dtype)
    if out_scale.shape != (*source.shape[:-1], count):
        raise ValueError(
            f"{export}: out_scale must have {name}'s shape with a last dimension of {count}, got "
            f"{[*out_scale.shape]} for {name} {[*source.shape]}"
        )
    check_elements_apart(export, "out_scale", out_scale)
    check_memory_apart(export, "out_scale", out_scale, source, name)
