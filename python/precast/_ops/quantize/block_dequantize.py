# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of packed e2m1: MXFP4, also on the CPU, and NVFP4 in all layouts of its scales.

Sources: OCP Microscaling Formats (MX) Specification 1.0; NVIDIA, Pretraining Large Language Models
with NVFP4, arXiv:2509.25149.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches, op
from precast._op.validation import check_dtype, check_rank
from precast._ops.quantize._reference_blocks import dequantize_blocks, e2m1_unpack
from precast._ops.quantize._trace_blocks import dequantize_trace, dequantize_trace_by_dtype
from precast._ops.quantize.mxfp8 import mxfp8_dequantize, mxfp8_dequantize_host
from precast._ops.quantize.sf_layout import (
    BLOCKS,
    LAYOUT_FLAGS,
    LAYOUT_KIND,
    SfLayout,
    check_dequantized_blocks,
    check_host,
    dequantized_blocks,
    layout_of_flags,
)
from precast.api_logging import precast_api
from precast.trace import TraceTemplate, dispatch


def _unpacked_output(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor for twice as many numbers in the last dimension."""
    *leading, columns = packed.shape
    return packed.new_empty(*leading, columns * 2, dtype=dtype)


def mxfp4_dequantize_reference(
    a_fp4: torch.Tensor, a_sf: torch.Tensor, sfLayout: int = 0
) -> torch.Tensor:
    """:func:`mxfp4_dequantize` in plain PyTorch on any device."""
    return dequantize_blocks(e2m1_unpack(a_fp4), a_sf, 32, sfLayout)


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
    elements = e2m1_unpack(e2m1_tensor)
    return dequantize_blocks(elements, ufp8_scale_tensor, sf_vec_size, layout, ufp8_type == 1, used)


_MXFP4_DEQUANTIZE = Export(
    "block_dequantize",
    "mxfp4_dequantize",
    "a_fp4:u8[*rows(1-),packed] a_sf:u8 out!:T=f32 sfLayout:layout enable_pdl:pdl_on",
    reference=mxfp4_dequantize_reference,
    check=dequantized_blocks("a_fp4", "a_sf", 32, "sfLayout"),
    new={"out": lambda a_fp4: _unpacked_output(a_fp4, torch.float32)},
    kinds=LAYOUT_KIND,
    on_host=True,
)
_E2M1_TO_FLOAT = Export(
    "block_dequantize",
    "e2m1_and_ufp8sf_scale_to_float",
    "e2m1_tensor:u8[*rows(1-),packed] ufp8_scale_tensor:u8 global_scale_tensor?:f32[.] out!:T=f32 "
    "sf_vec_size:int ufp8_type:int sf_layout:int enable_pdl:pdl_on",
    reference=e2m1_and_ufp8sf_scale_to_float_reference,
    check=dequantized_blocks("e2m1_tensor", "ufp8_scale_tensor", "sf_vec_size", "sf_layout"),
    derived=LAYOUT_FLAGS,
    on_host=True,
)


@precast_api(
    trace=dequantize_trace(
        _MXFP4_DEQUANTIZE,
        "float32 from e2m1 in blocks of 32 with scales that are powers of two.",
        32,
    )
)
@launches(_MXFP4_DEQUANTIZE)
@documented(BLOCKS)
def mxfp4_dequantize(
    a_fp4: torch.Tensor, a_sf: torch.Tensor, sfLayout: SfLayout = SfLayout.layout_128x4
) -> torch.Tensor:
    r"""Dequantise MXFP4, in blocks of 32, to float32.

    .. math:: out = q \cdot 2^{s - 127}

    Returns
    -------
    torch.Tensor
        ``[..., columns]``, float32, on the same device.

    Notes
    -----
    Exact; the scale 255 is NaN. FlashInfer's function copies to the CPU and returns a tensor
    there; this one runs where the tensors are, on the CPU in plain PyTorch. Allocates its result;
    safe in CUDA graphs; not differentiable.
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


@precast_api
@documented(mxfp8_dequantize_host)
def mxfp4_dequantize_host(
    weight: torch.Tensor, scale: torch.Tensor, group_size: int = 32
) -> torch.Tensor:
    r"""Dequantise MXFP4 to float32 on the CPU.

    .. math:: out = q \cdot 2^{s - 127}

    Parameters
    ----------
    weight : torch.Tensor
        ``[rows, columns // 2]``, uint8, a CPU tensor; the first number is in the lower 4 bits.
    scale : torch.Tensor
        ``[rows, columns // group_size]``, uint8, linear, a CPU tensor.
    group_size : int
        Elements of a block, an even number.

    Examples
    --------
    >>> import torch, precast
    >>> packed = torch.full((1, 16), 0x72, dtype=torch.uint8)
    >>> precast.mxfp4_dequantize_host(packed, torch.tensor([[128]]).byte())[0, :2]
    tensor([ 2., 12.])
    """
    export = "mxfp4_dequantize_host"
    check_host(export, weight=weight, scale=scale)
    if group_size <= 0 or group_size % 2:
        raise ValueError(f"{export}: group_size must be positive and even, got {group_size}")
    check_dtype(export, "weight", weight, torch.uint8)
    check_dtype(export, "scale", scale, torch.uint8)
    check_rank(export, "weight", weight, 2, None)
    check_dequantized_blocks(export, "weight", weight, "scale", scale, group_size, 2)
    if weight.dim() != 2 or scale.dim() != 2 or weight.shape[0] != scale.shape[0]:
        raise ValueError(
            f"{export}: weight and scale must be 2-D with as many rows, got shapes "
            f"{[*weight.shape]} and {[*scale.shape]}"
        )
    with torch.no_grad():
        return dequantize_blocks(e2m1_unpack(weight), scale, group_size, 2)


_E4M3 = dequantize_trace(
    _E2M1_TO_FLOAT,
    "float32 from e2m1 in blocks with e4m3 scales and one fp32 scale.",
    "sf_vec_size",
)
_UE8M0 = dequantize_trace(
    _E2M1_TO_FLOAT,
    "float32 from e2m1 in blocks with scales that are powers of two.",
    "sf_vec_size",
    {"ufp8_type": 0},
)


@dispatch(_E4M3, _UE8M0)
def _trace(ufp8_type: int = 1, **others: Any) -> TraceTemplate:
    return _E4M3 if ufp8_type == 1 else _UE8M0


@precast_api(trace=_trace)
@op("block_dequantize")
@documented(BLOCKS, mxfp4_dequantize)
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
    global_scale_tensor : torch.Tensor, optional
        ``g``, one float32: the reciprocal of what :func:`nvfp4_quantize` was given. Needed for
        ``ufp8_type=1``, not read otherwise.
    sf_vec_size : int
        Elements of a block: 16 or 32.
    ufp8_type : int
        0 for scales in ue8m0, 1 for e4m3.

    Notes
    -----
    The first product is exact, the second one float32. FlashInfer's function copies to the CPU and
    returns a tensor there; this one runs where the tensors are, on the CPU in plain PyTorch.
    Allocates its result; safe in CUDA graphs; not differentiable. Source: OCP Microscaling Formats
    (MX) Specification 1.0.

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


def nvfp4_kv_dequantize_reference(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """:func:`nvfp4_kv_dequantize` in plain PyTorch on any device."""
    values = dequantize_blocks(e2m1_unpack(fp4_data), block_scales, 16, 2, True, global_scale)
    return values.to(output_dtype)


_NVFP4_KV_DEQUANTIZE = Export(
    "block_dequantize",
    "nvfp4_kv_dequantize",
    "fp4_data:u8[*rows(1-),packed] block_scales:u8 global_scale:f32[.] out!:T=f32|f16|bf16 "
    "enable_pdl:pdl_on",
    reference=nvfp4_kv_dequantize_reference,
    check=dequantized_blocks("fp4_data", "block_scales", 16, 2),
    new={"out": lambda fp4_data, output_dtype: _unpacked_output(fp4_data, output_dtype)},
    derived={"output_dtype": lambda out: out.dtype},
)


@precast_api(
    trace=dequantize_trace_by_dtype(
        _NVFP4_KV_DEQUANTIZE,
        "Dequantised e2m1 in blocks of 16 with linear e4m3 scales and one fp32 scale.",
        16,
        "bfloat16",
        "float16",
        "float32",
    )
)
@launches(_NVFP4_KV_DEQUANTIZE)
@documented(BLOCKS, mxfp8_dequantize)
def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor,
    output_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    r"""Dequantise an NVFP4 key-value cache, in blocks of 16 with linear scales.

    .. math:: out = \mathrm{round}((q \cdot s) \cdot g)

    Parameters
    ----------
    block_scales : torch.Tensor
        ``[..., columns // 16]``, the bytes of e4m3, uint8, contiguous, on the device of
        ``fp4_data``.
    global_scale : torch.Tensor
        ``g``, one float32 on the device of ``fp4_data``: the reciprocal of what
        :func:`nvfp4_quantize` was given.
    output_dtype : torch.dtype
        bfloat16, float16 or float32.

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
