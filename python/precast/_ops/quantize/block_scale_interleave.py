# SPDX-License-Identifier: Apache-2.0
"""Block scales from a linear layout into tiles of 128x4.

Source: cuBLAS, 1D block scaling factors layout.
"""

from __future__ import annotations

import math
from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._ops.quantize._reference_blocks import place_scales, scale_shape
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var, dispatch


def block_scale_interleave_reference(unswizzled_sf: torch.Tensor) -> torch.Tensor:
    """:func:`block_scale_interleave` in plain PyTorch on any device."""
    experts = unswizzled_sf if unswizzled_sf.dim() == 3 else unswizzled_sf[None]
    placed = [place_scales(scales, 0).flatten() for scales in experts]
    return torch.cat([*placed, unswizzled_sf.new_empty(0)])


def _check(export: str, unswizzled_sf: torch.Tensor) -> None:
    if not unswizzled_sf.is_contiguous():
        raise ValueError(
            f"{export}: unswizzled_sf must be contiguous, got strides "
            f"{[*unswizzled_sf.stride()]} for shape {[*unswizzled_sf.shape]}; call .contiguous()"
        )


def _new_output(unswizzled_sf: torch.Tensor) -> torch.Tensor:
    shape = unswizzled_sf.shape
    rows, columns = shape[-2:] if len(shape) >= 2 else (0, 0)
    experts = shape[0] if len(shape) == 3 else 1
    return unswizzled_sf.new_empty((experts * math.prod(scale_shape(rows, columns, 0)),))


_BLOCK_SCALE_INTERLEAVE = Export(
    "block_scale",
    "block_scale_interleave",
    "unswizzled_sf:T=u8|bf16[*experts(0-1),rows,columns] out!:T enable_pdl:pdl_on",
    reference=block_scale_interleave_reference,
    check=_check,
    new={"out": _new_output},
)


def _template(name: str, dtype: str) -> TraceTemplate:
    return TraceTemplate(
        op_type="quantization",
        name_prefix=name,
        description="Block scales in tiles of 128 rows and 4 columns.",
        axes={
            "*experts": Var(sample=2),
            "rows": Const("r"),
            "columns": Const("c"),
            "num_scales": Const(
                abbrev="s",
                value="experts * ((rows + 127) // 128 * 128) * ((columns + 3) // 4 * 4)",
            ),
        },
        inputs={"scales": Tensor(["*experts", "rows", "columns"], "unswizzled_sf", dtype)},
        outputs={"interleaved": Tensor(["num_scales"], dtype=dtype)},
        reference=block_scale_interleave_reference,
    )


_BYTES = _template("block_scale_interleave", "uint8")
_WIDE = _template("block_scale_interleave_bf16", "bfloat16")


@dispatch(_BYTES, _WIDE)
def _trace(unswizzled_sf: Any) -> TraceTemplate:
    return _WIDE if unswizzled_sf.dtype == torch.bfloat16 else _BYTES


@precast_api(trace=_trace)
@launches(_BLOCK_SCALE_INTERLEAVE)
def block_scale_interleave(unswizzled_sf: torch.Tensor) -> torch.Tensor:
    """Put block scales into tiles of 128x4, as :attr:`SfLayout.layout_128x4` says.

    Parameters
    ----------
    unswizzled_sf : torch.Tensor
        ``[rows, columns]`` or ``[experts, rows, columns]``, uint8 (the bytes of e4m3 or ue8m0) or
        bfloat16, contiguous, on a CUDA device. Columns that are a multiple of 16 bytes are
        fastest.

    Returns
    -------
    torch.Tensor
        One dimension, for each expert rows padded to 128 times columns padded to 4, by zeros; the
        dtype of ``unswizzled_sf``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape or strides other than above.

    Notes
    -----
    Also called ``nvfp4_block_scale_interleave``. Allocates its result; safe in CUDA graphs; not
    differentiable. Source: cuBLAS, 1D block scaling factors layout.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.block_scale_interleave(torch.ones(2, 2).byte()).shape
    torch.Size([512])
    """


#: The name that libraries used before.
nvfp4_block_scale_interleave = block_scale_interleave
