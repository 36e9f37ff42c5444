# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of block-scaled formats: MXFP4, MXFP8, and NVFP4 in all layouts of its scales.

Sources: OCP Microscaling Formats (MX) Specification 1.0; NVIDIA, Pretraining Large Language Models
with NVFP4, arXiv:2509.25149.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches, op
from precast._ops.quantize._block_validation import dequantized_blocks
from precast._ops.quantize._reference_blocks import dequantize_e2m1, dequantize_mxfp8
from precast._ops.quantize._trace_blocks import dequantize_trace, dequantize_trace_by_dtype
from precast._ops.quantize.sf_layout import LAYOUT_KIND, SfLayout, layout_of_flags
from precast.api_logging import precast_api
from precast.trace import Scalar, TraceTemplate, dispatch


def _unpacked_output(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor for twice as many numbers in the last dimension."""
    *leading, columns = packed.shape
    return packed.new_empty(*leading, columns * 2, dtype=dtype)


def mxfp4_dequantize_reference(
    a_fp4: torch.Tensor, a_sf: torch.Tensor, sfLayout: int = 0
) -> torch.Tensor:
    """:func:`mxfp4_dequantize` in plain PyTorch on any device."""
    return dequantize_e2m1(a_fp4, a_sf, None, 32, False, sfLayout)


def e2m1_and_ufp8sf_scale_to_float_reference(
    e2m1_tensor: torch.Tensor,
    ufp8_scale_tensor: torch.Tensor,
    global_scale_tensor: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> torch.Tensor:
    """:func:`e2m1_and_ufp8sf_scale_to_float` in plain PyTorch on any device."""
    layout = layout_of_flags(is_sf_swizzled_layout, is_sf_8x4_layout)
    used = global_scale_tensor if ufp8_type == 1 else None
    return dequantize_e2m1(
        e2m1_tensor, ufp8_scale_tensor, used, sf_vec_size, ufp8_type == 1, layout
    )


_MXFP4_DEQUANTIZE = Export(
    "block_dequantize",
    "mxfp4_dequantize",
    "a_fp4:u8[*rows(1-),packed] a_sf:u8 out!:T=f32 sfLayout:layout enable_pdl:pdl_on",
    reference=mxfp4_dequantize_reference,
    check=dequantized_blocks("a_fp4", "a_sf", 32, "sfLayout"),
    new={"out": lambda a_fp4: _unpacked_output(a_fp4, torch.float32)},
    kinds=LAYOUT_KIND,
)
_E2M1_TO_FLOAT = Export(
    "block_dequantize",
    "e2m1_and_ufp8sf_scale_to_float",
    "e2m1_tensor:u8[*rows(1-),packed] ufp8_scale_tensor:u8 global_scale_tensor?:f32[.] out!:T=f32 "
    "sf_vec_size:int ufp8_type:int sf_layout:int enable_pdl:pdl_on",
    reference=e2m1_and_ufp8sf_scale_to_float_reference,
    check=dequantized_blocks("e2m1_tensor", "ufp8_scale_tensor", "sf_vec_size", "sf_layout"),
    derived={
        "is_sf_swizzled_layout": lambda sf_layout: sf_layout != SfLayout.layout_linear,
        "is_sf_8x4_layout": lambda sf_layout: sf_layout == SfLayout.layout_8x4,
    },
)


@precast_api(
    trace=dequantize_trace(
        _MXFP4_DEQUANTIZE,
        "float32 from e2m1 in blocks of 32 with scales that are powers of two.",
        mxfp4_dequantize_reference,
        32,
    )
)
@launches(_MXFP4_DEQUANTIZE)
def mxfp4_dequantize(
    a_fp4: torch.Tensor, a_sf: torch.Tensor, sfLayout: SfLayout = SfLayout.layout_128x4
) -> torch.Tensor:
    r"""Dequantise MXFP4 to float32.

    .. math:: out = q \cdot 2^{s - 127}

    Parameters
    ----------
    a_fp4 : torch.Tensor
        ``[..., columns // 2]``, at least 2 dimensions, uint8, contiguous, 16-byte aligned, on a
        CUDA device; columns are a multiple of 32. The first number is in the lower 4 bits.
    a_sf : torch.Tensor
        Scales of the rows and ``columns // 32`` blocks with the layout's padding, in any shape,
        uint8, contiguous, on the device of ``a_fp4``.
    sfLayout : SfLayout
        Where the scales lie.

    Returns
    -------
    torch.Tensor
        ``[..., columns]``, float32, on the device of ``a_fp4``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape or strides other than above.

    Notes
    -----
    Exact; the scale 255 is NaN. FlashInfer's function copies to the CPU and returns a tensor
    there; this one runs on the GPU. Allocates its result; safe in CUDA graphs; not differentiable.
    Source: OCP Microscaling Formats (MX) Specification 1.0.

    Examples
    --------
    >>> import torch, precast
    >>> packed = torch.full((1, 16), 0x72, dtype=torch.uint8)
    >>> with precast.reference_mode():
    ...     linear = precast.SfLayout.layout_linear
    ...     precast.mxfp4_dequantize(packed, torch.tensor([[128]]).byte(), linear)[0, :2]
    tensor([ 2., 12.])
    """


_E4M3 = dequantize_trace(
    _E2M1_TO_FLOAT,
    "float32 from e2m1 in blocks with e4m3 scales and one fp32 scale.",
    e2m1_and_ufp8sf_scale_to_float_reference,
    "sf_vec_size",
    extra={"sf_vec_size": Scalar("int32")},
)
_UE8M0 = dequantize_trace(
    _E2M1_TO_FLOAT,
    "float32 from e2m1 in blocks with scales that are powers of two.",
    e2m1_and_ufp8sf_scale_to_float_reference,
    "sf_vec_size",
    suffix="_ue8m0",
    global_scale=False,
    extra={"sf_vec_size": Scalar("int32")},
    fixed={"ufp8_type": 0},
)


@dispatch(_E4M3, _UE8M0)
def _trace(ufp8_type: int = 1, **others: Any) -> TraceTemplate:
    return _E4M3 if ufp8_type == 1 else _UE8M0


@precast_api(trace=_trace)
@op("block_dequantize")
def e2m1_and_ufp8sf_scale_to_float(
    e2m1_tensor: torch.Tensor,
    ufp8_scale_tensor: torch.Tensor,
    global_scale_tensor: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> torch.Tensor:
    r"""Dequantise packed e2m1 with the scales of NVFP4 or MXFP4 to float32.

    .. math:: out = (q \cdot s) \cdot g

    Parameters
    ----------
    e2m1_tensor : torch.Tensor
        ``[..., columns // 2]``, at least 2 dimensions, uint8, contiguous, 16-byte aligned, on a
        CUDA device; columns are a multiple of ``sf_vec_size``. The first number is in the lower
        4 bits.
    ufp8_scale_tensor : torch.Tensor
        Scales of the rows and ``columns // sf_vec_size`` blocks with the layout's padding, in any
        shape, uint8, contiguous.
    global_scale_tensor : torch.Tensor, optional
        ``g``, one float32: the reciprocal of what :func:`nvfp4_quantize` was given. Needed for
        ``ufp8_type=1``, not read otherwise.
    sf_vec_size : int
        Elements of a block: 16 or 32.
    ufp8_type : int
        0 for scales in ue8m0, 1 for e4m3.
    is_sf_swizzled_layout : bool
        Scales in tiles, otherwise linear.
    is_sf_8x4_layout : bool
        Tiles of 8x4, otherwise of 128x4; only with ``is_sf_swizzled_layout``.

    Returns
    -------
    torch.Tensor
        ``[..., columns]``, float32, on the device of ``e2m1_tensor``.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, number or strides other than above.

    Notes
    -----
    The first product is exact, the second one float32. FlashInfer's function copies to the CPU and
    returns a tensor there; this one runs on the GPU. Allocates its result; safe in CUDA graphs; not
    differentiable. Source: OCP Microscaling Formats (MX) Specification 1.0.

    Examples
    --------
    >>> import torch, precast
    >>> packed = torch.full((1, 8), 0x72, dtype=torch.uint8)
    >>> scales = torch.full((1, 1), 1.5).to(torch.float8_e4m3fn).view(torch.uint8)
    >>> with precast.reference_mode():
    ...     precast.e2m1_and_ufp8sf_scale_to_float(
    ...         packed, scales, torch.tensor([0.5]), is_sf_swizzled_layout=False
    ...     )[0, :2]
    tensor([0.7500, 4.5000])
    """
    export = "e2m1_and_ufp8sf_scale_to_float"
    if sf_vec_size not in (16, 32):
        raise ValueError(f"{export}: sf_vec_size must be 16 or 32, got {sf_vec_size}")
    if ufp8_type not in (0, 1):
        raise ValueError(f"{export}: ufp8_type must be 0 (ue8m0) or 1 (e4m3), got {ufp8_type}")
    if is_sf_8x4_layout and not is_sf_swizzled_layout:
        raise ValueError(f"{export}: is_sf_8x4_layout must be False for a linear layout, got True")
    if ufp8_type == 1 and global_scale_tensor is None:
        raise ValueError(
            f"{export}: global_scale_tensor must be a tensor with ufp8_type=1, got None"
        )
    layout = layout_of_flags(is_sf_swizzled_layout, is_sf_8x4_layout)
    number = global_scale_tensor if ufp8_type == 1 else None
    out = _unpacked_output(e2m1_tensor, torch.float32)
    _E2M1_TO_FLOAT.launch(
        e2m1_tensor, ufp8_scale_tensor, number, out, sf_vec_size, ufp8_type, layout
    )
    return out


def mxfp8_dequantize_reference(
    input: torch.Tensor,
    scale_tensor: torch.Tensor,
    sfLayout: int = 0,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`mxfp8_dequantize` in plain PyTorch on any device."""
    return dequantize_mxfp8(input, scale_tensor, sfLayout).to(output_dtype or torch.float32)


_MXFP8_DEQUANTIZE = Export(
    "block_dequantize",
    "mxfp8_dequantize",
    "input:e4m3[*rows(1-),columns] scale_tensor:u8 out!:T=f32|f16|bf16 sfLayout:layout "
    "enable_pdl:pdl_on",
    reference=mxfp8_dequantize_reference,
    check=dequantized_blocks("input", "scale_tensor", 32, "sfLayout"),
    new={
        "out": "input.new_empty(*input.shape, "
        "dtype=_torch.float32 if output_dtype is None else output_dtype)"
    },
    derived={"output_dtype": lambda out: out.dtype},
    kinds=LAYOUT_KIND,
)


@precast_api(
    trace=dequantize_trace_by_dtype(
        _MXFP8_DEQUANTIZE,
        "Dequantised e4m3 in blocks of 32 with scales that are powers of two.",
        mxfp8_dequantize_reference,
        32,
        "float32",
        "float16",
        "bfloat16",
    )
)
@launches(_MXFP8_DEQUANTIZE)
@documented(mxfp4_dequantize)
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


def nvfp4_kv_dequantize_reference(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`nvfp4_kv_dequantize` in plain PyTorch on any device."""
    values = dequantize_e2m1(fp4_data, block_scales, global_scale, 16, True, 2)
    return values.to(output_dtype or torch.bfloat16)


_NVFP4_KV_DEQUANTIZE = Export(
    "block_dequantize",
    "nvfp4_kv_dequantize",
    "fp4_data:u8[*rows(1-),packed] block_scales:u8 global_scale:f32[.] out!:T=f32|f16|bf16 "
    "enable_pdl:pdl_on",
    reference=nvfp4_kv_dequantize_reference,
    check=dequantized_blocks("fp4_data", "block_scales", 16, 2),
    new={
        "out": lambda fp4_data, output_dtype: _unpacked_output(
            fp4_data, torch.bfloat16 if output_dtype is None else output_dtype
        )
    },
    derived={"output_dtype": lambda out: out.dtype},
)


@precast_api(
    trace=dequantize_trace_by_dtype(
        _NVFP4_KV_DEQUANTIZE,
        "Dequantised e2m1 in blocks of 16 with linear e4m3 scales and one fp32 scale.",
        nvfp4_kv_dequantize_reference,
        16,
        "bfloat16",
        "float16",
        "float32",
    )
)
@launches(_NVFP4_KV_DEQUANTIZE)
def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    r"""Dequantise an NVFP4 key-value cache, whose scales are linear.

    .. math:: out = \mathrm{round}((q \cdot s) \cdot g)

    Parameters
    ----------
    fp4_data : torch.Tensor
        ``[..., columns // 2]``, at least 2 dimensions, uint8, contiguous, 16-byte aligned, on a
        CUDA device; columns are a multiple of 16. The first number is in the lower 4 bits.
    block_scales : torch.Tensor
        ``[..., columns // 16]``, the bytes of e4m3, uint8, contiguous, on the device of
        ``fp4_data``.
    global_scale : torch.Tensor
        ``g``, one float32 on the device of ``fp4_data``: the reciprocal of what
        :func:`nvfp4_quantize` was given.
    output_dtype : torch.dtype, optional
        bfloat16, float16 or float32. Default: bfloat16.

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
    The first product is exact, the second one float32, rounded once to nearest even. Allocates its
    result; safe in CUDA graphs; not differentiable. Source: arXiv:2509.25149.

    Examples
    --------
    >>> import torch, precast
    >>> packed = torch.full((1, 8), 0x72, dtype=torch.uint8)
    >>> scales = torch.full((1, 1), 1.5).to(torch.float8_e4m3fn).view(torch.uint8)
    >>> with precast.reference_mode():
    ...     precast.nvfp4_kv_dequantize(packed, scales, torch.tensor([0.5]))[0, :2]
    tensor([0.7500, 4.5000], dtype=torch.bfloat16)
    """
