# SPDX-License-Identifier: Apache-2.0
"""Quantisation to MXFP8, and dequantisation on the GPU and on the CPU.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import math
from typing import Any

from precast._base.torch import torch
from precast._op import mode
from precast._op.docs import documented
from precast._op.export import Export, launches, op
from precast._op.validation import check_dtype, check_rank
from precast._ops.quantize._reference_blocks import (
    block_maxima,
    dequantize_blocks,
    e4m3,
    in_blocks,
    place_scales,
    scale_shape,
    ue8m0_round_up,
    ue8m0_values,
)
from precast._ops.quantize._trace_blocks import ROWS, dequantize_trace_by_dtype, layout_of
from precast._ops.quantize.sf_layout import (
    BLOCKS,
    LAYOUT_KIND,
    SfLayout,
    check_backend,
    check_dequantized_blocks,
    check_host,
    check_quantized_blocks,
    dequantized_blocks,
)
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, dispatch

_reference = False  # mode.follow() keeps it up to date.
mode.follow(globals())


def _layout(is_sf_swizzled_layout: bool, sf_swizzle_layout: int | None) -> int:
    if sf_swizzle_layout is not None:
        return int(sf_swizzle_layout)
    return 0 if is_sf_swizzled_layout else 2


def mxfp8_quantize_reference(
    input: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    sf_swizzle_layout: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`mxfp8_quantize` in plain PyTorch on any device, the same bits."""
    layout = _layout(is_sf_swizzled_layout, sf_swizzle_layout)
    padded = torch.nn.functional.pad(input.float(), (0, -input.shape[-1] % alignment))
    x = in_blocks(padded, 32)
    scales = ue8m0_round_up(block_maxima(x), 8, 1.75)
    elements = e4m3(x * ue8m0_values(254 - scales)[..., None])
    return elements.reshape(padded.shape), place_scales(scales.to(torch.uint8), layout).flatten()


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


def _quantize_on_host(
    input: torch.Tensor, layout: int, alignment: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a CPU tensor, whose elements FlashInfer returns as bytes."""
    export = _MXFP8_QUANTIZE.function
    check_dtype(export, "input", input, torch.float32, torch.float16, torch.bfloat16)
    check_rank(export, "input", input, 2, None)
    _check(export, input, layout, alignment)
    with torch.no_grad():
        elements, scales = mxfp8_quantize_reference(input, True, alignment, layout)
    return elements.view(torch.uint8), scales


def _template(suffix: str, param: str) -> TraceTemplate:
    layout, rows, columns = layout_of("(padded_size // 32)", param)
    return TraceTemplate(
        op_type="quantization",
        name_prefix=_MXFP8_QUANTIZE.function + suffix,
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
            **layout,
        },
        outputs={
            "quantized": Tensor(["*num_tokens", "padded_size"], dtype="float8_e4m3fn"),
            "scales": Tensor(["num_scales"], dtype="uint8"),
        },
        reference=mxfp8_quantize_reference,
    )


_BY_FLAG = _template("", "is_sf_swizzled_layout")
_BY_NUMBER = _template("_layout", "sf_swizzle_layout")


@dispatch(_BY_FLAG, _BY_NUMBER)
def _trace(sf_swizzle_layout: int | None = None, **others: Any) -> TraceTemplate:
    return _BY_FLAG if sf_swizzle_layout is None else _BY_NUMBER


@precast_api(trace=_trace)
@op("block_quantize")
@documented(BLOCKS)
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
        ``[..., columns]``, at least 2 dimensions, float16 or bfloat16; columns are a multiple of 32
        with stride 1, the others merge into at most two strides. 16-byte aligned rows are fastest.
        On a CUDA device, or on the CPU, where it may be float32, too, and has any strides.
    alignment : int
        The result has its columns padded to a multiple of it by zeros; a multiple of 32.

    Returns
    -------
    tuple of torch.Tensor
        ``[..., padded columns]``, float8_e4m3fn, of a CPU tensor its bytes as uint8; and the scales
        as bytes ``e + 127``, uint8, in one dimension: ``rows * padded columns // 32``, for tiled
        layouts with rows padded to 128 (8) and columns of scales to 4, by zeros, in the layout's
        order.

    Notes
    -----
    The scale is rounded up, as FlashInfer's is, so that no finite number saturates; the OCP
    specification proposes ``floor(log2(max)) - 8``. It is at least 2^-127, also of a block of
    zeros; 2^127 of a block with infinity, which becomes 448. NaN is left out of the maximum and
    stays NaN, where FlashInfer makes 448 of it. A CPU tensor is quantised in plain PyTorch, to the
    same bits; in reference mode, results have the types of the GPU. Allocates its results; safe in
    CUDA graphs; not differentiable. Source: OCP Microscaling Formats (MX) Specification 1.0.

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
    layout = _layout(is_sf_swizzled_layout, sf_swizzle_layout)
    if input.is_cpu and not _reference:
        return _quantize_on_host(input, layout, alignment)
    shape = input.shape
    rows = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
    columns = shape[-1]
    padded = columns if alignment == 32 else -(-columns // (alignment or 1)) * alignment
    out = input.new_empty(*shape[:-1], padded, dtype=torch.float8_e4m3fn)
    scale_rows, scale_columns = scale_shape(rows, padded // 32, layout)
    out_sf = input.new_empty(scale_rows * scale_columns, dtype=torch.uint8)
    _MXFP8_QUANTIZE.launch(input, out, out_sf, layout, alignment, enable_pdl)
    return out, out_sf


def mxfp8_dequantize_reference(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    sfLayout: int = 0,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`mxfp8_dequantize` in plain PyTorch on any device."""
    values = dequantize_blocks(input.float(), scale_tensor, 32, sfLayout)
    return values.to(output_dtype or torch.float32)


_MXFP8_DEQUANTIZE = Export(
    "block_dequantize",
    "mxfp8_dequantize",
    "input:e4m3[*rows(1-),columns] scale_tensor:u8 out!:T=f32|f16|bf16 sfLayout:layout "
    "enable_pdl:pdl_on",
    reference=mxfp8_dequantize_reference,
    check=dequantized_blocks("input", "scale_tensor", 32, "sfLayout"),
    new={"out": "input.new_empty(*input.shape, dtype=output_dtype or _torch.float32)"},
    derived={"output_dtype": lambda out: out.dtype},
    kinds=LAYOUT_KIND,
)


@precast_api(
    trace=dequantize_trace_by_dtype(
        _MXFP8_DEQUANTIZE,
        "Dequantised e4m3 in blocks of 32 with scales that are powers of two.",
        32,
        "float32",
        "float16",
        "bfloat16",
    )
)
@launches(_MXFP8_DEQUANTIZE)
@documented(BLOCKS)
def mxfp8_dequantize(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    r"""Dequantise MXFP8, in blocks of 32.

    .. math:: out = \mathrm{round}(q \cdot 2^{s - 127})

    Parameters
    ----------
    input : torch.Tensor
        ``[..., columns]``, at least 2 dimensions, float8_e4m3fn, contiguous, 16-byte aligned, on
        a CUDA device; columns are a multiple of 32.
    output_dtype : torch.dtype, optional
        float32, float16 or bfloat16. Default: float32, which is exact.

    Returns
    -------
    torch.Tensor
        ``[..., columns]``, ``output_dtype``.

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


@precast_api
@documented(BLOCKS)
def mxfp8_dequantize_host(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    is_sf_swizzled_layout: bool = True,
    sf_swizzle_layout: SfLayout | None = None,
) -> torch.Tensor:
    r"""Dequantise MXFP8 to float32 on the CPU.

    .. math:: out = q \cdot 2^{s - 127}

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, columns]``, float8_e4m3fn or its bytes as uint8, a CPU tensor; columns are a
        multiple of 32.
    scale_tensor : torch.Tensor
        Scales of the rows and ``columns // 32`` blocks with the layout's padding, in any shape,
        uint8, a CPU tensor.

    Returns
    -------
    torch.Tensor
        ``[rows, columns]``, float32.

    Raises
    ------
    ValueError
        A tensor that is not on the CPU; a dtype or shape other than above.

    Examples
    --------
    >>> import torch, precast
    >>> q = torch.full((1, 32), 1.5).to(torch.float8_e4m3fn)
    >>> precast.mxfp8_dequantize_host(q, torch.tensor([130]).byte(), False)[0, 0].item()
    12.0
    """
    export = "mxfp8_dequantize_host"
    check_host(export, input=input, scale_tensor=scale_tensor)
    check_dtype(export, "input", input, torch.float8_e4m3fn, torch.uint8)
    check_dtype(export, "scale_tensor", scale_tensor, torch.uint8)
    check_rank(export, "input", input, 2, None)
    layout = _layout(is_sf_swizzled_layout, sf_swizzle_layout)
    input = input.view(torch.float8_e4m3fn)
    check_dequantized_blocks(export, "input", input, "scale_tensor", scale_tensor, 32, layout)
    with torch.no_grad():
        return dequantize_blocks(input.float(), scale_tensor, 32, layout)
