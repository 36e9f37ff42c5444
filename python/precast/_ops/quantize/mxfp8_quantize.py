# SPDX-License-Identifier: Apache-2.0
"""Quantisation to MXFP8.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import math
from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._ops.quantize._block_validation import check_backend, check_quantized_blocks
from precast._ops.quantize._reference_blocks import quantize_mxfp8, scale_shape
from precast._ops.quantize._trace_blocks import ROWS, Layout
from precast._ops.quantize.sf_layout import SfLayout, layout_of_flags
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, dispatch


def mxfp8_quantize_reference(
    input: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    sf_swizzle_layout: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`mxfp8_quantize` in plain PyTorch on any device, the same bits."""
    layout = sf_swizzle_layout
    if layout is None:
        layout = layout_of_flags(is_sf_swizzled_layout)
    elements, scales = quantize_mxfp8(input, layout, alignment)
    return elements, scales.flatten()


def _check(export: str, input: torch.Tensor, sf_layout: int, alignment: int) -> None:
    if alignment <= 0 or alignment % 32:
        raise ValueError(f"{export}: alignment must be a positive multiple of 32, got {alignment}")
    check_quantized_blocks(export, "input", input, 32, sf_layout)


_MXFP8_QUANTIZE = Export(
    "block_quantize",
    "mxfp8_quantize",
    "input:T=f16|bf16[*rows(1-),columns] out!:e4m3 out_sf!:u8 sf_layout:int alignment:int "
    "enable_pdl:pdl",
    reference=mxfp8_quantize_reference,
    check=_check,
    derived={"sf_swizzle_layout": lambda sf_layout: sf_layout},
)


def _template(name: str, layout: Layout) -> TraceTemplate:
    rows, columns = layout.shape("(padded_size // 32)")
    return TraceTemplate(
        op_type="quantization",
        name_prefix=name,
        description="MXFP8: e4m3 in blocks of 32 with scales that are powers of two.",
        axes={
            "hidden_size": Const("h"),
            "*num_tokens": ROWS,
            "padded_size": Const(
                abbrev="p", value="(hidden_size + alignment - 1) // alignment * alignment"
            ),
            "num_scales": Const(abbrev="s", value=f"{rows} * {columns}"),
        },
        inputs={
            "hidden_states": Tensor(["*num_tokens", "hidden_size"], param="input"),
            "alignment": Scalar("int32"),
            **layout.inputs,
        },
        outputs={
            "quantized": Tensor(["*num_tokens", "padded_size"], dtype="float8_e4m3fn"),
            "scales": Tensor(["num_scales"], dtype="uint8"),
        },
        reference=mxfp8_quantize_reference,
    )


_BY_FLAG = _template(
    "mxfp8_quantize",
    Layout("not is_sf_swizzled_layout", "False", {"is_sf_swizzled_layout": Scalar("bool")}),
)
_BY_NUMBER = _template("mxfp8_quantize_layout", Layout.of_number("sf_swizzle_layout"))


@dispatch(_BY_FLAG, _BY_NUMBER)
def _trace(sf_swizzle_layout: int | None = None, **others: Any) -> TraceTemplate:
    return _BY_FLAG if sf_swizzle_layout is None else _BY_NUMBER


@precast_api(trace=_trace)
@op("block_quantize")
def mxfp8_quantize(
    input: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    sf_swizzle_layout: SfLayout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise to MXFP8: e4m3 in blocks of 32, a scale that is a power of two for each.

    .. math::

        e = \left\lceil \log_2 \frac{\max|x|}{448} \right\rceil, \quad q = \mathrm{e4m3}(x \cdot
        2^{-e})

    Parameters
    ----------
    input : torch.Tensor
        ``[..., columns]``, at least 2 dimensions, float16 or bfloat16, on a CUDA device; columns
        are a multiple of 32 with stride 1, the others merge into at most two strides. 16-byte
        aligned rows are fastest.
    is_sf_swizzled_layout : bool
        Scales in tiles of 128x4, otherwise linear.
    alignment : int
        The result has its columns padded to a multiple of it by zeros; a multiple of 32.
    backend : str
        Only ``"cuda"``.
    sf_swizzle_layout : SfLayout, optional
        Where the scales lie, in place of ``is_sf_swizzled_layout``.

    Returns
    -------
    tuple of torch.Tensor
        ``[..., padded columns]``, float8_e4m3fn; and the scales as bytes ``e + 127``, uint8, in one
        dimension: ``rows * padded columns // 32``, for tiled layouts with rows padded to 128 (8)
        and columns of scales to 4, by zeros, in the layout's order.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape or strides other than above.

    Notes
    -----
    The scale is rounded up, as FlashInfer's is, so that no finite number saturates; the OCP
    specification proposes ``floor(log2(max)) - 8``. It is at least 2^-127, also of a block of
    zeros; 2^127 of a block with infinity, which becomes 448. NaN is left out of the maximum and
    stays NaN, where FlashInfer makes 448 of it. Allocates its results; safe in CUDA graphs; not
    differentiable. Source: OCP Microscaling Formats (MX) Specification 1.0.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     q, scales = precast.mxfp8_quantize(torch.full((1, 32), 600.0).half())
    >>> q[0, 0].item(), scales.shape, scales[0].item()
    (288.0, torch.Size([512]), 128)
    """
    if backend != "cuda":
        check_backend("mxfp8_quantize", backend)
    if sf_swizzle_layout is None:
        layout = layout_of_flags(is_sf_swizzled_layout)
    else:
        layout = int(sf_swizzle_layout)
    shape = input.shape
    rows = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
    columns = shape[-1]
    padded = columns if alignment == 32 else -(-columns // (alignment or 1)) * alignment
    out = input.new_empty(*shape[:-1], padded, dtype=torch.float8_e4m3fn)
    scale_rows, scale_columns = scale_shape(rows, padded // 32, layout)
    out_sf = input.new_empty(scale_rows * scale_columns, dtype=torch.uint8)
    _MXFP8_QUANTIZE.launch(input, out, out_sf, layout, alignment, enable_pdl)
    return out, out_sf
