# SPDX-License-Identifier: Apache-2.0
"""8-bit quantisation with one scale for each group of a token's elements.

Source: DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3; powers of two as
scales: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.quantize._outputs import GROUPS, check_scales, group_scales, quantized_like
from precast._ops.quantize._reference_8bit import group_quant
from precast._ops.quantize._trace_8bit import quant_trace
from precast._ops.quantize.per_tensor import per_token_quant_fp8
from precast._ops.quantize.sf_layout import check_backend
from precast.api_logging import precast_api

#: DeepGEMM's least amax.
CAST_EPS = 1e-4


def per_token_group_quant_8bit_reference(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    scale_ue8m0: bool = False,
    use_packed_ue8m0: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`per_token_group_quant_8bit` in plain PyTorch on any device, bit for bit.

    Scales are row-major.
    """
    return group_quant(x.float(), group_size, eps, dst_dtype, scale_ue8m0, use_packed_ue8m0)


def _output(
    export: str,
    x: torch.Tensor,
    dst_dtype: torch.dtype | None,
    backend: str,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if backend != "cuda":
        check_backend(export, backend, "cutile")
    return quantized_like(export, x, dst_dtype, out)


_GROUP = Export(
    "quantize",
    "per_token_group_quant_8bit",
    "x:T[*tokens,hidden] group_size:int eps:float(1e-30-) scale_ue8m0:bool "
    "out!:like(x,U=e4m3|e5m2|i8,apart) out_scale!:f32|i32 enable_pdl:pdl",
    reference=per_token_group_quant_8bit_reference,
    check=check_scales,
    new={"out": _output, "out_scale": group_scales},
    derived=GROUPS,
)


@precast_api(
    trace=quant_trace(
        _GROUP, "Quantised rows and a dequantisation scale for each group of a row's elements."
    )
)
@launches(_GROUP)
@documented(per_token_quant_fp8)
def per_token_group_quant_8bit(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dst_dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_tma_aligned: bool = False,
    scale_ue8m0: bool = False,
    backend: str = "cuda",
    use_packed_ue8m0: bool = False,
    out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Quantise each token to 8 bits with a scale for each group of its elements.

    .. math::

        s_{rg} = \frac{\max(\max_{c \in g} |x_{rc}|, eps)}{\max(Q)}, \quad
        x_{q,rc} = \mathrm{sat}\left(x_{rc} \cdot \frac{1}{s_{rg}}\right), \quad
        g = \lfloor c / group\_size \rfloor

    Parameters
    ----------
    x : torch.Tensor
        ``[..., hidden]``, float16, bfloat16 or float32, on a CUDA device. The last dimension has
        stride 1 and is a multiple of ``group_size``, the others merge into at most two strides.
        16-byte aligned rows are fastest.
    group_size : int
        16, 32, 64 or 128 elements; divides the columns of the result.
    column_major_scales : bool
        The new scales have stride 1 along the tokens (the last but one dimension).
    scale_tma_aligned : bool
        With ``column_major_scales``: the columns are padded to a multiple of four scales, so that
        each starts on a 16-byte boundary. The padding is not written.
    scale_ue8m0 : bool
        Scales are rounded up to the next power of two, still in float32.
    backend : str
        ``"cuda"``; ``"cutile"``, FlashInfer's default, which engines pass, means the same kernel.
    use_packed_ue8m0 : bool
        With ``scale_ue8m0``: the new scales are biased exponents (E8M0), four an int32, the first
        in the lowest byte. With ``column_major_scales`` and ``scale_tma_aligned`` that is what
        DeepGEMM takes on compute capability 10.0.
    out_scale : torch.Tensor, optional
        Where to write the scales, at any strides, in place of the four layouts above; int32 means
        packed. A flag that asks for another form is an error. Default: a new tensor.

    Returns
    -------
    tuple of torch.Tensor
        The quantised values ``[..., n]``, and the *dequantisation* scales
        ``[..., n // group_size]`` in float32, or ``[..., ceil(n // group_size / 4)]`` words in
        int32.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        a ``hidden`` that ``group_size`` does not divide; a layout that contradicts itself or an
        output; another backend; outputs that overlap ``x`` or each other; an ``eps`` that is too
        small or not finite.

    Notes
    -----
    :math:`\max(Q)` is 448 for e4m3, 57344 for e5m2, 127 for int8. Scale, reciprocal and product are
    float32 of IEEE, then one rounding to nearest even that saturates. A NaN makes the scale of its
    group NaN and with it the values; an infinity makes the scale infinite, other values 0, and
    its own NaN; either makes a power of two NaN, whose exponent is 255. int8 has 0 for NaN. Safe in
    CUDA graphs; not differentiable.

    FlashInfer's and SGLang's Triton code divide by the scale in some layouts and multiply by the
    reciprocal in others; this is the latter everywhere, as in DeepGEMM. FlashInfer has the same
    arguments up to ``backend``; SGLang packs the exponents without being asked.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([1.0, -224.0, 0.0, 3.0]).repeat_interleave(32).expand(2, 128)
    >>> with precast.reference_mode():
    ...     x_q, x_s = precast.per_token_group_quant_8bit(x, 64, column_major_scales=True)
    >>> x_q[0, ::32].float(), x_s[0], x_s.stride()
    (tensor([   2., -448.,    0.,  448.]), tensor([0.5000, 0.0067]), (1, 2))
    """


@precast_api
def per_token_cast_to_fp8(
    x: torch.Tensor, use_ue8m0: bool = True, gran_k: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast activations as DeepGEMM does: to e4m3 in groups of 128, with an amax of at least 1e-4.

    Parameters
    ----------
    x : torch.Tensor
        ``[m, n]``, as :func:`per_token_group_quant_8bit` takes it.
    use_ue8m0 : bool
        Scales are rounded up to powers of two, as FlashInfer's function of this name always does.
        DeepGEMM on compute capability 9.0 takes any; False is more exact there.
    gran_k : int
        Elements of a group; divides ``n``.

    Returns
    -------
    tuple of torch.Tensor
        Quantised values ``[m, n]``, and the *dequantisation* scales ``[m, n // gran_k]`` in
        float32, row-major.

    Raises
    ------
    ValueError
        As :func:`per_token_group_quant_8bit`.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     precast.per_token_cast_to_fp8(torch.full((1, 128), 3.0))[1]
    tensor([[0.0078]])
    """
    return per_token_group_quant_8bit(x, gran_k, CAST_EPS, scale_ue8m0=use_ue8m0)


@documented(per_token_cast_to_fp8)
def per_token_cast_to_fp8_reference(
    x: torch.Tensor, use_ue8m0: bool = True, gran_k: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`per_token_cast_to_fp8` in plain PyTorch on any device, bit for bit."""
    return per_token_group_quant_8bit_reference(x, gran_k, CAST_EPS, scale_ue8m0=use_ue8m0)
