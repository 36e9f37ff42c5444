# SPDX-License-Identifier: Apache-2.0
"""Quantisation to e2m1: NVFP4, MXFP4, and either with FlashInfer's older arguments.

Sources: NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149; OCP Microscaling
Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import math
from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._ops.quantize._reference_blocks import quantize_e2m1, scale_shape
from precast._ops.quantize._trace_blocks import quantize_trace
from precast._ops.quantize.sf_layout import (
    BLOCKS,
    LAYOUT_FLAGS,
    SfLayout,
    check_backend,
    check_quantized_blocks,
    layout_of_flags,
)
from precast.api_logging import precast_api
from precast.trace import TraceTemplate, dispatch

_NVFP4 = "NVFP4: e2m1 in blocks of 16 with e4m3 scales under one fp32 scale."
_MXFP4 = "MXFP4: e2m1 in blocks of 32 with scales that are powers of two."


def _packed_outputs(
    input: torch.Tensor, block: int, layout: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate tensors for packed e2m1 and its scales, both uint8."""
    shape = input.shape
    rows = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
    columns = shape[-1]
    out = input.new_empty(*shape[:-1], columns // 2, dtype=torch.uint8)
    # Made from `out`, which has its dtype: naming one costs half a microsecond.
    return out, out.new_empty(*scale_shape(rows, columns // block, layout))


def _float32_on_device(scale: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return ``scale``, converted if it has another dtype or device, as FlashInfer does."""
    if scale.dtype is torch.float32 and scale.get_device() == input.get_device():
        return scale
    return scale.to(device=input.device, dtype=torch.float32)


def _refuse(export: str, **options: Any) -> None:
    """Raise for options of FlashInfer that have no kernel here; None is what is legal."""
    for name, value in options.items():
        if value is not None:
            legal = "False" if value is True else "None"
            raise NotImplementedError(
                f"{export}: {name} must be {legal}, got {type(value).__name__}. Fix: leave it out"
            )


def nvfp4_quantize_reference(
    a: torch.Tensor, a_global_sf: torch.Tensor, sfLayout: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`nvfp4_quantize` in plain PyTorch on any device, the same bits."""
    return quantize_e2m1(a, sfLayout, a_global_sf)


_NVFP4_QUANTIZE = Export(
    "block_quantize",
    "nvfp4_quantize",
    "a:T=f16|bf16[*rows(1-),columns] a_global_sf:f32 out!:u8 out_sf!:u8 sfLayout:int "
    "enable_pdl:pdl",
    reference=nvfp4_quantize_reference,
    check=lambda export, a, a_global_sf, sfLayout: check_quantized_blocks(
        export, "a", a, 16, sfLayout, "a_global_sf", a_global_sf
    ),
)


@precast_api(trace=quantize_trace(_NVFP4_QUANTIZE, _NVFP4, 16))
@op("block_quantize")
@documented(BLOCKS)
def nvfp4_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    per_token_activation: bool = False,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    nvfp4_4over6: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise to NVFP4: e2m1 in blocks of 16, a scale in e4m3 for each, one in float32 for all.

    .. math::

        s = \mathrm{e4m3}\left(g \cdot (\max|x| \cdot \tfrac{1}{6})\right), \quad
        q = \mathrm{e2m1}\left(x \cdot \frac{1}{s \cdot \frac{1}{g}}\right)

    Parameters
    ----------
    a_global_sf : torch.Tensor
        ``[1]``, or ``[rows]`` for one of each row, float32: ``g``, usually
        ``448 * 6 / max(abs(a))``, the reciprocal of what dequantisation multiplies by.
    do_shuffle : bool
        Only False.
    sf_vec_size : int
        Only 16.
    per_token_activation : bool
        Only False: FlashInfer's scales for each token are for its MoE kernels of compute
        capability 10.0. ``a_global_sf`` may have one scale for each row.
    expanded_idx_to_permuted_idx, out_scale : torch.Tensor, optional
        Only None; options of ``per_token_activation``.
    nvfp4_4over6 : object
        Only None: each block takes the scale of the formula above. FlashInfer can try two.

    Returns
    -------
    tuple of torch.Tensor
        ``[..., columns // 2]``, two numbers a byte, the first in the lower 4 bits; and the scales
        as bytes of e4m3, or ``e + 127`` in MXFP4, ``[rows, columns // block]``, for tiled layouts
        with rows padded to 128 (8) and columns to 4, by zeros, in the layout's order; uint8.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape or strides other than above.
    NotImplementedError
        ``do_shuffle``, another ``sf_vec_size``, or an option that may only be False or None.

    Notes
    -----
    Every operation is float32, rounded once; conversions round to nearest even and saturate. A
    block whose scale rounds to 0 becomes zeros; NaN is left out of the maximum and becomes 6; the
    maximum of a block with infinity saturates its scale. FlashInfer takes reciprocals that are
    rounded less well, so a number that lies on a tie may differ by one step. Allocates its
    results, and converts an ``a_global_sf`` of another dtype or device; safe in CUDA graphs
    without that; not differentiable. Source: arXiv:2509.25149.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     q, scales = precast.nvfp4_quantize(torch.ones(1, 16).half(), torch.tensor([6.0]))
    >>> q.shape, scales.shape, scales[0, 0].view(torch.float8_e4m3fn).item()
    (torch.Size([1, 8]), torch.Size([128, 4]), 1.0)
    """
    if do_shuffle or sf_vec_size != 16:
        raise NotImplementedError(
            f"nvfp4_quantize: do_shuffle must be False and sf_vec_size 16, got {do_shuffle} and "
            f"{sf_vec_size}"
        )
    if (
        per_token_activation
        or expanded_idx_to_permuted_idx is not None
        or out_scale is not None
        or nvfp4_4over6 is not None
    ):
        _refuse(
            "nvfp4_quantize",
            per_token_activation=per_token_activation or None,
            expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx,
            out_scale=out_scale,
            nvfp4_4over6=nvfp4_4over6,
        )
    if backend != "cuda":
        check_backend("nvfp4_quantize", backend)
    layout = int(sfLayout)
    a_global_sf = _float32_on_device(a_global_sf, a)
    out, out_sf = _packed_outputs(a, 16, layout)
    _NVFP4_QUANTIZE.launch(a, a_global_sf, out, out_sf, layout, enable_pdl)
    return out, out_sf


def mxfp4_quantize_reference(
    a: torch.Tensor, sfLayout: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`mxfp4_quantize` in plain PyTorch on any device, the same bits."""
    return quantize_e2m1(a, sfLayout)


_MXFP4_QUANTIZE = Export(
    "block_quantize",
    "mxfp4_quantize",
    "a:T=f16|bf16[*rows(1-),columns] out!:u8 out_sf!:u8 sfLayout:int enable_pdl:pdl",
    reference=mxfp4_quantize_reference,
    check=lambda export, a, sfLayout: check_quantized_blocks(export, "a", a, 32, sfLayout),
)


@precast_api(trace=quantize_trace(_MXFP4_QUANTIZE, _MXFP4, 32))
@op("block_quantize")
@documented(BLOCKS, nvfp4_quantize)
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
    out, out_sf = _packed_outputs(a, 32, layout)
    _MXFP4_QUANTIZE.launch(a, out, out_sf, layout, enable_pdl)
    return out, out_sf


def fp4_quantize_reference(
    input: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fp4_quantize` in plain PyTorch on any device, the same bits."""
    _check_recipe(sf_vec_size, sf_use_ue8m0)
    _check_global_scale(global_scale, sf_use_ue8m0)
    layout = layout_of_flags(is_sf_swizzled_layout, is_sf_8x4_layout)
    used = None if sf_use_ue8m0 else global_scale
    return quantize_e2m1(input, layout, used, is_global_scale_inversed)


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


def _check_fp4(
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
    check=_check_fp4,
    derived={**LAYOUT_FLAGS, "sf_vec_size": lambda sf_use_ue8m0: 32 if sf_use_ue8m0 else 16},
)
_OF_NVFP4 = quantize_trace(_FP4_QUANTIZE, _NVFP4, 16)
_OF_MXFP4 = quantize_trace(_FP4_QUANTIZE, _MXFP4, 32, {"sf_vec_size": 32, "sf_use_ue8m0": True})


@dispatch(_OF_NVFP4, _OF_MXFP4)
def _trace(input: Any, sf_use_ue8m0: bool = False, **others: Any) -> TraceTemplate:
    if input.stride(-1) != 1 and input.stride(-2) == 1:
        raise ValueError(f"{_OF_NVFP4!r}: only calls with rows of stride 1 have a definition")
    return _OF_MXFP4 if sf_use_ue8m0 else _OF_NVFP4


@precast_api(trace=_trace)
@op("block_quantize")
@documented(BLOCKS, nvfp4_quantize)
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
    nvfp4_4over6: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise to e2m1 in blocks of a row: NVFP4, or MXFP4 if ``sf_use_ue8m0``.

    It does what :func:`nvfp4_quantize` and :func:`mxfp4_quantize` do, with FlashInfer's older
    arguments.

    Parameters
    ----------
    global_scale : torch.Tensor, optional
        ``[1]`` or ``[rows]``, float32; needed for NVFP4, not read for MXFP4.
    sf_vec_size : int
        Elements of a block: 16 for NVFP4, 32 for MXFP4.
    sf_use_ue8m0 : bool
        MXFP4.
    is_global_scale_inversed : bool
        ``global_scale`` is the reciprocal of what it is in :func:`nvfp4_quantize`.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape or strides other than above; block
        size and scale format that do not go together; another backend.
    NotImplementedError
        ``sf_vec_size`` is neither 16 nor 32; ``nvfp4_4over6`` is not None.

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
    if nvfp4_4over6 is not None:
        _refuse("fp4_quantize", nvfp4_4over6=nvfp4_4over6)
    if backend != "cuda":
        check_backend("fp4_quantize", backend)
    layout = layout_of_flags(is_sf_swizzled_layout, is_sf_8x4_layout)
    transposed = input.dim() >= 2 and input.stride(-2) == 1 and input.stride(-1) != 1
    if transposed:
        input = input.transpose(-2, -1)
    if global_scale is not None:
        global_scale = _float32_on_device(global_scale, input)
    out, out_sf = _packed_outputs(input, sf_vec_size, layout)
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
