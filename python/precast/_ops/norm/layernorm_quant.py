# SPDX-License-Identifier: Apache-2.0
"""LayerNorm with fp8 output by a given scale.

Sources: Ba, Kiros and Hinton, Layer Normalization, arXiv:1607.06450; saturation: OCP 8-bit Floating
Point Specification 1.0.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._ops.norm._quant import check_scale, over_scale, quant_trace, scale_kinds
from precast._ops.norm.layernorm import check_input, check_parameters, layernorm, standardized
from precast._ops.norm.norm_quant import rmsnorm_quant
from precast.api_logging import precast_api


def layernorm_quant_reference(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
) -> torch.Tensor:
    """:func:`layernorm_quant` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    out : torch.Tensor
        Its dtype is that of the result; nothing else of it is read.

    Returns
    -------
    torch.Tensor
        Shape of ``input``, dtype of ``out``.

    Examples
    --------
    >>> import torch
    >>> out, one = torch.empty(1, 2, dtype=torch.float8_e4m3fn), torch.ones(2)
    >>> x, beta = torch.tensor([[1.0, 3.0]]), torch.tensor([0.0, 1.0])
    >>> layernorm_quant_reference(out, x, one, beta, 0.0125).float()
    tensor([[-80., 160.]])
    """
    y = standardized(input.float(), eps) * gemma.float() + beta.float()
    return over_scale(y, scale, out.dtype)


def _check(
    export: str,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    check_parameters(export, gemma, beta)
    check_scale(export, scale, input)


_LAYERNORM_QUANT = Export(
    "norm_quant",
    "layernorm_quant",
    "out!:like(input,U=e4m3|e5m2,apart) input:T[*rows(1-2),hidden] gemma:any[hidden] "
    "beta:any[hidden] scale:scale eps:float enable_pdl:pdl",
    reference=layernorm_quant_reference,
    check=_check,
    kinds=scale_kinds("layernorm_quant", frames=5),
)
_TRACE = quant_trace(
    _LAYERNORM_QUANT,
    "Each row centred and divided by its standard deviation, times a weight, plus a bias, over a "
    "scale, in fp8.",
    layernorm_quant_reference,
    op_type="layernorm",
)


@precast_api(trace=_TRACE)
@op("norm_quant")
@documented(layernorm, rmsnorm_quant)
def layernorm_quant(
    out: torch.Tensor,
    input: torch.Tensor,
    gemma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor | float,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    r"""LayerNorm of each row, divided by a scale and written as fp8.

    .. math:: out_{r,c} = \mathrm{sat}\left(\left(\frac{x_{r,c} - m_r}{\sqrt{v_r + eps}}
        \cdot gemma_c + beta_c\right) \cdot \frac{1}{scale}\right),

    with the mean :math:`m_r` and the variance :math:`v_r` of the row.

    Parameters
    ----------
    out : torch.Tensor
        Shape and device of ``input``, float8_e4m3fn or float8_e5m2, contiguous, memory of its own.
        Overwritten.
    input : torch.Tensor
        ``[rows, hidden]`` or ``[batch, heads, head_dim]``, bfloat16 or float16, contiguous, on a
        CUDA device. Left as it is.

    Raises
    ------
    ValueError
        As :func:`rmsnorm_quant`.
    DtypeRuntimeError
        A RuntimeError and a ValueError: ``input`` of another dtype or not contiguous, ``gemma`` or
        ``beta`` that is not float32.

    Warns
    -----
    FutureWarning
        If ``scale`` is a float.

    Notes
    -----
    The variance is taken around the mean in a second pass. Otherwise as :func:`rmsnorm_quant`.
    Source: arXiv:1607.06450.

    Examples
    --------
    >>> import torch, precast
    >>> out, one = torch.empty(1, 2, dtype=torch.float8_e4m3fn), torch.ones(2)
    >>> x, beta = torch.tensor([[1.0, 3.0]]).bfloat16(), torch.tensor([0.0, 1.0])
    >>> scale = torch.tensor([0.0125])
    >>> with precast.reference_mode():
    ...     precast.layernorm_quant(out, x, one, beta, scale)
    >>> out.float()
    tensor([[-80., 160.]])
    """
    check_input("layernorm_quant", input)
    _LAYERNORM_QUANT.launch(out, input, gemma, beta, scale, eps, enable_pdl)
