# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in a mixture of experts, from tables of addresses: the product to the rank.

Source: Chen et al., Punica: Multi-Tenant LoRA Serving, arXiv:2310.18547, section 4.
"""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._op.validation import check_contiguous
from precast._ops.moe._lora import (
    PAIRS,
    VECTOR,
    check_rank_of,
    check_rows_of,
    check_stride,
    find_in_table,
    shrink,
)
from precast._ops.moe._rows import check_matrix
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

#: What the functions say of their tables.
TABLE = """
Parameters
----------
w_ptr : torch.Tensor
    ``[slices, experts]``, int64, contiguous: the address of the matrix of each slice and expert for
    adapter 0, as :func:`fill_w_ptr` writes it; a multiple of 16, or 0 for an expert without
    weights. Matrices are contiguous, of the dtype of ``x`` and on its device. Nothing can check
    them: a wrong address faults or gives wrong numbers, and so does an adapter that a matrix does
    not exist for.
lora_stride : int
    Elements from the matrix of an adapter to that of the next, a multiple of 8.
"""


def bgmv_moe_shrink_reference(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    lora_stride: int,
    per_pair_input: bool = False,
) -> torch.Tensor:
    """:func:`bgmv_moe_shrink` in plain PyTorch on any device, out of place: float32.

    Returns
    -------
    torch.Tensor
        ``[slices, pairs, rank]``, of the dtype of ``y``: what the function writes to ``y``.
    """
    result = y.clone()
    find = find_in_table(w_ptr, lora_stride, y.shape[2], x.shape[1], x)
    pairs = sorted_token_ids, expert_ids, lora_indices
    shrink(result, x, find, pairs, per_pair_input, accumulates=True)
    return result


def _check(
    export: str,
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    lora_stride: int,
    per_pair_input: bool,
) -> None:
    check_contiguous(export, y=y)
    check_rank_of(export, "y", y, y.shape[2])
    check_matrix(export, "x", x, VECTOR)
    check_contiguous(export, w_ptr=w_ptr)
    check_stride(export, lora_stride)
    check_contiguous(
        export,
        sorted_token_ids=sorted_token_ids,
        expert_ids=expert_ids,
        lora_indices=lora_indices,
    )
    least = sorted_token_ids if per_pair_input else lora_indices
    check_rows_of(export, "x", x, len(least), "pairs" if per_pair_input else "tokens")


_SHRINK = Export(
    "bgmv_moe",
    "bgmv_moe_shrink",
    "y!:T=bf16|f16[slices,pairs,rank] x:T[rows,hidden] w_ptr:i64[slices,experts] "
    "sorted_token_ids:i64[pairs] expert_ids:i64[pairs] lora_indices:i64[tokens] lora_stride:int "
    "per_pair_input:bool enable_pdl:pdl_on",
    reference=bgmv_moe_shrink_reference,
    check=_check,
)


@precast_api(
    trace=TraceTemplate(
        op_type="bgmv_moe",
        name_prefix="bgmv_moe_shrink",
        description="Multiplies the rows of pairs by matrices of low rank at given addresses.",
        axes={
            "num_slices": Const("s", sample=2),
            "num_pairs": Var(sample=12),
            "rank": Const("r", multiple=8),
            "num_rows": Var(sample=7),
            "hidden_size": Const("h", multiple=8),
            "num_experts": Const("e", sample=4),
            "num_tokens": Var(sample=6),
        },
        inputs={
            "y": Tensor(["num_slices", "num_pairs", "rank"]),
            "x": Tensor(["num_rows", "hidden_size"]),
            # Generated calls hold the address 0, because memory of a test's own would move.
            "w_ptr": Tensor(["num_slices", "num_experts"], dtype="int64"),
            "sorted_token_ids": Tensor(["num_pairs"], dtype="int64"),
            "expert_ids": Tensor(["num_pairs"], dtype="int64"),
            "lora_indices": Tensor(["num_tokens"], dtype="int64"),
            "lora_stride": Scalar("int64", sample=64),
        },
        outputs={
            "shrunk": Tensor(["num_slices", "num_pairs", "rank"], param="y", dtype_from="y"),
        },
        reference=bgmv_moe_shrink_reference,
        tags=["moe", "lora"],
    )
)
@launches(_SHRINK)
@documented(TABLE, PAIRS)
def bgmv_moe_shrink(
    y: torch.Tensor,
    x: torch.Tensor,
    w_ptr: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    lora_indices: torch.Tensor,
    lora_stride: int,
    *,
    per_pair_input: bool = False,
) -> None:
    r"""Add the products of tokens with the first matrices of their low-rank adapters to ``y``.

    .. math::

        y_{s,p} \leftarrow \mathrm{round}(y_{s,p} + A_{s,l,e}\,x_t), \quad
        t = sorted\_token\_ids_p, \quad e = expert\_ids_p, \quad l = lora\_indices_t

    Parameters
    ----------
    y : torch.Tensor
        ``[slices, pairs, rank]``, bfloat16 or float16, contiguous, on a CUDA device; the rank is a
        multiple of 8. Products are added to what it holds.
    x : torch.Tensor
        ``[tokens, hidden]``, of the dtype of ``y``, or more rows; ``hidden`` is a multiple of 8,
        the last dimension has stride 1, rows start at multiples of 16 bytes.
    per_pair_input : bool
        Whether ``x`` has a row for each pair, ``[pairs, hidden]``, in place of one for each token.
        Default: False.

    Notes
    -----
    Matrices are ``[rank, hidden]``. Sums are float32, their order depends on ``hidden`` alone, and
    they are rounded once, so equal arguments give equal bits. Pairs without weights are neither
    read nor written: NaN there reaches nothing. One launch; allocates nothing; safe in CUDA graphs,
    which may be replayed with other tables, experts and adapters; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> a = torch.full((1, 2, 8, 8), 0.5).half()  # [adapters, experts, rank, hidden]
    >>> table, y = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, 8).half()
    >>> stride = precast.fused_moe.fill_w_ptr(table, a, 2, 0)
    >>> x, pairs = torch.ones(2, 8).half(), torch.tensor([0, 1])
    >>> with precast.reference_mode():
    ...     precast.fused_moe.bgmv_moe_shrink(
    ...         y, x, table, pairs, pairs, torch.tensor([0, -1]), stride)
    >>> y[0, :, 0]
    tensor([4., 0.], dtype=torch.float16)
    """
