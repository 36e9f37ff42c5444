# SPDX-License-Identifier: Apache-2.0
"""The weighted sum of the rows that the experts of a token computed."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._op.validation import check_contiguous
from precast._ops.gemm._plain import check_out
from precast._ops.moe._rows import ROWS, VECTOR, check_matrix, is_row
from precast._ops.moe.moe_permute import fill_rows
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form


def moe_unpermute_reference(
    x: torch.Tensor,
    permuted_rows: torch.Tensor,
    weights: torch.Tensor | None = None,
    row_experts: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`moe_unpermute` in plain PyTorch on any device: float32, one cast at the end."""
    rows, (tokens, slots) = x.float(), permuted_rows.shape
    if row_experts is not None and (scale is not None or bias is not None):
        count = len(scale if scale is not None else bias)  # type: ignore[arg-type]
        expert = torch.where(is_row(row_experts, count), row_experts, 0).long()
        if scale is not None:
            rows = rows * scale[expert, None]
        if bias is not None:
            rows = rows + bias.float()[expert]
    sums = x.new_zeros(tokens, x.shape[1], dtype=torch.float32)
    for slot in range(slots):  # In this order, as the kernel adds.
        row = permuted_rows[:, slot].long()
        named = is_row(row, len(x))
        term = rows[row[named]]
        sums[named] += term if weights is None else term * weights[named, slot, None]
    return sums.to(out_dtype or x.dtype)


def _check(
    export: str,
    x: torch.Tensor,
    permuted_rows: torch.Tensor,
    weights: torch.Tensor | None,
    row_experts: torch.Tensor | None,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    check_matrix(export, "x", x, VECTOR)
    check_matrix(export, "out", out, VECTOR)
    check_contiguous(
        export,
        permuted_rows=permuted_rows,
        weights=weights,
        row_experts=row_experts,
        scale=scale,
        bias=bias,
    )
    if row_experts is None and (scale is not None or bias is not None):
        raise ValueError(f"{export}: row_experts must be given with scale or bias, got None")


UNPERMUTE = Export(
    "moe_unpermute",
    "moe_unpermute",
    "x:T=bf16|f16[x_rows,columns] permuted_rows:i32[tokens,slots] weights?:f32[tokens,slots] "
    "row_experts?:i32[x_rows] scale?:f32[experts] out!:U=bf16|f16[tokens,columns] "
    "bias?:U[experts,columns] enable_pdl:pdl",
    reference=lambda x, permuted_rows, weights, row_experts, scale, bias: moe_unpermute_reference(
        x, permuted_rows, weights, row_experts, scale, bias, torch.float32
    ),
    check=_check,
    derived={"out_dtype": lambda out: out.dtype},
)


def _has_bias(bias: torch.Tensor | None = None, **others: object) -> bool:
    return bias is not None


def _fill(made: dict[str, Any]) -> None:
    fill_rows(made)
    if "row_experts" in made:
        experts = made["row_experts"]
        count = len(made["bias"])
        experts.copy_(torch.arange(len(experts), device=experts.device) % count)


def _template(has_bias: bool) -> TraceTemplate:
    axes: dict[str, Var | Const] = {
        "num_rows": Var("Rows of experts.", sample=20),
        "num_tokens": Var(sample=5),
        "topk": Const("k", sample=4),
        "hidden_size": Const("h", multiple=VECTOR),
    }
    inputs = {
        "x": Tensor(["num_rows", "hidden_size"]),
        "permuted_rows": Tensor(["num_tokens", "topk"], dtype="int32"),
        "weights": Tensor(["num_tokens", "topk"], dtype="float32"),
    }
    if has_bias:
        axes["num_local_experts"] = Const("e", sample=4)
        inputs["row_experts"] = Tensor(["num_rows"], dtype="int32")
        inputs["bias"] = Tensor(["num_local_experts", "hidden_size"])
    return TraceTemplate(
        op_type="moe_unpermute",
        name_prefix="moe_unpermute" + "_bias" * has_bias,
        description="Adds up the rows that the experts of a token computed, by their weights.",
        axes=axes,
        inputs=inputs,
        outputs={
            "output": Tensor(["num_tokens", "hidden_size"], param="out", dtype_from="x"),
        },
        reference=moe_unpermute_reference,
        tags=["moe"],
        fill=_fill,
    )


@precast_api(trace=by_form(_has_bias, _template, [False, True]))
@op("moe_unpermute")
@documented(ROWS)
def moe_unpermute(
    x: torch.Tensor,
    permuted_rows: torch.Tensor,
    weights: torch.Tensor | None = None,
    row_experts: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    r"""Add up the rows that the experts of a token computed, by their weights.

    .. math::

        out_{t,c} = \mathrm{round}\left(\sum_s weights_{t,s} \cdot (scale_e \cdot x_{r,c} +
        bias_{e,c})\right), \quad r = permuted\_rows_{t,s}, \quad e = row\_experts_r

    Parameters
    ----------
    x : torch.Tensor
        ``[rows, columns]``, bfloat16 or float16, on a CUDA device; ``columns`` is a multiple of 8,
        the last dimension has stride 1, rows start at multiples of 16 bytes.
    permuted_rows : torch.Tensor
        ``[tokens, slots]``, int32, contiguous, as :func:`moe_sort` makes it: the row of each slot.
        A slot whose number is no row of ``x`` adds nothing.
    weights : torch.Tensor, optional
        ``[tokens, slots]``, float32, contiguous. Default: 1.
    row_experts : torch.Tensor, optional
        ``[rows]``, int32, contiguous: the expert of each row, which ``scale`` and ``bias`` need.
    scale : torch.Tensor, optional
        ``[experts]``, float32, contiguous. Default: 1.
    bias : torch.Tensor, optional
        ``[experts, columns]`` of the dtype of ``out``, contiguous. Default: none.
    out : torch.Tensor, optional
        ``[tokens, columns]``, bfloat16 or float16; strides as ``x``. Default: a new tensor.
    out_dtype : torch.dtype, optional
        The dtype of a new ``out``. Default: that of ``x``.

    Returns
    -------
    torch.Tensor
        ``[tokens, columns]``; ``out`` if it is given.

    Notes
    -----
    Slots are added in float32 in their order, and the sum is rounded once to nearest even, so equal
    arguments give equal bits. Rows that no slot names are not read: NaN there reaches nothing. One
    launch; allocates only a missing ``out``; safe in CUDA graphs, which may be replayed with other
    rows; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> x = torch.tensor([1.0, 2.0, 4.0])[:, None].expand(3, 8).half()
    >>> rows = torch.tensor([[2, 0], [-1, 1]], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.fused_moe.moe_unpermute(x, rows, torch.tensor([[0.5, 1.0], [1.0, 3.0]]))[:, 0]
    tensor([3., 6.], dtype=torch.float16)
    """
    out_dtype = out_dtype or (x.dtype if out is None else out.dtype)
    if out is None:
        out = x.new_empty(permuted_rows.shape[0], x.shape[1], dtype=out_dtype)
    check_out("moe_unpermute", out, out_dtype)
    UNPERMUTE.launch(x, permuted_rows, weights, row_experts, scale, out, bias, enable_pdl)
    return out
