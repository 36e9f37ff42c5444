# SPDX-License-Identifier: Apache-2.0
"""Products of groups of consecutive rows with a weight for each group, of 16 bits."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._op.validation import check_contiguous
from precast._ops.gemm._fp8 import MMA
from precast._ops.gemm._plain import (
    TACTIC,
    UNSPLIT,
    Limits,
    check_choice,
    check_out,
    check_rows,
    check_sizes,
    check_tma,
    chosen,
    exports,
    fill_starts,
    rows_of_groups,
)
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var

#: What all products of groups say of their groups and their outputs.
GROUPS = """
Raises
------
ValueError
    A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other than
    above; an ``out`` that overlaps another argument; another backend.

Notes
-----
Tensor cores add products in float32 in the order of the depth, and the result is rounded once to
nearest even. Groups may begin at any row and may be empty; what rows of no group hold reaches no
other row. Allocates only a missing ``out``; one launch; nothing is read by the host, so a CUDA
graph may be replayed with other groups; not differentiable.
"""


def write_groups(
    a: torch.Tensor,
    b: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    weight_of_group: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Write the product of each group's rows with its weight ``[depth, columns]``."""
    for group, rows in enumerate(rows_of_groups(starts, len(a))):
        weight = group if weight_of_group is None else int(weight_of_group[group])
        if 0 <= weight < len(b):
            result = a[rows].float() @ b[weight].float()
            out[rows] = (result if scale is None else result * scale.reshape(())).to(out.dtype)


def _write(a: torch.Tensor, b: torch.Tensor, m_indptr: torch.Tensor, out: torch.Tensor) -> None:
    write_groups(a, b.mT, m_indptr, out)


def _check(
    export: str,
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor,
    tactic: int,
    limits: Limits,
) -> None:
    check_contiguous(export, m_indptr=m_indptr)
    check_rows(export, "b", b)
    if limits.by_tma:
        check_tma(export, "a", a, "b", b, True)
    check_sizes(export, "a", a, out, tactic, limits)


_GROUPED, _GROUPED_SM90 = _GROUPED_BOTH = exports(
    "grouped_mm_bf16",
    "a:T=bf16|f16[m,k] b:T[groups,n,k] m_indptr:i32[groups+1] out!:U=bf16|f16|f32[m,n] "
    "tactic:int enable_pdl:pdl_on",
    _check,
    UNSPLIT,
    write=_write,
    derived={"out_dtype": lambda out: out.dtype},
)


def grouped_mm_bf16_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """:func:`grouped_mm_bf16` in plain PyTorch on any device; rows of no group are zero."""
    out = a.new_zeros(len(a), b.shape[1], dtype=out_dtype)
    _write(a, b, m_indptr, out)
    return out


def _fill(made: dict[str, Any]) -> None:
    fill_starts(made["m_indptr"], len(made["a"]))


@precast_api(
    trace=TraceTemplate(
        op_type="grouped_gemm",
        name_prefix="grouped_mm_bf16",
        description="Multiplies groups of rows by the weights of their groups.",
        axes={
            "num_tokens": Var("Rows of a.", sample=64),
            "num_groups": Const("g", sample=4),
            "num_starts": Const("", value="num_groups + 1"),
            "num_columns": Const("n", multiple=8),
            "depth": Const("k", multiple=8),
        },
        inputs={
            "a": Tensor(["num_tokens", "depth"]),
            "b": Tensor(["num_groups", "num_columns", "depth"]),
            "m_indptr": Tensor(["num_starts"], dtype="int32"),
        },
        outputs={"result": Tensor(["num_tokens", "num_columns"], dtype="bfloat16")},
        reference=grouped_mm_bf16_reference,
        tags=["moe"],
        fill=_fill,
    )
)
@op("gemm")
@documented(GROUPS, TACTIC)
def grouped_mm_bf16(
    a: torch.Tensor,
    b: torch.Tensor,
    m_indptr: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "cudnn",
    tactic: int = -1,
) -> torch.Tensor:
    r"""Multiply groups of consecutive rows by a weight each.

    .. math:: out_m = \mathrm{round}(a_m \cdot b_g^T), \quad m\_indptr_g \le m < m\_indptr_{g+1}

    Parameters
    ----------
    a : torch.Tensor
        ``[m, k]``, bfloat16 or float16, on a CUDA device; stride 1 in the last dimension, rows at
        multiples of 16 bytes. ``k`` is a multiple of 8.
    b : torch.Tensor
        ``[groups, n, k]`` of the dtype of ``a``; stride 1 in the last dimension, rows and groups at
        multiples of 16 bytes.
    m_indptr : torch.Tensor
        ``[groups + 1]``, int32, contiguous: where the rows of each group begin, ascending.
    out : torch.Tensor, optional
        ``[m, n]``, bfloat16, float16 or float32; stride 1 in the last dimension. Rows of no group
        are not written. Default: a new tensor.
    out_dtype : torch.dtype
        The dtype of a new ``out``.
    backend : str
        ``"cudnn"`` or ``"cake"``, FlashInfer's, which are the same kernels. ``"mma"`` takes those
        for every GPU on Hopper, too.

    Returns
    -------
    torch.Tensor
        ``[m, n]``; ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> a, b = torch.ones(3, 8).bfloat16(), torch.ones(2, 1, 8).bfloat16()
    >>> b[1] = 2
    >>> starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.gemm.grouped_mm_bf16(a, b, starts)[:, 0]
    tensor([ 8., 16., 16.], dtype=torch.bfloat16)
    """
    name = "grouped_mm_bf16"
    check_choice(name, "backend", backend, "cudnn", "cake", MMA)
    check_out(name, out, out_dtype, is_equal=False)
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    chosen(_GROUPED_BOTH, a, b, True, backend).launch(a, b, m_indptr, out, tactic)
    return out
