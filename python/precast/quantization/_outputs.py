# SPDX-License-Identifier: Apache-2.0
"""The tensors that quantisation writes where the caller gives none."""

from __future__ import annotations

from precast._torch import torch


def new_codes(x: torch.Tensor, dtype: torch.dtype | None, gated: bool = False) -> torch.Tensor:
    """Contiguous codes for ``x``, or for its product of halves; e4m3 by default."""
    shape = x.shape
    if gated and shape:
        shape = (*shape[:-1], shape[-1] // 2)
    return x.new_empty(shape, dtype=torch.float8_e4m3fn if dtype is None else dtype)


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
        return out.new_empty((*leading, count), dtype=dtype)
    if not leading:
        raise ValueError(
            f"{export}: column_major_scales needs a tensor of two dimensions or more, got shape "
            f"{[*out.shape]}"
        )
    *batch, tokens = leading
    padded = (tokens + 3) // 4 * 4 if scale_tma_aligned else tokens
    columns_first = out.new_empty((*batch, count, padded), dtype=dtype)
    return columns_first.transpose(-1, -2)[..., :tokens, :]


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
