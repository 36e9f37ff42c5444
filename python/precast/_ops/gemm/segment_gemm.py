# SPDX-License-Identifier: Apache-2.0
"""Products of segments of rows with weights that the segments may choose, as LoRA needs them."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._op.validation import check_contiguous
from precast._ops.gemm._plain import (
    TACTIC,
    UNSPLIT,
    Limits,
    check_rows,
    check_sizes,
    check_tma,
    check_weight,
    chosen,
    exports,
    fill_starts,
)
from precast._ops.gemm.grouped_mm import GROUPS, write_groups
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form


def _write(
    x: torch.Tensor,
    weights: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor | None,
    out: torch.Tensor,
    weight_column_major: bool,
) -> None:
    by = weights.mT if weight_column_major else weights
    write_groups(x, by, seg_indptr, out, weight_indices)


def _check(
    export: str,
    x: torch.Tensor,
    weights: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor | None,
    out: torch.Tensor,
    weight_column_major: bool,
    tactic: int,
    limits: Limits,
) -> None:
    columns, depth = out.shape[1], x.shape[1]
    shape = [len(weights), *((columns, depth) if weight_column_major else (depth, columns))]
    if list(weights.shape) != shape:
        raise ValueError(f"{export}: weights must have shape {shape}, got {[*weights.shape]}")
    if len(seg_indptr) == 0:
        raise ValueError(f"{export}: seg_indptr must have shape [1], got [0]")
    segments = len(seg_indptr) - 1
    if weight_indices is not None:
        if weight_indices.shape != (segments,):
            raise ValueError(
                f"{export}: weight_indices must have shape [{segments}], got "
                f"{[*weight_indices.shape]}"
            )
        if weight_indices.dtype != seg_indptr.dtype:
            raise ValueError(f"{export}: weight_indices must have the dtype of seg_indptr")
    check_contiguous(export, seg_indptr=seg_indptr, weight_indices=weight_indices)
    if weight_column_major:
        check_rows(export, "weights", weights)
    else:
        check_weight(export, "weights", weights)
    if limits.by_tma:
        check_tma(export, "x", x, "weights", weights, weight_column_major)
    check_sizes(export, "x", x, out, tactic, limits)


_SEGMENTS, _SEGMENTS_SM90 = _SEGMENTS_BOTH = exports(
    "segment_gemm",
    "x:T=bf16|f16[rows,d_in] weights:T[count,a,b] seg_indptr:i32|i64[starts] "
    "weight_indices?:i32|i64[segments] out!:U=bf16|f16|f32[rows,d_out] weight_column_major:bool "
    "tactic:int enable_pdl:pdl_on",
    _check,
    UNSPLIT,
    write=_write,
)


def segment_gemm_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor | None = None,
    weight_column_major: bool = True,
) -> torch.Tensor:
    """:func:`segment_gemm` in plain PyTorch on any device; rows of no segment are zero."""
    out = x.new_zeros(len(x), weights.shape[1 if weight_column_major else 2])
    _write(x, weights, seg_indptr, weight_indices, out, weight_column_major)
    return out


#: Whether weights are [.., d_out, d_in], and whether segments choose them.
_Form = tuple[bool, bool]


def _form(
    weight_column_major: bool = True,
    weight_indices: torch.Tensor | None = None,
    **others: object,
) -> _Form:
    return bool(weight_column_major), weight_indices is not None


def _fill(made: dict[str, Any]) -> None:
    fill_starts(made["seg_indptr"], len(made["x"]))


def _template(form: _Form) -> TraceTemplate:
    column_major, chooses = form
    axes: dict[str, Var | Const] = {
        "num_rows": Var("Rows of x.", sample=64),
        "num_starts": Const("s", "One more than segments.", sample=5),
        "num_weights": Const("w", sample=4),
        "d_out": Const("n", multiple=8),
        "d_in": Const("k", multiple=8),
    }
    of_weight = ["d_out", "d_in"] if column_major else ["d_in", "d_out"]
    inputs = {
        "x": Tensor(["num_rows", "d_in"]),
        "weights": Tensor(["num_weights", *of_weight]),
        "seg_indptr": Tensor(["num_starts"], dtype="int64"),
    }
    if chooses:
        axes["num_segments"] = Const("", value="num_starts - 1")
        inputs["weight_indices"] = Tensor(["num_segments"], dtype="int64")
    return TraceTemplate(
        op_type="grouped_gemm",
        name_prefix="segment_gemm"
        + ("" if column_major else "_row_major")
        + ("_indices" if chooses else ""),
        description="Multiplies segments of rows by a weight each.",
        axes=axes,
        inputs=inputs,
        outputs={"result": Tensor(["num_rows", "d_out"], dtype_from="x")},
        reference=segment_gemm_reference,
        tags=["lora"],
        fixed={"weight_column_major": column_major},
        fill=_fill,
    )


_USUAL: list[_Form] = [(True, False), (True, True), (False, False)]


@precast_api(trace=by_form(_form, _template, _USUAL))
@op("gemm")
@documented(GROUPS, TACTIC)
def segment_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    seg_indptr: torch.Tensor,
    weight_indices: torch.Tensor | None = None,
    weight_column_major: bool = True,
    out: torch.Tensor | None = None,
    tactic: int = -1,
) -> torch.Tensor:
    r"""Multiply segments of rows by a weight each, which a segment may choose.

    .. math::

        out_m = \mathrm{round}(x_m \cdot W_{weight\_indices_i}),
        \quad seg\_indptr_i \le m < seg\_indptr_{i+1}

    Parameters
    ----------
    x : torch.Tensor
        ``[rows, d_in]``, bfloat16 or float16, on a CUDA device; stride 1 in the last dimension,
        rows at multiples of 16 bytes. ``d_in`` is a multiple of 8.
    weights : torch.Tensor
        ``[weights, d_out, d_in]``, of the dtype and layout of ``x``, if ``weight_column_major``;
        else ``[weights, d_in, d_out]``, where ``d_out`` is a multiple of 8.
    seg_indptr : torch.Tensor
        ``[segments + 1]``, int32 or int64, contiguous: where the rows of each segment begin,
        ascending.
    weight_indices : torch.Tensor, optional
        ``[segments]``, of the dtype of ``seg_indptr``, contiguous: the weight of each segment. A
        number that is no weight says that the segment is padding. Default: segment ``i`` has weight
        ``i``.
    weight_column_major : bool
        The layout of ``weights``.
    out : torch.Tensor, optional
        ``[rows, d_out]``, bfloat16, float16 or float32; stride 1 in the last dimension. Rows of no
        segment are not written. Default: a new tensor of the dtype of ``x``, zero in such rows.

    Returns
    -------
    torch.Tensor
        ``[rows, d_out]``; ``out`` if it is given.

    Examples
    --------
    >>> import torch, precast
    >>> x, weights = torch.ones(3, 8).half(), torch.ones(2, 8, 8).half()
    >>> weights[1] = 2
    >>> starts, which = torch.tensor([0, 1, 3]), torch.tensor([1, 0])
    >>> with precast.reference_mode():
    ...     precast.gemm.segment_gemm(x, weights, starts, which)[:, 0]
    tensor([16.,  8.,  8.], dtype=torch.float16)
    """
    if out is None:
        out = x.new_zeros(x.shape[0], weights.shape[1 if weight_column_major else 2])
    chosen(_SEGMENTS_BOTH, x, weights, bool(weight_column_major)).launch(
        x, weights, seg_indptr, weight_indices, out, weight_column_major, tactic
    )
    return out
