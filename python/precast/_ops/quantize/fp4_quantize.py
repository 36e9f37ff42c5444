# SPDX-License-Identifier: Apache-2.0
"""Quantisation to e2m1 with FlashInfer's older arguments: NVFP4 or MXFP4.

Sources: those of :mod:`nvfp4_quantize` and :mod:`mxfp4_quantize`.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._ops.quantize._block_outputs import float32_on_device, packed_outputs
from precast._ops.quantize._block_validation import check_backend, check_quantized_blocks
from precast._ops.quantize._reference_blocks import quantize_mxfp4, quantize_nvfp4
from precast._ops.quantize._trace_blocks import Layout, quantize_trace
from precast._ops.quantize.sf_layout import SfLayout, layout_of_flags
from precast.api_logging import precast_api
from precast.trace import Scalar, TraceTemplate, dispatch


def fp4_quantize_reference(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fp4_quantize` in plain PyTorch on any device, the same bits.

    Examples
    --------
    >>> import torch
    >>> q, scales = fp4_quantize_reference(torch.arange(32.0)[None], None, 32, True, False)
    >>> scales.tolist()
    [[130]]
    """
    _check_recipe(sf_vec_size, sf_use_ue8m0)
    _check_global_scale(global_scale, sf_use_ue8m0)
    layout = layout_of_flags(is_sf_swizzled_layout, is_sf_8x4_layout)
    if sf_use_ue8m0:
        return quantize_mxfp4(input, layout)
    assert global_scale is not None
    return quantize_nvfp4(input, global_scale, layout, is_global_scale_inversed)


def _check_recipe(sf_vec_size: int, sf_use_ue8m0: bool) -> None:
    if sf_vec_size not in (16, 32):
        raise NotImplementedError(
            f"fp4_quantize: sf_vec_size can only be 16 or 32, got {sf_vec_size}"
        )
    if sf_use_ue8m0 != (sf_vec_size == 32):
        raise ValueError(
            f"fp4_quantize: sf_vec_size must be {32 if sf_use_ue8m0 else 16} with "
            f"sf_use_ue8m0={sf_use_ue8m0}, got {sf_vec_size}"
        )


def _check_global_scale(global_scale: torch.Tensor | None, sf_use_ue8m0: bool) -> None:
    if global_scale is None and not sf_use_ue8m0:
        raise ValueError(
            "fp4_quantize: global_scale must be a tensor unless sf_use_ue8m0, got None"
        )


def _check(
    export: str,
    input: torch.Tensor,
    global_scale: torch.Tensor | None,
    sf_use_ue8m0: bool,
    sf_layout: int,
) -> None:
    _check_global_scale(global_scale, sf_use_ue8m0)
    block, used = (32, None) if sf_use_ue8m0 else (16, global_scale)
    check_quantized_blocks(export, "input", input, block, sf_layout, "global_scale", used)


_FP4_QUANTIZE = Export(
    "block_quantize",
    "fp4_quantize",
    "input:T=f16|bf16[*rows(1-),columns] global_scale?:f32 out!:u8 out_sf!:u8 sf_use_ue8m0:bool "
    "sf_layout:int is_global_scale_inversed:bool enable_pdl:pdl",
    reference=fp4_quantize_reference,
    check=_check,
    derived={
        "sf_vec_size": lambda sf_use_ue8m0: 32 if sf_use_ue8m0 else 16,
        "is_sf_swizzled_layout": lambda sf_layout: sf_layout != SfLayout.layout_linear,
        "is_sf_8x4_layout": lambda sf_layout: sf_layout == SfLayout.layout_8x4,
    },
)
_NVFP4 = quantize_trace(
    "fp4_quantize",
    "NVFP4: e2m1 in blocks of 16 with e4m3 scales under one fp32 scale.",
    fp4_quantize_reference,
    input="input",
    global_scale="global_scale",
    layout=Layout.of_flags(),
    block=16,
    extra={"is_global_scale_inversed": Scalar("bool")},
)
_MXFP4 = quantize_trace(
    "fp4_quantize_ue8m0",
    "MXFP4: e2m1 in blocks of 32 with scales that are powers of two.",
    fp4_quantize_reference,
    input="input",
    layout=Layout.of_flags(),
    block=32,
    fixed={"sf_vec_size": 32, "sf_use_ue8m0": True},
)


@dispatch(_NVFP4, _MXFP4)
def _trace(input: Any, sf_use_ue8m0: bool = False, **others: Any) -> TraceTemplate:
    if input.stride(-1) != 1 and input.stride(-2) == 1:
        raise ValueError(f"{_NVFP4!r}: only calls with rows of stride 1 have a definition")
    return _MXFP4 if sf_use_ue8m0 else _NVFP4


@precast_api(trace=_trace)
@op("block_quantize")
def fp4_quantize(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise to e2m1 in blocks of a row: NVFP4, or MXFP4 if ``sf_use_ue8m0``.

    As :func:`nvfp4_quantize` and :func:`mxfp4_quantize`, with FlashInfer's older arguments.

    Parameters
    ----------
    input : torch.Tensor
        ``[..., columns]``, at least 2 dimensions, float16 or bfloat16, on a CUDA device; columns
        are a multiple of ``sf_vec_size`` with stride 1, the others merge into at most two
        strides.
    global_scale : torch.Tensor, optional
        ``[1]`` or ``[rows]``, float32; needed for NVFP4, not read for MXFP4.
    sf_vec_size : int
        Elements of a block: 16 for NVFP4, 32 for MXFP4.
    sf_use_ue8m0 : bool
        MXFP4.
    is_sf_swizzled_layout : bool
        Scales in tiles, otherwise linear.
    is_sf_8x4_layout : bool
        Tiles of 8x4, otherwise of 128x4.
    is_global_scale_inversed : bool
        ``global_scale`` is the reciprocal of what it is in :func:`nvfp4_quantize`.
    backend : str
        Only ``"cuda"``.

    Returns
    -------
    tuple of torch.Tensor
        ``[..., columns // 2]``, and the scales, ``[rows, columns // sf_vec_size]`` with the
        layout's padding; uint8.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape or strides other than above; block
        size and scale format that do not go together; another backend.
    NotImplementedError
        ``sf_vec_size`` is neither 16 nor 32.

    Notes
    -----
    If the last two dimensions of ``input`` are column-major, their transpose is quantised and the
    results are transposed. Allocates its results; safe in CUDA graphs; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     q, scales = precast.fp4_quantize(torch.ones(1, 16).half(), torch.tensor([6.0]))
    >>> q.shape, scales.shape, scales[0, 0].view(torch.float8_e4m3fn).item()
    (torch.Size([1, 8]), torch.Size([128, 4]), 1.0)
    """
    _check_recipe(sf_vec_size, sf_use_ue8m0)
    if backend != "cuda":
        check_backend("fp4_quantize", backend)
    layout = layout_of_flags(is_sf_swizzled_layout, is_sf_8x4_layout)
    transposed = input.dim() >= 2 and input.stride(-2) == 1 and input.stride(-1) != 1
    if transposed:
        input = input.transpose(-2, -1)
    if global_scale is not None:
        global_scale = float32_on_device(global_scale, input)
    out, out_sf = packed_outputs(input, sf_vec_size, layout)
    _FP4_QUANTIZE.launch(
        input,
        global_scale,
        out,
        out_sf,
        sf_use_ue8m0,
        layout,
        is_global_scale_inversed,
        enable_pdl,
    )
    if transposed:
        return out.transpose(-2, -1), out_sf.transpose(-2, -1)
    return out, out_sf
