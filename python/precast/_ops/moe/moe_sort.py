# SPDX-License-Identifier: Apache-2.0
"""The order of the rows of a mixture of experts: those of an expert follow each other."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, op
from precast._op.validation import check_contiguous
from precast._ops.moe._rows import MAX_ROWS, ROWS
from precast.api_logging import precast_api
from precast.trace import Const, Scalar, Tensor, TraceTemplate, Var

#: Pairs that a CTA sorts, and experts of a rank: ``kSortChunk`` and ``kMaxSortExperts``.
CHUNK, MAX_EXPERTS = 4096, 1024


def moe_sort_reference(
    token_selected_experts: torch.Tensor, num_experts: int, first_expert: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`moe_sort` in plain PyTorch on any device; what the kernel leaves alone is -1."""
    experts = token_selected_experts.flatten().long() - first_expert
    is_local = (experts >= 0) & (experts < num_experts)
    key = torch.where(is_local, experts, num_experts)
    pairs = key.argsort(stable=True)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=key.device)
    offsets[1:] = torch.bincount(key, minlength=num_experts + 1)[:num_experts].cumsum(0)
    rows = torch.empty_like(key)
    rows[pairs] = torch.arange(len(key), device=key.device)
    rows = torch.where(is_local, rows, -1).view(token_selected_experts.shape)
    row_experts = torch.where(is_local, key, -1)[pairs]
    return offsets, rows.to(torch.int32), row_experts.to(torch.int32)


def chunks_of(pairs: int) -> int:
    """How many CTAs sort so many pairs."""
    return max(-(-pairs // CHUNK), 1)


def _check(
    export: str,
    token_selected_experts: torch.Tensor,
    first_expert: int,
    expert_offsets: torch.Tensor,
    permuted_rows: torch.Tensor,
    row_experts: torch.Tensor,
    counts: torch.Tensor | None,
) -> None:
    experts, pairs = len(expert_offsets) - 1, token_selected_experts.numel()
    if not 0 <= experts <= MAX_EXPERTS:
        raise ValueError(
            f"{export}: expert_offsets must have 1 to {MAX_EXPERTS + 1} elements, got shape "
            f"{[*expert_offsets.shape]}"
        )
    if not 0 <= first_expert <= MAX_ROWS - experts:
        raise ValueError(
            f"{export}: first_expert must be from 0 to {MAX_ROWS - experts}, got {first_expert}"
        )
    check_contiguous(
        export,
        token_selected_experts=token_selected_experts,
        expert_offsets=expert_offsets,
        permuted_rows=permuted_rows,
        row_experts=row_experts,
        counts=counts,
    )
    chunks = chunks_of(pairs)
    if row_experts.shape != (pairs,):
        raise ValueError(
            f"{export}: row_experts must have shape [{pairs}], got {[*row_experts.shape]}"
        )
    if chunks > 1 and (counts is None or counts.shape != (chunks, experts)):
        got = None if counts is None else [*counts.shape]
        raise ValueError(f"{export}: counts must have shape {[chunks, experts]}, got {got}")


def _write(
    token_selected_experts: torch.Tensor,
    first_expert: int,
    expert_offsets: torch.Tensor,
    permuted_rows: torch.Tensor,
    row_experts: torch.Tensor,
) -> None:
    experts = len(expert_offsets) - 1
    offsets, rows, experts_of = moe_sort_reference(token_selected_experts, experts, first_expert)
    expert_offsets.copy_(offsets)
    permuted_rows.copy_(rows)
    row_experts[: offsets[-1]] = experts_of[: offsets[-1]]


SORT = Export(
    "moe_permute",
    "moe_sort",
    "token_selected_experts:i32[tokens,slots] first_expert:int expert_offsets!:i32[starts] "
    "permuted_rows!:like(token_selected_experts,apart) row_experts!:i32[rows] "
    "counts!?:i32[chunks,experts] enable_pdl:pdl",
    check=_check,
    write=_write,
    derived={"num_experts": lambda expert_offsets: len(expert_offsets) - 1},
)


def _fill(made: dict[str, Any]) -> None:
    selected = made["token_selected_experts"]
    numbers = torch.arange(selected.numel(), device=selected.device)
    selected.copy_((numbers * 7 % made["num_experts"]).view(selected.shape))


@precast_api(
    trace=TraceTemplate(
        op_type="moe_sort",
        name_prefix="moe_sort",
        description="Orders the rows of tokens by the experts that the tokens go to.",
        axes={
            "num_tokens": Var(sample=24),
            "topk": Const("k", sample=4),
            "num_local_experts": Const("e", param="num_experts", sample=16),
            "num_starts": Const("", value="num_local_experts + 1"),
            "num_rows": Var("Rows of all slots.", value="num_tokens * topk", in_data=True),
        },
        inputs={
            "token_selected_experts": Tensor(["num_tokens", "topk"], dtype="int32"),
            "num_experts": Scalar("int32", sample=16),
            "first_expert": Scalar("int32", sample=0),
        },
        outputs={
            "offsets": Tensor(["num_starts"], param="expert_offsets", dtype="int32"),
            "rows": Tensor(["num_tokens", "topk"], param="permuted_rows", dtype="int32"),
            "experts": Tensor(["num_rows"], param="row_experts", dtype="int32"),
        },
        reference=moe_sort_reference,
        tags=["moe"],
        fill=_fill,
    )
)
@op("moe_permute")
@documented(ROWS)
def moe_sort(
    token_selected_experts: torch.Tensor,
    num_experts: int,
    first_expert: int = 0,
    expert_offsets: torch.Tensor | None = None,
    permuted_rows: torch.Tensor | None = None,
    row_experts: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    r"""Order the rows of tokens by the experts that the tokens go to.

    .. math::

        e_p &= selected_p - first\_expert, \quad p = token \cdot slots + slot \\
        offsets_e &= |\{p : 0 \le e_p < e\}| \\
        rows_p &= offsets_{e_p} + |\{q < p : e_q = e_p\}|

    Parameters
    ----------
    token_selected_experts : torch.Tensor
        ``[tokens, slots]``, int32, contiguous, on a CUDA device: the experts of each token, of all
        ranks. A token may have the same expert twice. Any number that is not one of this rank's
        experts says that the slot has no row here.
    num_experts : int
        Experts of this rank, up to 1024.
    first_expert : int
        The number of its first expert. Default: 0.
    expert_offsets : torch.Tensor, optional
        ``[num_experts + 1]``, int32, contiguous. Overwritten with the row at which each expert
        begins, and the number of rows. Default: a new tensor.
    permuted_rows : torch.Tensor, optional
        ``[tokens, slots]``, int32, contiguous. Overwritten with the row of each slot, or -1.
        Default: a new tensor.
    row_experts : torch.Tensor, optional
        ``[tokens * slots]``, int32, contiguous. As many elements as there are rows are overwritten
        with the expert of each, counted from ``first_expert``; the others stay. Default: a new
        tensor.
    counts : torch.Tensor, optional
        ``[ceil(tokens * slots / 4096), num_experts]``, int32, contiguous: scratch of calls with
        more than 4096 slots; others do not look at it. Default: a new tensor.

    Returns
    -------
    tuple of torch.Tensor
        ``expert_offsets``, ``permuted_rows`` and ``row_experts``.

    Notes
    -----
    The order is stable: the rows of an expert are in the order of tokens, then of slots, so equal
    arguments give equal results. One launch for up to 4096 slots, otherwise two; allocates only
    what is missing; nothing is read by the host, so that a CUDA graph may be replayed with other
    experts; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> selected = torch.tensor([[1, 0], [5, 1]], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     offsets, rows, experts = precast.fused_moe.moe_sort(selected, 2)
    >>> offsets.tolist(), rows.tolist(), experts[:3].tolist()
    ([0, 1, 3], [[1, 0], [-1, 2]], [0, 1, 1])
    """
    selected, pairs = token_selected_experts, token_selected_experts.numel()
    if expert_offsets is None:
        expert_offsets = selected.new_empty(num_experts + 1)
    elif expert_offsets.shape != (num_experts + 1,):
        raise ValueError(
            f"moe_sort: expert_offsets must have shape [{num_experts + 1}], got "
            f"{[*expert_offsets.shape]}"
        )
    if permuted_rows is None:
        permuted_rows = torch.empty_like(selected)
    if row_experts is None:
        row_experts = selected.new_empty(pairs)
    if counts is None and (torch.compiler.is_compiling() or pairs > CHUNK):
        counts = selected.new_empty(chunks_of(pairs), num_experts)
    SORT.launch(
        selected, first_expert, expert_offsets, permuted_rows, row_experts, counts, enable_pdl
    )
    return expert_offsets, permuted_rows, row_experts
