# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in a mixture of experts, from tables of addresses: the product from the rank.

Source: Chen et al., Punica: Multi-Tenant LoRA Serving, arXiv:2310.18547, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._op.validation import check_contiguous, check_elements_apart
from precast._ops.moe._lora import (
    PAIRS,
    add_up,
    check_rank_of,
    check_rows_of,
    check_stride,
    expanded,
    find_in_table,
    new_token_pairs,
)
from precast._ops.moe.bgmv_moe_shrink import TABLE
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var


def bgmv_moe_expand_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_indices: torch.Tensor,
    slice_start_loc: torch.Tensor,
    output_slices: Sequence[int],
    lora_stride: int,
    finalize: bool = True,
) -> torch.Tensor:
    """:func:`bgmv_moe_expand` in plain PyTorch on any device, out of place: float32.

    Returns
    -------
    torch.Tensor
        ``[rows, columns]``, float32: what the function writes to ``y``.
    """
    result, pairs = y.clone(), (sorted_token_ids, expert_ids, lora_indices)
    starts = slice_start_loc.tolist()
    for i, (start, size) in enumerate(zip(starts, output_slices)):
        find = find_in_table(w_ptr, lora_stride, size, x.shape[2], x)
        product, exists = expanded(x, i, find, pairs, size)
        # Columns that y does not have are left out.
        first, last = max(start, 0), max(min(start + size, y.shape[1]), 0)
        columns, product = result[:, first:last], product[:, first - start : last - start]
        if finalize:
            add_up(columns, product, exists, sorted_token_ids, topk_weights)
        else:
            columns[: len(exists)][exists] = product[exists]
    return result


def _check(
    export: str,
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_indices: torch.Tensor,
    slice_start_loc: torch.Tensor,
    output_size: int,
    lora_stride: int,
    finalize: bool,
    token_pairs: torch.Tensor | None,
) -> None:
    if y.shape[1] > 1 and y.stride(1) != 1:
        raise ValueError(
            f"{export}: y must have stride 1 in its last dimension, got strides {[*y.stride()]}; "
            f"call .contiguous()"
        )
    check_elements_apart(export, "y", y)
    check_contiguous(export, x=x)
    check_rank_of(export, "x", x, x.shape[2])
    check_contiguous(export, w_ptr=w_ptr)
    check_stride(export, lora_stride)
    check_contiguous(
        export,
        sorted_token_ids=sorted_token_ids,
        expert_ids=expert_ids,
        lora_indices=lora_indices,
        topk_weights=topk_weights,
        slice_start_loc=slice_start_loc,
    )
    if not 1 <= output_size <= y.shape[1]:
        raise ValueError(
            f"{export}: output_slices must be from 1 to the {y.shape[1]} columns of y, got "
            f"{output_size}"
        )
    least = lora_indices if finalize else sorted_token_ids
    check_rows_of(export, "y", y, len(least), "tokens" if finalize else "pairs")
    check_contiguous(export, token_pairs=token_pairs)


_EXPAND = Export(
    "bgmv_moe",
    "bgmv_moe_expand",
    "y!:f32[rows,columns] x:T=bf16|f16[slices,pairs,rank] w_ptr:i64[slices,experts] "
    "sorted_token_ids:i64[pairs] expert_ids:i64[pairs] topk_weights:f32[pairs] "
    "lora_indices:i64[tokens] slice_start_loc:i64[slices] output_size:int lora_stride:int "
    "finalize:bool token_pairs!?:i32[tokens,32] enable_pdl:pdl_on",
    reference=bgmv_moe_expand_reference,
    check=_check,
    derived={"output_slices": lambda output_size, x: [output_size] * len(x)},
)


@precast_api(
    trace=TraceTemplate(
        op_type="bgmv_moe",
        name_prefix="bgmv_moe_expand",
        description="Adds the products of pairs with matrices of low rank to the rows of tokens.",
        axes={
            "num_rows": Var(sample=7),
            "num_columns": Const("c", sample=40),
            "num_slices": Const("s", sample=1),
            "num_pairs": Var(sample=12),
            "rank": Const("r", multiple=8),
            "num_experts": Const("e", sample=4),
            "num_tokens": Var(sample=6),
        },
        inputs={
            "y": Tensor(["num_rows", "num_columns"], dtype="float32"),
            "x": Tensor(["num_slices", "num_pairs", "rank"]),
            # Generated calls hold the address 0, because memory of a test's own would move.
            "w_ptr": Tensor(["num_slices", "num_experts"], dtype="int64"),
            "sorted_token_ids": Tensor(["num_pairs"], dtype="int64"),
            "expert_ids": Tensor(["num_pairs"], dtype="int64"),
            "topk_weights": Tensor(["num_pairs"], dtype="float32"),
            "lora_indices": Tensor(["num_tokens"], dtype="int64"),
            "slice_start_loc": Tensor(["num_slices"], dtype="int64"),
            "lora_stride": Scalar("int64", sample=64),
        },
        outputs={"sums": Tensor(["num_rows", "num_columns"], param="y", dtype="float32")},
        reference=bgmv_moe_expand_reference,
        tags=["moe", "lora"],
        fixed={"output_slices": [40]},
    )
)
@op("bgmv_moe")
@documented(TABLE, PAIRS)
def bgmv_moe_expand(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora_indices: torch.Tensor,
    slice_start_loc: torch.Tensor,
    output_slices: Sequence[int],
    lora_stride: int,
    *,
    finalize: bool = True,
) -> None:
    r"""Add the products with the second matrices of low-rank adapters to the rows of tokens.

    .. math::

        d_{s,p} &= B_{s,l,e}\,x_{s,p}, \quad t = sorted\_token\_ids_p, \quad e = expert\_ids_p,
        \quad l = lora\_indices_t \\
        y_{t,\,start_s + c} &\leftarrow y_{t,\,start_s + c} + \sum_{p: t_p = t} topk\_weights_p \,
        d_{s,p,c} \qquad \text{if finalize} \\
        y_{p,\,start_s + c} &= d_{s,p,c} \qquad \text{otherwise}

    Parameters
    ----------
    y : torch.Tensor
        ``[tokens, columns]`` if ``finalize``, else ``[pairs, columns]``, or more rows; float32, on
        a CUDA device; the last dimension has stride 1. Sums are added to what it holds.
    x : torch.Tensor
        ``[slices, pairs, rank]``, bfloat16 or float16, contiguous, as :func:`bgmv_moe_shrink` makes
        it; the rank is a multiple of 8.
    topk_weights : torch.Tensor
        ``[pairs]``, float32, contiguous: the weight of each pair, which is not read unless
        ``finalize``.
    slice_start_loc : torch.Tensor
        ``[slices]``, int64, contiguous: the first column of each slice. Slices do not overlap;
        columns that ``y`` does not have are left out.
    output_slices : sequence of int
        The columns of each slice, from 1 to those of ``y``. Slices of different sizes cost a launch
        each.
    finalize : bool
        Whether the pairs of a token are added up, weighted, or each pair has a row of its own
        without a weight. Default: True.

    Notes
    -----
    Matrices are ``[size of the slice, rank]``. Sums are float32, over the pairs of a token in their
    order, by one thread: equal arguments give equal bits, and a token's sum does not depend on
    other tokens. Rows and pairs without weights are neither read nor written: NaN there reaches
    nothing. One launch for up to 1024 pairs, otherwise two and scratch memory of 128 bytes for each
    token; a token with more than 31 pairs is slow. Allocates only that; safe in CUDA graphs, which
    may be replayed with other tables, experts and adapters; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> b = torch.full((1, 2, 3, 8), 0.5).half()  # [adapters, experts, columns, rank]
    >>> table, y = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 3)
    >>> stride = precast.fused_moe.fill_w_ptr(table, b, 2, 0)
    >>> tokens, experts, first = torch.tensor([0, 0]), torch.tensor([1, 0]), torch.tensor([0])
    >>> with precast.reference_mode():
    ...     precast.fused_moe.bgmv_moe_expand(
    ...         y, torch.ones(1, 2, 8).half(), table, tokens, experts, torch.tensor([0.5, 0.25]),
    ...         torch.tensor([0]), first, [3], stride)
    >>> y
    tensor([[3., 3., 3.]])
    """
    is_list = isinstance(output_slices, Sequence)
    if not is_list or not all(isinstance(size, int) for size in output_slices):
        raise TypeError(
            f"bgmv_moe_expand: output_slices must be a list of int, one for each slice, got "
            f"{output_slices!r}"
        )
    if len(output_slices) != x.shape[0]:
        raise ValueError(
            f"bgmv_moe_expand: output_slices must have {x.shape[0]} elements, one for each slice, "
            f"got {len(output_slices)}"
        )
    of_pairs = sorted_token_ids, expert_ids, topk_weights, lora_indices
    many = None
    if finalize:
        many = new_token_pairs(sorted_token_ids, lora_indices.shape[0])
    if len(set(output_slices)) <= 1:
        size = output_slices[0] if output_slices else 1
        _EXPAND.launch(
            *(y, x, w_ptr, *of_pairs, slice_start_loc, size, lora_stride, finalize, many)
        )
        return
    for size in output_slices:  # Before the first launch.
        if not 1 <= size <= y.shape[1]:
            raise ValueError(
                f"bgmv_moe_expand: output_slices must be from 1 to the {y.shape[1]} columns of y, "
                f"got {size}"
            )
    for i, size in enumerate(output_slices):
        own = slice(i, i + 1)
        if many is not None and i > 0:
            many.zero_()
        _EXPAND.launch(
            *(y, x[own], w_ptr[own], *of_pairs, slice_start_loc[own], size, lora_stride, finalize),
            many,
        )
