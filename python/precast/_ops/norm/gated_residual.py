# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of a layer's output, gated into a float32 residual stream, and the next RMSNorm.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
"""

from __future__ import annotations

import math
from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches, op
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form


def gated_residual_rmsnorm_reference(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    alpha: torch.Tensor | float,
    beta: torch.Tensor,
    eps: float = 1e-6,
    gain_center: float = 0.0,
) -> torch.Tensor:
    """:func:`gated_residual_rmsnorm` in plain PyTorch on any device, out of place."""
    x = branch.float()
    if weight is not None:
        x = x * (weight.float() + gain_center)
    rstd = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return alpha * residual + beta * (x * rstd)


def gated_residual_next_rmsnorm_reference(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: torch.Tensor | float,
    beta: torch.Tensor,
    post_eps: float = 1e-6,
    next_eps: float = 1e-6,
    next_gain_center: float = 0.0,
    post_weight: torch.Tensor | None = None,
    post_gain_center: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`gated_residual_next_rmsnorm` in plain PyTorch on any device, out of place."""
    out = gated_residual_rmsnorm_reference(
        branch, residual, post_weight, alpha, beta, post_eps, post_gain_center
    )
    rstd = torch.rsqrt(out.square().mean(dim=-1, keepdim=True) + next_eps)
    return out, (out * rstd * (next_weight.float() + next_gain_center)).to(branch.dtype)


_ROWS = "branch:T=f16|bf16[rows,hidden] residual:f32[rows,hidden]"

_GATED = Export(
    "gated_residual",
    "gated_residual_rmsnorm",
    f"{_ROWS} weight?:T[hidden] alpha:f32[hidden] beta:f32[hidden] eps:float(0-) "
    "gain_center:float(-) out!:like(residual) enable_pdl:pdl",
    reference=gated_residual_rmsnorm_reference,
)


def _next(alpha: torch.Tensor | None, alpha_value: float, **given: Any) -> Any:
    outputs = ("residual_out", "ffn_input", "enable_pdl")
    inputs = {name: value for name, value in given.items() if name not in outputs}
    gate = alpha_value if alpha is None else alpha
    return gated_residual_next_rmsnorm_reference(alpha=gate, **inputs)


def _check_alpha(export: str, alpha_value: float) -> None:
    if math.isnan(alpha_value):
        raise ValueError(f"{export}: alpha must be a number, not NaN, got {alpha_value}")


_NEXT = Export(
    "gated_residual",
    "gated_residual_next_rmsnorm",
    f"{_ROWS} next_weight:T[hidden] alpha?:f32[hidden] alpha_value:float beta:f32[hidden] "
    "post_eps:float(0-) next_eps:float(0-) next_gain_center:float(-) "
    "residual_out!:like(residual) ffn_input!:like(branch) post_weight?:T[hidden] "
    "post_gain_center:float(-) enable_pdl:pdl",
    reference=_next,
    check=_check_alpha,
    derived={"alpha": lambda alpha=None, alpha_value=1.0: alpha_value if alpha is None else alpha},
)

# -- traces ---------------------------------------------------------------------------------------

_AXES: dict[str, Var | Const] = {"num_rows": Var(), "hidden_size": Const("h")}
_MATRIX, _VECTOR = ["num_rows", "hidden_size"], ["hidden_size"]


def _rows() -> dict[str, Tensor | Scalar]:
    return {"branch": Tensor(_MATRIX), "residual": Tensor(_MATRIX, dtype="float32")}


def _gated_template(weighted: bool) -> TraceTemplate:
    inputs = _rows()
    if weighted:
        inputs["weight"] = Tensor(_VECTOR)
    inputs |= {name: Tensor(_VECTOR, dtype="float32") for name in ("alpha", "beta")}
    inputs |= {name: Scalar("float32") for name in ("eps", "gain_center")}
    return TraceTemplate(
        op_type="gated_residual_rmsnorm",
        name_prefix="gated_residual_rmsnorm" + "_weight" * weighted,
        description="Adds the RMSNorm of a layer's output to a residual, both gated.",
        axes=_AXES,
        inputs=inputs,
        outputs={"output": Tensor(_MATRIX, "out", dtype_from="residual")},
        reference=gated_residual_rmsnorm_reference,
        fixed={} if weighted else {"weight": None},
    )


def _next_template(form: tuple[bool, bool]) -> TraceTemplate:
    weighted, number = form
    inputs = {**_rows(), "next_weight": Tensor(_VECTOR)}
    if number:
        inputs["alpha"] = Scalar("float32", sample=0.75)
    else:
        inputs["alpha"] = Tensor(_VECTOR, dtype="float32")
    inputs["beta"] = Tensor(_VECTOR, dtype="float32")
    numbers = ["post_eps", "next_eps", "next_gain_center"]
    if weighted:
        inputs["post_weight"] = Tensor(_VECTOR)
        numbers.append("post_gain_center")
    inputs |= {name: Scalar("float32") for name in numbers}
    return TraceTemplate(
        op_type="gated_residual_next_rmsnorm",
        name_prefix="gated_residual_next_rmsnorm" + "_weight" * weighted + "_number" * number,
        description="Adds a gated RMSNorm to a gated residual, and applies the next RMSNorm.",
        axes=_AXES,
        inputs=inputs,
        outputs={
            "output": Tensor(_MATRIX, "residual_out", dtype_from="residual"),
            "next_input": Tensor(_MATRIX, "ffn_input", dtype_from="branch"),
        },
        reference=gated_residual_next_rmsnorm_reference,
    )


_GATED_TRACE = by_form(
    lambda weight=None, **call: weight is not None, _gated_template, [False, True]
)
_NEXT_TRACE = by_form(
    lambda alpha=None, post_weight=None, **call: (
        post_weight is not None,
        not hasattr(alpha, "shape"),
    ),
    _next_template,
    [(False, False), (True, False), (False, True), (True, True)],
)

# -- public functions -----------------------------------------------------------------------------


@precast_api(trace=_GATED_TRACE)
@launches(_GATED)
def gated_residual_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    eps: float = 1e-6,
    gain_center: float = 0.0,
    out: torch.Tensor | None = None,
    *,
    enable_pdl: bool | None = True,
) -> torch.Tensor:
    r"""Add the RMSNorm of a layer's output to a float32 residual, both gated.

    .. math::

        b_{r,c} &= branch_{r,c} \cdot (weight_c + gain\_center) \\
        out_{r,c} &= \alpha_c \cdot residual_{r,c}
            + \beta_c \cdot \frac{b_{r,c}}{\sqrt{\frac{1}{n} \sum_k b_{r,k}^2 + eps}}

    Parameters
    ----------
    branch : torch.Tensor
        ``[rows, hidden]``: the output of the layer; bfloat16 or float16, on a CUDA device; any
        hidden size; rows with unit stride and any distance.
    residual : torch.Tensor
        Shape and device of ``branch``, float32, strides likewise.
    weight : torch.Tensor or None
        ``[hidden]``, contiguous, dtype of ``branch``; the norm is of the product. None: no weight,
        and ``gain_center`` has no meaning.
    alpha, beta : torch.Tensor
        ``[hidden]``, contiguous, float32.
    eps : float
        Added to the mean square; at least 0. Default: 1e-6.
    gain_center : float
        Added to ``weight``. Default: 0.
    out : torch.Tensor, optional
        Where to write: shape, dtype and device of ``residual``, strides likewise. May be
        ``residual``. Default: a new tensor.

    Returns
    -------
    torch.Tensor
        Shape of ``residual``, float32; ``out`` if it is given.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device or strides other than above;
        numbers out of range; outputs that overlap another argument.

    Notes
    -----
    All arithmetic is float32. FlashInfer's function takes hidden size 8192 alone. One launch;
    allocates only a missing ``out``; safe in CUDA graphs; not differentiable. Source:
    arXiv:1910.07467.

    Examples
    --------
    >>> import torch, precast
    >>> branch, residual = torch.tensor([[3.0, -3.0]]).half(), torch.tensor([[1.0, 1.0]])
    >>> alpha, beta = torch.tensor([2.0, 2.0]), torch.tensor([1.0, 0.5])
    >>> with precast.reference_mode():
    ...     precast.gated_residual_rmsnorm(branch, residual, None, alpha, beta)
    tensor([[3.0000, 1.5000]])
    """


@precast_api(trace=_NEXT_TRACE)
@op("gated_residual")
@documented(gated_residual_rmsnorm)
def gated_residual_next_rmsnorm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    next_weight: torch.Tensor,
    alpha: torch.Tensor | float,
    beta: torch.Tensor,
    post_eps: float = 1e-6,
    next_eps: float = 1e-6,
    next_gain_center: float = 0.0,
    residual_out: torch.Tensor | None = None,
    ffn_input: torch.Tensor | None = None,
    *,
    post_weight: torch.Tensor | None = None,
    post_gain_center: float = 0.0,
    enable_pdl: bool | None = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Do what :func:`gated_residual_rmsnorm` does, and apply the RMSNorm of the next layer.

    .. math::

        b_{r,c} &= branch_{r,c} \cdot (post\_weight_c + post\_gain\_center) \\
        o_{r,c} &= \alpha_c \cdot residual_{r,c}
            + \beta_c \cdot \frac{b_{r,c}}{\sqrt{\frac{1}{n} \sum_k b_{r,k}^2 + post\_eps}} \\
        ffn\_input_{r,c} &= \mathrm{round}\left(
            \frac{o_{r,c}}{\sqrt{\frac{1}{n} \sum_k o_{r,k}^2 + next\_eps}}
            \cdot (next\_weight_c + next\_gain\_center)\right)

    Parameters
    ----------
    next_weight : torch.Tensor
        ``[hidden]``, contiguous, dtype of ``branch``.
    alpha : torch.Tensor or float
        ``[hidden]``, contiguous, float32; or one number for all columns.
    beta : torch.Tensor
        ``[hidden]``, contiguous, float32.
    post_eps, next_eps : float
        Added to the mean squares; at least 0. Default: 1e-6.
    next_gain_center, post_gain_center : float
        Added to the weights. Default: 0.
    residual_out : torch.Tensor, optional
        Where to write :math:`o`: shape, dtype and device of ``residual``, strides likewise. May be
        ``residual``. Default: a new tensor.
    ffn_input : torch.Tensor, optional
        Where to write the input of the next layer: shape, dtype and device of ``branch``, strides
        likewise. May be ``branch``. Default: a new tensor.
    post_weight : torch.Tensor, optional
        ``[hidden]``, contiguous, dtype of ``branch``. Default: no weight, and ``post_gain_center``
        has no meaning.

    Returns
    -------
    tuple of torch.Tensor
        ``residual_out``, float32, and ``ffn_input``, dtype of ``branch``.

    Notes
    -----
    All arithmetic is float32, rounded once to nearest even. FlashInfer's function takes hidden size
    8192 alone. One launch; allocates only missing outputs; safe in CUDA graphs; not differentiable.
    Source: arXiv:1910.07467.

    Examples
    --------
    >>> import torch, precast
    >>> branch, residual = torch.tensor([[3.0, -3.0]]).half(), torch.tensor([[1.0, 5.0]])
    >>> weight, beta = torch.tensor([1.0, 2.0]).half(), torch.tensor([2.0, 2.0])
    >>> with precast.reference_mode():
    ...     precast.gated_residual_next_rmsnorm(branch, residual, weight, 1.0, beta)
    (tensor([[3.0000, 3.0000]]), tensor([[1., 2.]], dtype=torch.float16))
    """
    if residual_out is None:
        residual_out = torch.empty_like(residual)
    if ffn_input is None:
        ffn_input = torch.empty_like(branch)
    gate, value = (alpha, 1.0) if isinstance(alpha, torch.Tensor) else (None, alpha)
    _NEXT.launch(
        *(branch, residual, next_weight, gate, value, beta, post_eps, next_eps, next_gain_center),
        *(residual_out, ffn_input, post_weight, post_gain_center, enable_pdl),
    )
    return residual_out, ffn_input
