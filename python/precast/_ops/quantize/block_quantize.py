# SPDX-License-Identifier: Apache-2.0
"""Quantisation to NVFP4.

Source: NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._ops.quantize._block_outputs import float32_on_device, packed_outputs
from precast._ops.quantize._block_validation import check_backend, check_quantized_blocks
from precast._ops.quantize._reference_blocks import quantize_nvfp4
from precast._ops.quantize._trace_blocks import Layout, quantize_trace
from precast._ops.quantize.sf_layout import SfLayout
from precast.api_logging import precast_api


def nvfp4_quantize_reference(
    a: torch.Tensor, a_global_sf: torch.Tensor, sfLayout: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`nvfp4_quantize` in plain PyTorch on any device, the same bits.

    Examples
    --------
    >>> import torch
    >>> q, scales = nvfp4_quantize_reference(torch.arange(16.0)[None], torch.ones(1), 2)
    >>> scales.view(torch.float8_e4m3fn).float().tolist()
    [[2.5]]
    """
    return quantize_nvfp4(a, a_global_sf, sfLayout, False)


def _check(export: str, a: torch.Tensor, a_global_sf: torch.Tensor, sfLayout: int) -> None:
    check_quantized_blocks(export, "a", a, 16, sfLayout, "a_global_sf", a_global_sf)


_NVFP4_QUANTIZE = Export(
    "block_quantize",
    "nvfp4_quantize",
    "a:T=f16|bf16[*rows(1-),columns] a_global_sf:f32 out!:u8 out_sf!:u8 sfLayout:int "
    "enable_pdl:pdl",
    reference=nvfp4_quantize_reference,
    check=_check,
)


@precast_api(
    trace=quantize_trace(
        "nvfp4_quantize",
        "NVFP4: e2m1 in blocks of 16 with e4m3 scales under one fp32 scale.",
        nvfp4_quantize_reference,
        input="a",
        global_scale="a_global_sf",
        layout=Layout.of_number("sfLayout"),
        block=16,
    )
)
@op("block_quantize")
def nvfp4_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor,
    sfLayout: SfLayout = SfLayout.layout_128x4,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise to NVFP4: e2m1 in blocks of 16, a scale in e4m3 for each, one in float32 for all.

    .. math::

        s = \mathrm{e4m3}\left(g \cdot (\max|x| \cdot \tfrac{1}{6})\right), \quad
        q = \mathrm{e2m1}\left(x \cdot \frac{1}{s \cdot \frac{1}{g}}\right)

    Parameters
    ----------
    a : torch.Tensor
        ``[..., columns]``, at least 2 dimensions, float16 or bfloat16, on a CUDA device; columns
        are a multiple of 16 with stride 1, the others merge into at most two strides. 16-byte
        aligned rows are fastest.
    a_global_sf : torch.Tensor
        ``[1]``, or ``[rows]`` for one of each row, float32: ``g``, usually
        ``448 * 6 / max(abs(a))``, the reciprocal of what dequantisation multiplies by.
    sfLayout : SfLayout
        Where the scales lie.
    do_shuffle : bool
        Only False.
    sf_vec_size : int
        Only 16.
    backend : str
        Only ``"cuda"``.

    Returns
    -------
    tuple of torch.Tensor
        ``[..., columns // 2]``, two numbers a byte, the first in the lower 4 bits; and the scales,
        ``[rows, columns // 16]``, for tiled layouts with rows padded to 128 (8) and columns to 4,
        by zeros, in the layout's order; uint8.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape or strides other than above.
    NotImplementedError
        ``do_shuffle``, or another ``sf_vec_size``.

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
    if backend != "cuda":
        check_backend("nvfp4_quantize", backend)
    layout = int(sfLayout)
    a_global_sf = float32_on_device(a_global_sf, a)
    out, out_sf = packed_outputs(a, 16, layout)
    _NVFP4_QUANTIZE.launch(a, a_global_sf, out, out_sf, layout, enable_pdl)
    return out, out_sf
