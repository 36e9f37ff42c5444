# SPDX-License-Identifier: Apache-2.0
"""Routers of mixtures of experts with their fixed sizes: logits of 1 to 16 tokens.

Source: the sizes are those of the routers of DeepSeek-V3, arXiv:2412.19437, and Mistral Large 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._op.validation import check_contiguous
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var

DEPTH, MAX_ROWS = 7168, 16


def mm_M1_16_K7168_N128_reference(
    mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`mm_M1_16_K7168_N128` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    out : torch.Tensor, optional
        Neither read nor written.

    Returns
    -------
    torch.Tensor
        ``[rows, 128]``, bfloat16.
    """
    return (mat_a.float() @ mat_b.float()).bfloat16()


def mm_M1_16_K7168_N256_reference(
    mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`mm_M1_16_K7168_N256` in plain PyTorch on any device, out of place.

    Parameters
    ----------
    out : torch.Tensor, optional
        Neither read nor written.

    Returns
    -------
    torch.Tensor
        ``[rows, 256]``, float32.
    """
    return mat_a.float() @ mat_b.float()


def _check(export: str, mat_a: torch.Tensor, mat_b: torch.Tensor, out: torch.Tensor) -> None:
    rows = mat_a.shape[0]
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(
            f"{export}: mat_a must have 1 to {MAX_ROWS} rows, got shape {[*mat_a.shape]}"
        )
    check_contiguous(export, mat_a=mat_a)
    if mat_b.stride() != (1, DEPTH):
        raise ValueError(
            f"{export}: mat_b must have strides [1, {DEPTH}], got {[*mat_b.stride()]}; pass the "
            f"transpose of a contiguous weight"
        )
    check_contiguous(export, out=out)


def _fill(made: dict[str, Any]) -> None:
    """The weight has unit stride along the depth."""
    made["mat_b"] = made["mat_b"].T.contiguous().T


def _export(columns: int, out_dtype: str, reference: Callable[..., Any]) -> Export:
    return Export(
        "tinygemm",
        f"mm_m1_16_k7168_n{columns}",
        f"mat_a:bf16[rows,{DEPTH}] mat_b:bf16[{DEPTH},{columns}] out!:{out_dtype}[rows,{columns}] "
        "launch_with_pdl:pdl",
        reference=reference,
        check=_check,
        function=f"mm_M1_16_K7168_N{columns}",
    )


def _template(columns: int, out_dtype: str, reference: Callable[..., Any]) -> TraceTemplate:
    return TraceTemplate(
        op_type="gemm_bf16",
        name_prefix=f"mm_M1_16_K7168_N{columns}",
        description="Multiplies the states of few tokens by the weight of a router.",
        axes={
            "num_tokens": Var("From 1 to 16.", sample=5),
            "depth": Const("", value=str(DEPTH)),
            "num_experts": Const("", value=str(columns)),
        },
        inputs={
            "mat_a": Tensor(["num_tokens", "depth"], dtype="bfloat16"),
            "mat_b": Tensor(["depth", "num_experts"], dtype="bfloat16"),
            "out": Tensor(
                ["num_tokens", "num_experts"], dtype=out_dtype, description="Overwritten."
            ),
        },
        outputs={
            "logits": Tensor(["num_tokens", "num_experts"], param="out", dtype=out_dtype),
        },
        reference=reference,
        tags=["moe"],
        fill=_fill,
    )


_N128 = _export(128, "bf16", mm_M1_16_K7168_N128_reference)
_N256 = _export(256, "f32", mm_M1_16_K7168_N256_reference)


@precast_api(trace=_template(256, "float32", mm_M1_16_K7168_N256_reference))
@launches(_N256)
def mm_M1_16_K7168_N256(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    out: torch.Tensor,
    launch_with_pdl: bool | None = True,
) -> None:
    r"""Compute the logits of DeepSeek-V3's router: 256 experts from states of 7168 elements.

    .. math:: out = mat\_a \cdot mat\_b

    Parameters
    ----------
    mat_a : torch.Tensor
        ``[rows, 7168]`` with 1 to 16 rows, bfloat16, contiguous, 16-byte aligned, on a CUDA device.
    mat_b : torch.Tensor
        ``[7168, 256]`` with strides 1 and 7168, the transpose of a contiguous weight; bfloat16,
        16-byte aligned.
    out : torch.Tensor
        ``[rows, 256]``, float32, contiguous. Overwritten; shares no memory with the others.
    launch_with_pdl : bool
        Programmatic dependent launch. Default: on; without effect below compute capability 9.0.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other
        than above; an ``out`` that overlaps another argument.

    Notes
    -----
    Products are accumulated in float32 by tensor cores, and rounded once to nearest even where
    ``out`` has 16 bits. The order of addition is always the same: a row's bits do not depend on the
    other rows, nor on how many there are. One launch; no allocation; safe in CUDA graphs; not
    differentiable. FlashInfer's function needs compute capability 9.0. Source: arXiv:2412.19437.

    Examples
    --------
    >>> import torch, precast
    >>> states, weight = torch.ones(2, 7168).bfloat16(), torch.ones(256, 7168).bfloat16()
    >>> logits = torch.empty(2, 256)
    >>> with precast.reference_mode():
    ...     precast.mm_M1_16_K7168_N256(states, weight.T, logits)
    >>> logits[1, :2].tolist()
    [7168.0, 7168.0]
    """


@precast_api(trace=_template(128, "bfloat16", mm_M1_16_K7168_N128_reference))
@launches(_N128)
@documented(mm_M1_16_K7168_N256)
def mm_M1_16_K7168_N128(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    out: torch.Tensor,
    launch_with_pdl: bool | None = True,
) -> None:
    r"""Compute the logits of Mistral Large 3's router: 128 experts from states of 7168 elements.

    .. math:: out = \mathrm{round}(mat\_a \cdot mat\_b)

    Parameters
    ----------
    mat_b : torch.Tensor
        ``[7168, 128]`` with strides 1 and 7168, the transpose of a contiguous weight; bfloat16,
        16-byte aligned.
    out : torch.Tensor
        ``[rows, 128]``, bfloat16, contiguous. Overwritten; shares no memory with the others.

    Examples
    --------
    >>> import torch, precast
    >>> states, weight = torch.ones(1, 7168).bfloat16(), torch.ones(128, 7168).bfloat16()
    >>> logits = torch.empty(1, 128).bfloat16()
    >>> with precast.reference_mode():
    ...     precast.mm_M1_16_K7168_N128(states, weight.T, logits)
    >>> logits[0, :2].tolist()
    [7168.0, 7168.0]
    """
