# SPDX-License-Identifier: Apache-2.0
"""Quantisation to MXFP4.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._ops.quantize._block_outputs import packed_outputs
from precast._ops.quantize._block_validation import check_backend, check_quantized_blocks
from precast._ops.quantize._reference_blocks import quantize_mxfp4
from precast._ops.quantize._trace_blocks import Layout, quantize_trace
from precast._ops.quantize.sf_layout import SfLayout
from precast.api_logging import precast_api


def mxfp4_quantize_reference(
    a: torch.Tensor, sfLayout: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`mxfp4_quantize` in plain PyTorch on any device, the same bits.

    Examples
    --------
    >>> import torch
    >>> q, scales = mxfp4_quantize_reference(torch.full((1, 32), 24.0), 2)
    >>> scales.tolist(), q[0, 0].item()
    ([[129]], 119)
    """
    return quantize_mxfp4(a, sfLayout)


def _check(export: str, a: torch.Tensor, sfLayout: int) -> None:
    check_quantized_blocks(export, "a", a, 32, sfLayout)


_MXFP4_QUANTIZE = Export(
    "block_quantize",
    "mxfp4_quantize",
    "a:T=f16|bf16[*rows(1-),columns] out!:u8 out_sf!:u8 sfLayout:int enable_pdl:pdl",
    reference=mxfp4_quantize_reference,
    check=_check,
)


@precast_api(
    trace=quantize_trace(
        "mxfp4_quantize",
        "MXFP4: e2m1 in blocks of 32 with scales that are powers of two.",
        mxfp4_quantize_reference,
        input="a",
        layout=Layout.of_number("sfLayout"),
        block=32,
    )
)
@op("block_quantize")
def mxfp4_quantize(
    a: torch.Tensor,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: SfLayout = SfLayout.layout_128x4,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise to MXFP4: e2m1 in blocks of 32, a scale that is a power of two for each.

    .. math::

        e = \left\lceil \log_2 \frac{\max|x|}{6} \right\rceil, \quad q = \mathrm{e2m1}(x \cdot
        2^{-e})

    Parameters
    ----------
    a : torch.Tensor
        ``[..., columns]``, at least 2 dimensions, float16 or bfloat16, on a CUDA device; columns
        are a multiple of 32 with stride 1, the others merge into at most two strides. 16-byte
        aligned rows are fastest.
    backend : str
        Only ``"cuda"``.
    sfLayout : SfLayout
        Where the scales lie.

    Returns
    -------
    tuple of torch.Tensor
        ``[..., columns // 2]``, two numbers a byte, the first in the lower 4 bits; and the scales
        as bytes ``e + 127``, ``[rows, columns // 32]``, for tiled layouts with rows padded to 128
        (8) and columns to 4, by zeros, in the layout's order; uint8.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape or strides other than above.

    Notes
    -----
    The scale is rounded up, as FlashInfer's is, so that no finite number saturates; the OCP
    specification proposes ``floor(log2(max)) - 2``. It is at least 2^-127, also of a block of
    zeros; 2^127 of a block with infinity, which becomes 6. NaN is left out of the maximum and
    becomes 6. Allocates its results; safe in CUDA graphs; not differentiable. Source: OCP
    Microscaling Formats (MX) Specification 1.0.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     q, scales = precast.mxfp4_quantize(torch.full((1, 32), 24.0).half())
    >>> q.shape, scales.shape, scales[0, 0].item()
    (torch.Size([1, 16]), torch.Size([128, 4]), 129)
    """
    if backend != "cuda":
        check_backend("mxfp4_quantize", backend)
    layout = int(sfLayout)
    out, out_sf = packed_outputs(a, 32, layout)
    _MXFP4_QUANTIZE.launch(a, out, out_sf, layout, enable_pdl)
    return out, out_sf
