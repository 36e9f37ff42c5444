# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of MXFP8.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import functools

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._ops.quantize._block_validation import check_dequantized_blocks
from precast._ops.quantize._reference_blocks import dequantize_mxfp8
from precast._ops.quantize._trace_blocks import Layout, dequantize_trace, of_output_dtype
from precast._ops.quantize.sf_layout import LAYOUT_KIND, SfLayout
from precast.api_logging import precast_api


def mxfp8_dequantize_reference(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    sfLayout: int = 0,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`mxfp8_dequantize` in plain PyTorch on any device.

    Examples
    --------
    >>> import torch
    >>> q = torch.full((1, 32), 1.5).to(torch.float8_e4m3fn)
    >>> mxfp8_dequantize_reference(q, torch.tensor([130]).byte(), 2)[0, 0].item()
    12.0
    """
    return dequantize_mxfp8(input, scale_tensor, sfLayout).to(output_dtype or torch.float32)


def _check(export: str, input: torch.Tensor, scale_tensor: torch.Tensor, sfLayout: int) -> None:
    check_dequantized_blocks(export, "input", input, "scale_tensor", scale_tensor, 32, sfLayout)


def _new_output(input: torch.Tensor, output_dtype: torch.dtype | None) -> torch.Tensor:
    return input.new_empty(
        *input.shape, dtype=torch.float32 if output_dtype is None else output_dtype
    )


_MXFP8_DEQUANTIZE = Export(
    "block_dequantize",
    "mxfp8_dequantize",
    "input:e4m3[*rows(1-),columns] scale_tensor:u8 out!:T=f32|f16|bf16 sfLayout:layout "
    "enable_pdl:pdl_on",
    reference=mxfp8_dequantize_reference,
    check=_check,
    new={"out": _new_output},
    derived={"output_dtype": lambda out: out.dtype},
    kinds=LAYOUT_KIND,
)
_TRACE = of_output_dtype(
    functools.partial(
        dequantize_trace,
        description="Dequantised e4m3 in blocks of 32 with scales that are powers of two.",
        reference=mxfp8_dequantize_reference,
        input="input",
        scales="scale_tensor",
        block="32",
        layout=Layout.of_number("sfLayout"),
        elements="float8_e4m3fn",
    ),
    "mxfp8_dequantize",
    "float32",
    "float16",
    "bfloat16",
)


@precast_api(trace=_TRACE)
@launches(_MXFP8_DEQUANTIZE)
def mxfp8_dequantize(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    r"""Dequantise MXFP8.

    .. math:: out = \mathrm{round}(q \cdot 2^{s - 127})

    Parameters
    ----------
    input : torch.Tensor
        ``[..., columns]``, at least 2 dimensions, float8_e4m3fn, contiguous, 16-byte aligned, on
        a CUDA device; columns are a multiple of 32.
    scale_tensor : torch.Tensor
        Scales of the rows and ``columns // 32`` blocks with the layout's padding, in any shape,
        uint8, contiguous, on the device of ``input``.
    sfLayout : SfLayout
        Where the scales lie.
    output_dtype : torch.dtype, optional
        float32, float16 or bfloat16. Default: float32, which is exact.

    Returns
    -------
    torch.Tensor
        ``[..., columns]``, ``output_dtype``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape or strides other than above.

    Notes
    -----
    The product is exact, then rounded once to nearest even; the scale 255 is NaN. The form of
    :func:`mxfp8_dequantize_host` for the GPU. Allocates its result; safe in CUDA graphs; not
    differentiable. Source: OCP Microscaling Formats (MX) Specification 1.0.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.full((1, 32), 1.5).to(torch.float8_e4m3fn)
    >>> with precast.reference_mode():
    ...     linear = precast.SfLayout.layout_linear
    ...     precast.mxfp8_dequantize(q, torch.tensor([130]).byte(), linear)[0, 0].item()
    12.0
    """
