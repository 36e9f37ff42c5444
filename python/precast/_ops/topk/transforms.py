# SPDX-License-Identifier: Apache-2.0
"""Find the k largest scores of each query, as positions in a ragged or paged KV cache."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.declaration import Kind
from precast._op.docs import documented
from precast._op.export import Export, accepted, launches
from precast._op.validation import check_memory_apart, check_within
from precast._ops.topk._common import KINDS, check_scores, largest_in_windows, new
from precast._ops.topk._trace import transform_trace
from precast._ops.topk.top_k import TopKTieBreak, top_k
from precast.api_logging import precast_api

# -- ragged caches --------------------------------------------------------------------------------


def top_k_ragged_transform_reference(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    tie_break: int = 0,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`top_k_ragged_transform` in plain PyTorch on any device, in deterministic order."""
    at = largest_in_windows(input, lengths, k, tie_break, row_starts)
    return torch.where(at < 0, -1, at + offsets[:, None]).to(torch.int32)


_RAGGED = Export(
    "topk",
    "top_k_ragged_transform",
    "input:T=f32|f16|bf16[rows,columns] offsets:i32[rows] lengths:i32[rows] k:size "
    "deterministic:bool tie_break:enum row_starts?:i32[rows] out!:i32[rows,k] enable_pdl:pdl_on",
    reference=top_k_ragged_transform_reference,
    check=check_scores,
    new={"out": new("_torch.int32")},
    kinds=KINDS,
)


@precast_api(trace=transform_trace(top_k_ragged_transform_reference, pages=False))
@launches(_RAGGED, explain=check_scores)
@documented(top_k)
def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Find the k largest scores of each row, as positions in a ragged cache.

    The scores of row ``i`` are ``input[i, s : s + lengths[i]]`` for ``s = row_starts[i]``; position
    ``j`` of them becomes ``offsets[i] + j``.

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, max_len]``, float32, float16 or bfloat16, rows with unit stride, on a CUDA device;
        ``max_len`` up to 2^20.
    offsets : torch.Tensor
        ``[rows]``, int32: added to the positions of each row.
    lengths : torch.Tensor
        ``[rows]``, int32: how many scores each row has; none behind ``max_len`` count.
    k : int
        How many are chosen; from 1 to 2^20, also above ``max_len``.
    deterministic : bool
        The same input gives the same output, by ascending position.
    tie_break : int
        Which of equal scores are chosen, as in :func:`top_k`.
    row_starts : torch.Tensor, optional
        ``[rows]``, int32: where the scores of each row start. Default: 0.

    Returns
    -------
    torch.Tensor
        ``[rows, k]``, int32; -1 behind the last position of a row with fewer than ``k`` scores,
        whose positions come in ascending order.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; another dtype, shape or stride; ``k`` out of range;
        an unknown ``tie_break``.

    Notes
    -----
    Exact. Allocates its result; safe in CUDA graphs; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> scores = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]])
    >>> offsets, lengths = torch.tensor([[0, 3], [3, 1]], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.top_k_ragged_transform(scores, offsets, lengths, 2).tolist()
    [[1, 2], [3, -1]]
    """


# -- paged caches ---------------------------------------------------------------------------------

NAME = "top_k_page_table_transform"


def top_k_page_table_transform_reference(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    tie_break: int = 0,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    page_size: int = 1,
) -> torch.Tensor:
    """:func:`top_k_page_table_transform` in plain PyTorch on any device, in deterministic order."""
    at = largest_in_windows(input, lengths, k, tie_break, row_starts)
    rows = torch.arange(at.shape[0], device=at.device)
    # The row of the page table of an empty window is not read.
    batch = (rows if row_to_batch is None else row_to_batch.long()).where(at[:, 0] >= 0, 0)
    pages = page_columns(at, row_starts, page_table_row_starts, page_size).where(at >= 0, 0)
    physical = src_page_table[batch[:, None], pages].long() * page_size + at % page_size
    return torch.where(at < 0, -1, physical).to(torch.int32)


def _both_positions(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions in the cache, and in the windows, -1 behind the last of them."""
    reference = top_k_page_table_transform_reference
    physical = reference(**accepted(reference, given))
    return physical, largest_in_windows(**accepted(largest_in_windows, given))


def page_columns(
    at: torch.Tensor,
    row_starts: torch.Tensor | None,
    page_table_row_starts: torch.Tensor | None,
    page_size: int,
) -> torch.Tensor:
    """Return the column of the page table for each position of a window."""
    first = row_starts if page_table_row_starts is None else page_table_row_starts
    return at // page_size + (0 if first is None else first.long()[:, None])


def _check(
    export: str,
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None,
    tie_break: int,
    row_starts: torch.Tensor | None,
    page_table_row_starts: torch.Tensor | None,
    page_size: int,
    out: torch.Tensor,
    out_raw_indices: torch.Tensor | None,
) -> None:
    check_scores(export, input, k, tie_break)
    batch, columns = src_page_table.shape
    if row_to_batch is None and batch < input.shape[0]:
        raise ValueError(
            f"{export}: src_page_table must have a row for each of input's {input.shape[0]}, got "
            f"shape {[*src_page_table.shape]}; or pass row_to_batch"
        )
    if out_raw_indices is not None:
        check_memory_apart(export, "out_raw_indices", out_raw_indices, out, "out")
    at = largest_in_windows(input, lengths, k, tie_break, row_starts)
    if row_to_batch is not None:
        used = row_to_batch[at[:, 0] >= 0]
        check_within(export, "row_to_batch", used, batch, "rows of src_page_table")
    pages = page_columns(at, row_starts, page_table_row_starts, page_size)[at >= 0]
    check_within(export, "the page of a position", pages, columns, "columns of src_page_table")


def _check_page_size(
    page_size: int, row_starts: torch.Tensor | None, page_table_row_starts: torch.Tensor | None
) -> int:
    if page_size != 1:
        if not 0 < page_size <= 1 << 30 or page_size & (page_size - 1):
            raise ValueError(
                f"{NAME}: page_size must be a positive power of two no greater than 2**30, got "
                f"{page_size}"
            )
        if row_starts is not None and page_table_row_starts is None:
            raise ValueError(
                f"{NAME}: page_table_row_starts is required with page_size > 1 and row_starts"
            )
    return page_size


_PAGE_SIZE = Kind(
    "int {name}",
    "_check_page_size({name}, row_starts, page_table_row_starts)",
    names={"_check_page_size": _check_page_size},
)
_PAGED = Export(
    "topk",
    NAME,
    "input:T=f32|f16|bf16[rows,columns] src_page_table:i32[batch,pages] lengths:i32[rows] k:size "
    "row_to_batch?:i32[rows] deterministic:bool tie_break:enum row_starts?:i32[rows] "
    "page_table_row_starts?:i32[rows] page_size:page_size out!:i32[rows,k] "
    "out_raw_indices!?:i32[rows,k] enable_pdl:pdl_on",
    reference=_both_positions,
    check=_check,
    new={"out": new("_torch.int32")},
    kinds={**KINDS, "page_size": _PAGE_SIZE},
)


@precast_api(trace=transform_trace(top_k_page_table_transform_reference, pages=True))
@launches(_PAGED, ["out"], check_scores)
@documented(top_k_ragged_transform)
def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Find the k largest scores of each row, as positions in a paged cache.

    The scores of row ``i`` are ``input[i, s : s + lengths[i]]`` for ``s = row_starts[i]``; position
    ``j`` of them becomes ``page * page_size + j % page_size``, where ``page`` is
    ``src_page_table[row_to_batch[i], page_table_row_starts[i] + j // page_size]``.

    Parameters
    ----------
    src_page_table : torch.Tensor
        ``[batch, pages]``, int32, rows with unit stride; entries that positions lead to are not
        negative, and what becomes of them fits int32. That there are such entries is not checked on
        a GPU, where what lies beside the table would be read; reference mode raises an
        ``IndexError``.
    row_to_batch : torch.Tensor, optional
        ``[rows]``, int32: the row of the page table. Default: each its own.
    page_table_row_starts : torch.Tensor, optional
        ``[rows]``, int32: where the pages of each row start, in pages. Default: ``row_starts``,
        with a ``page_size`` of 1 alone.
    page_size : int
        Scores of a page: a power of two up to 2^30.
    out : torch.Tensor, optional
        Where to write: ``[rows, k]``, int32, contiguous. Default: a new tensor.
    out_raw_indices : torch.Tensor, optional
        Where to write the positions in the windows: as ``out``, elsewhere in memory.

    Returns
    -------
    torch.Tensor
        ``[rows, k]``, int32, ``out`` if it is given; -1 behind the last position of a row with
        fewer than ``k`` scores, whose positions come in ascending order.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; another dtype, shape or stride; ``k`` or
        ``page_size`` out of range; an unknown ``tie_break``; ``row_starts`` without
        ``page_table_row_starts`` where a page holds several scores.

    Notes
    -----
    Exact. Allocates only a missing ``out``; safe in CUDA graphs; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> scores = torch.tensor([[1.0, 3.0, 2.0]])
    >>> table = torch.tensor([[7, 5]], dtype=torch.int32)
    >>> lengths = torch.tensor([3], dtype=torch.int32)
    >>> with precast.reference_mode():
    ...     precast.top_k_page_table_transform(scores, table, lengths, 2, page_size=2).tolist()
    [[15, 10]]
    """
