# SPDX-License-Identifier: Apache-2.0
"""The tensors that quantisation writes where the caller gives none."""

from __future__ import annotations

from precast._base.dtypes import dtype_word
from precast._base.torch import torch


def new_codes(x: torch.Tensor, dtype: torch.dtype | None, gated: bool = False) -> torch.Tensor:
    """Contiguous codes for ``x``, or for its product of halves; e4m3 by default."""
    dtype = torch.float8_e4m3fn if dtype is None else dtype
    shape = x.shape
    if gated and shape:
        # Sizes one by one, here and elsewhere: a tuple of them costs torch half a microsecond.
        return x.new_empty(*shape[:-1], shape[-1] // 2, dtype=dtype)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def new_group_scales(
    export: str,
    out: torch.Tensor,
    group_size: int,
    column_major_scales: bool,
    scale_tma_aligned: bool,
    packed: bool,
) -> torch.Tensor:
    """Scales of ``out``'s groups, ``[..., groups]`` or ``[..., ceil(groups / 4)]`` words.

    Column-major: the tokens have stride 1, and 16-byte aligned columns if ``scale_tma_aligned``.
    """
    if out.dim() == 0 or group_size < 1:  # Refused where the arguments are checked.
        return out.new_empty((), dtype=torch.float32)
    *leading, columns = out.shape
    count = columns // group_size
    dtype = torch.float32
    if packed:
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


def check_given_dtype(
    export: str, name: str, dtype: torch.dtype, output_name: str, output: torch.Tensor
) -> None:
    """Raise a ValueError if the argument ``name`` asks for another type than the output has."""
    if output.dtype != dtype:
        raise ValueError(
            f"{export}: {name} must be {output_name}'s dtype {dtype_word(output.dtype)}, got "
            f"{dtype_word(dtype)}; give one of them"
        )


def check_given_scales(
    export: str,
    out_scale: torch.Tensor,
    column_major_scales: bool,
    scale_tma_aligned: bool,
    use_packed_ue8m0: bool,
) -> None:
    """Raise a ValueError if the flags ask for another layout than ``out_scale`` has."""
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


def given(**outputs: object) -> dict[str, object]:
    """Those that a caller gave."""
    return {name: value for name, value in outputs.items() if value is not None}


def check_layout(
    export: str,
    column_major_scales: bool,
    scale_tma_aligned: bool,
    scale_ue8m0: bool,
    use_packed_ue8m0: bool,
) -> None:
    """Raise a ValueError if the layout of scales contradicts itself."""
    if scale_tma_aligned and not column_major_scales:
        raise ValueError(f"{export}: scale_tma_aligned needs column_major_scales=True")
    if use_packed_ue8m0 and not scale_ue8m0:
        raise ValueError(f"{export}: use_packed_ue8m0 needs scale_ue8m0=True")
