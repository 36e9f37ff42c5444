# SPDX-License-Identifier: Apache-2.0
"""The end of a mixture of experts: the weighted sum of the rows of each token's experts.

Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538, equation 1.
"""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import op
from precast._op.validation import check_contiguous
from precast._ops.gemm._plain import check_out
from precast._ops.moe._backends import BACKEND, Both, backends
from precast._ops.moe._rows import ROWS, VECTOR, check_matrix, is_row
from precast._ops.moe.moe_permute import fill_rows
from precast.api_logging import precast_api
from precast.trace import Const, Tensor, TraceTemplate, Var
from precast.trace.registry import by_form


def moe_finalize_reference(
    input: torch.Tensor,
    permuted_rows: torch.Tensor,
    weights: torch.Tensor | None = None,
    row_experts: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """:func:`moe_finalize` in plain PyTorch on any device: float32, one cast at the end."""
    rows, (tokens, slots) = input.float(), permuted_rows.shape
    if row_experts is not None and (scale is not None or bias is not None):
        count = len(scale if scale is not None else bias)  # type: ignore[arg-type]
        expert = torch.where(is_row(row_experts, count), row_experts, 0).long()
        if scale is not None:
            rows = rows * scale[expert, None]
        if bias is not None:
            rows = rows + bias.float()[expert]
    sums = input.new_zeros(tokens, input.shape[1], dtype=torch.float32)
    for slot in range(slots):  # In this order, as the kernel adds.
        row = permuted_rows[:, slot].long()
        named = is_row(row, len(input))
        term = rows[row[named]]
        sums[named] += term if weights is None else term * weights[named, slot, None]
    return sums.to(out_dtype or input.dtype)


def _check(
    export: str,
    input: torch.Tensor,
    permuted_rows: torch.Tensor,
    weights: torch.Tensor | None,
    row_experts: torch.Tensor | None,
    scale: torch.Tensor | None,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    ranks: int,
) -> None:
    check_matrix(export, "input", input, VECTOR)
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


_BOTH = Both.of(
    "moe_finalize",
    "input:T=bf16|f16[count,columns] permuted_rows:i32[tokens,slots] weights?:f32[tokens,slots] "
    "row_experts?:i32[count] scale?:f32[experts] out!:U=bf16|f16[tokens,columns] "
    "bias?:U[experts,columns] ranks:int(1-2147483647) enable_pdl:pdl",
    reference=lambda input, permuted_rows, weights, row_experts, scale, bias, ranks: (
        moe_finalize_reference(
            *(input, permuted_rows, weights, row_experts, scale, bias, torch.float32)
        )
    ),
    check=_check,
    derived={"out_dtype": lambda out: out.dtype},
)
#: For the fused mixture of experts.
FINALIZE = _BOTH.cuda


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
        "input": Tensor(["num_rows", "hidden_size"]),
        "permuted_rows": Tensor(["num_tokens", "topk"], dtype="int32"),
        "weights": Tensor(["num_tokens", "topk"], dtype="float32"),
    }
    if has_bias:
        axes["num_local_experts"] = Const("e", sample=4)
        inputs["row_experts"] = Tensor(["num_rows"], dtype="int32")
        inputs["bias"] = Tensor(["num_local_experts", "hidden_size"])
    return TraceTemplate(
        op_type="moe_finalize",
        name_prefix="moe_finalize" + "_bias" * has_bias,
        description="Adds up the rows that the experts of a token computed, by their weights.",
        axes=axes,
        inputs=inputs,
        outputs={
            "output": Tensor(["num_tokens", "hidden_size"], param="out", dtype_from="input"),
        },
        reference=moe_finalize_reference,
        tags=["moe"],
        fill=_fill,
    )


@precast_api(trace=by_form(_has_bias, _template, [False, True]))
@op("moe_finalize", backends=backends("moe_finalize"), chosen_by_body=True)
@documented(BACKEND, ROWS)
def moe_finalize(
    input: torch.Tensor,
    permuted_rows: torch.Tensor,
    weights: torch.Tensor | None = None,
    row_experts: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    ranks: int = 1,
) -> torch.Tensor:
    r"""Add up the rows that the experts of each token computed, weighted.

    It is the last step of a mixture of experts: ``input`` is what the second grouped product
    returns, whose rows are ordered by experts; the result has a row for each token.

    .. math::

        out_{t,c} = \mathrm{round}\left(\sum_k weights_{t,k} \cdot (scale_e \cdot input_{r,c} +
        bias_{e,c})\right), \quad r = permuted\_rows_{t,k}, \quad e = row\_experts_r

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, columns]``, bfloat16 or float16, on a CUDA device; ``columns`` is a multiple of 8,
        the last dimension has stride 1, rows start at multiples of 16 bytes.
    permuted_rows : torch.Tensor
        ``[tokens, topk]``, int32, contiguous, as :func:`moe_sort` makes it: the row of each of the
        token's experts. A number that is no row of ``input``, such as -1, adds nothing: an expert
        that is on another GPU, or whose capacity is used up.
    weights : torch.Tensor, optional
        ``[tokens, topk]``, float32, contiguous. Default: 1.
    row_experts : torch.Tensor, optional
        ``[rows]``, int32, contiguous: the expert of each row, which ``scale`` and ``bias`` need.
    scale : torch.Tensor, optional
        ``[experts]``, float32, contiguous. Default: 1.
    bias : torch.Tensor, optional
        ``[experts, columns]`` of the dtype of ``out``, contiguous. Default: none.
    out : torch.Tensor, optional
        ``[tokens, columns]``, bfloat16 or float16; strides as ``input``. float16 for an ``input``
        of bfloat16 is legal, bfloat16 for one of float16 is not. Default: a new tensor.
    out_dtype : torch.dtype, optional
        The dtype of a new ``out``. Default: that of ``input``.
    ranks : int
        Over how many GPUs experts are spread, so that only a part of a token's rows is here. It
        changes no number: where few rows of a token are here, another kernel gives them sooner.
        Default: 1.

    Returns
    -------
    torch.Tensor
        ``[tokens, columns]``; ``out`` if it is given. Tokens without any row are zeros.

    Notes
    -----
    Sums are float32 in the order of the experts, and are rounded once to nearest even, so equal
    arguments give equal bits. Rows that no token has are not read: NaN there reaches nothing. One
    launch; allocates only a missing ``out``; safe in CUDA graphs, whichever experts are chosen; not
    differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> rows = torch.arange(3.0).half()[:, None].expand(3, 8).contiguous()
    >>> indices = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.moe_finalize(rows, indices, torch.full((2, 2), 0.5))[:, 0]
    tensor([1.0000, 0.5000], dtype=torch.float16)
    """
    out_dtype = out_dtype or (input.dtype if out is None else out.dtype)
    if out is None:
        out = input.new_empty(permuted_rows.shape[0], input.shape[1], dtype=out_dtype)
    check_out("moe_finalize", out, out_dtype)
    export = _BOTH.cuda if backend == "auto" or backend == "cuda" else _BOTH.other(backend)
    export.launch(input, permuted_rows, weights, row_experts, scale, out, bias, ranks, enable_pdl)
    return out
