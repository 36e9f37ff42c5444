# SPDX-License-Identifier: Apache-2.0
"""The tensors that 8-bit quantisation writes where the caller gives none.

A caller who gives one and also says what it should be like must not contradict it.
"""

from __future__ import annotations

from precast._base.dtypes import dtype_word
from precast._base.torch import torch


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
    """Return ``out_scale``, or new scales of the groups of ``out`` in the layout of the flags.

    The shape is ``[..., groups]``, or ``[..., ceil(groups / 4)]`` words of four exponents each.
    """
    if scale_tma_aligned and not column_major_scales:
        raise ValueError(f"{export}: scale_tma_aligned needs column_major_scales=True")
    if use_packed_ue8m0 and not scale_ue8m0:
        raise ValueError(f"{export}: use_packed_ue8m0 needs scale_ue8m0=True")
    if out_scale is not None:
        if column_major_scales or use_packed_ue8m0:
            _check_layout(
                export, out_scale, column_major_scales, scale_tma_aligned, use_packed_ue8m0
            )
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


def _check_layout(
    export: str,
    out_scale: torch.Tensor,
    column_major_scales: bool,
    scale_tma_aligned: bool,
    use_packed_ue8m0: bool,
) -> None:
    """Raise ValueError if the flags ask for another layout than ``out_scale`` has."""
    if use_packed_ue8m0 and out_scale.dtype != torch.int32:
        raise ValueError(
            f"{export}: use_packed_ue8m0 needs an int32 out_scale, got "
            f"{dtype_word(out_scale.dtype)}"
        )
    if not column_major_scales or out_scale.dim() < 2:
        return
    tokens, columns = out_scale.shape[-2:]
    step = out_scale.stride(-1)
    if tokens > 1 and out_scale.stride(-2) != 1:
        raise ValueError(
            f"{export}: column_major_scales needs an out_scale with stride 1 along the tokens, got "
            f"strides {[*out_scale.stride()]}"
        )
    if scale_tma_aligned and columns > 1 and step % 4:
        raise ValueError(
            f"{export}: scale_tma_aligned needs an out_scale whose columns are a multiple of 4 "
            f"elements apart, got strides {[*out_scale.stride()]}"
        )
