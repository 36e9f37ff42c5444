# SPDX-License-Identifier: Apache-2.0
"""Quantisation of keys or values to NVFP4 with linear scales.

Source: NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.quantize._reference_blocks import quantize_e2m1
from precast._ops.quantize._trace_blocks import ROWS
from precast._ops.quantize.sf_layout import BLOCKS, check_quantized_blocks
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var


def nvfp4_kv_quantize_reference(
    input: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`nvfp4_kv_quantize` in plain PyTorch on any device, the same bits."""
    packed, scales = quantize_e2m1(input, 2, global_scale, True)
    return packed, scales.reshape(*input.shape[:-1], input.shape[-1] // 16)


def _bytes(input: torch.Tensor, numbers: int) -> torch.Tensor:
    """Allocate a byte for each of so many numbers of a row."""
    *leading, columns = input.shape
    return input.new_empty(*leading, columns // numbers, dtype=torch.uint8)


_NVFP4_KV_QUANTIZE = Export(
    "block_quantize",
    "nvfp4_kv_quantize",
    "input:T=f16|bf16[*rows(1-),columns] global_scale:f32[.] fp4_output!:u8 block_scales!:u8 "
    "enable_pdl:pdl_on",
    reference=nvfp4_kv_quantize_reference,
    check=lambda export, input, global_scale: check_quantized_blocks(export, "input", input, 16, 2),
    new={
        "fp4_output": lambda input: _bytes(input, 2),
        "block_scales": lambda input: _bytes(input, 16),
    },
)


@precast_api(
    trace=TraceTemplate(
        op_type="quantization",
        name_prefix="nvfp4_kv_quantize",
        description="NVFP4 of keys or values: e2m1 in blocks of 16 with linear e4m3 scales.",
        axes={
            "hidden_size": Const("h", multiple=16),
            "*num_tokens": ROWS,
            "*one": Var("One number, in any shape.", sample=1),
            "packed_size": Const(abbrev="", value="hidden_size // 2"),
            "scale_columns": Const(abbrev="", value="hidden_size // 16"),
        },
        inputs={
            "hidden_states": Tensor(["*num_tokens", "hidden_size"], param="input"),
            "global_scale": Tensor(["*one"], dtype="float32"),
        },
        outputs={
            "quantized": Tensor(["*num_tokens", "packed_size"], dtype="uint8"),
            "scales": Tensor(["*num_tokens", "scale_columns"], dtype="uint8"),
        },
        reference=nvfp4_kv_quantize_reference,
    )
)
@launches(_NVFP4_KV_QUANTIZE)
@documented(BLOCKS)
def nvfp4_kv_quantize(
    input: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise keys or values to NVFP4, in blocks of 16 with linear scales.

    .. math::

        s = \mathrm{e4m3}\left(\frac{1}{g} \cdot (\max|x| \cdot \tfrac{1}{6})\right), \quad
        q = \mathrm{e2m1}\left(x \cdot \frac{1}{s \cdot g}\right)

    Parameters
    ----------
    global_scale : torch.Tensor
        ``g``, one float32 on the device of ``input``, positive and finite, usually
        ``max(abs(input)) / (448 * 6)``: what dequantisation multiplies by, so the reciprocal of
        the ``a_global_sf`` of :func:`nvfp4_quantize`.

    Returns
    -------
    tuple of torch.Tensor
        ``[..., columns // 2]``, two numbers a byte, the first in the lower 4 bits; and the scales
        as bytes of e4m3, ``[..., columns // 16]``; uint8. :func:`nvfp4_kv_dequantize` takes them.

    Notes
    -----
    Every operation is float32, rounded once, with ``g`` as the reciprocal of ``1 / g``; conversions
    round to nearest even and saturate. A block whose scale rounds to 0 becomes zeros; NaN is left
    out of the maximum and becomes 6; the maximum of a block with infinity saturates its scale. The
    bits are those of ``fp4_quantize(input, global_scale, is_sf_swizzled_layout=False,
    is_global_scale_inversed=True)``. FlashInfer's function needs compute capability 10.0; this one
    converts in fp32 arithmetic on GPUs that lack the instruction, with the same result. Allocates
    its results; safe in CUDA graphs; not differentiable. Source: arXiv:2509.25149.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     q, scales = precast.nvfp4_kv_quantize(torch.ones(1, 16).half(), torch.tensor([0.5]))
    >>> q.shape, scales.view(torch.float8_e4m3fn).tolist()
    (torch.Size([1, 8]), [[0.34375]])
    """
