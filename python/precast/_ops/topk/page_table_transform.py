# SPDX-License-Identifier: Apache-2.0
"""The k largest scores of each query, as positions in a paged KV cache."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.export import Export, op
from precast._op.validation import check_memory_apart, check_within
from precast._ops.topk._checks import KINDS, check_scores, new_indices
from precast._ops.topk._formula import largest_in_windows
from precast._ops.topk._trace import transform_trace
from precast._ops.topk.top_k import TopKTieBreak
from precast.api_logging import precast_api

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
    """:func:`top_k_page_table_transform` in plain PyTorch, in the order of ``deterministic=True``.

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, max_len]``, float32, float16 or bfloat16, any device.
    src_page_table : torch.Tensor
        ``[batch, pages]``, int32.
    lengths : torch.Tensor
        ``[rows]``, int32.
    k : int
        At least 1.
    row_to_batch, row_starts, page_table_row_starts : torch.Tensor, optional
        ``[rows]``, int32.
    tie_break : int
        A :class:`TopKTieBreak`.
    page_size : int
        Scores of a page.

    Returns
    -------
    torch.Tensor
        ``[rows, k]``, int32.

    Examples
    --------
    >>> import torch
    >>> scores, table = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[7, 5, 9]])
    >>> top_k_page_table_transform_reference(scores, table, torch.tensor([3]), 2).tolist()
    [[5, 9]]
    """
    at = largest_in_windows(input, lengths, k, tie_break, row_starts)
    return in_pages(at, src_page_table, row_to_batch, row_starts, page_table_row_starts, page_size)


def in_pages(
    at: torch.Tensor,
    table: torch.Tensor,
    row_to_batch: torch.Tensor | None,
    row_starts: torch.Tensor | None,
    page_table_row_starts: torch.Tensor | None,
    page_size: int,
) -> torch.Tensor:
    """Positions in windows as physical ones; -1 stays. Of an empty window nothing else counts."""
    rows = torch.arange(at.shape[0], device=at.device)
    batch = (rows if row_to_batch is None else row_to_batch.long()).where(at[:, 0] >= 0, 0)
    pages = page_columns(at, row_starts, page_table_row_starts, page_size).where(at >= 0, 0)
    physical = table[batch[:, None], pages].long() * page_size + at % page_size
    return torch.where(at < 0, -1, physical).to(torch.int32)


def page_columns(
    at: torch.Tensor,
    row_starts: torch.Tensor | None,
    page_table_row_starts: torch.Tensor | None,
    page_size: int,
) -> torch.Tensor:
    """The column of the page table for each position of a window."""
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


def _write(
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
    at = largest_in_windows(input, lengths, k, tie_break, row_starts)
    starts = row_starts, page_table_row_starts
    out.copy_(in_pages(at, src_page_table, row_to_batch, *starts, page_size))
    if out_raw_indices is not None:
        out_raw_indices.copy_(at)


_PAGED = Export(
    "topk",
    NAME,
    "input:T[rows,columns] src_page_table:i32[batch,pages] lengths:i32[rows] k:size "
    "row_to_batch?:i32[rows] deterministic:bool tie_break:enum row_starts?:i32[rows] "
    "page_table_row_starts?:i32[rows] page_size:int out!:i32[rows,k] "
    "out_raw_indices!?:i32[rows,k] enable_pdl:pdl_on",
    write=_write,
    check=_check,
    kinds=KINDS,
)


@precast_api(
    trace=transform_trace(
        NAME,
        "Finds the k largest scores of each row, as positions in a paged cache",
        top_k_page_table_transform_reference,
        True,
    )
)
@op("topk", explain=check_scores)
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
    input : torch.Tensor
        ``[rows, max_len]``, float32, float16 or bfloat16, rows with unit stride, on a CUDA device;
        ``max_len`` up to 2^20.
    src_page_table : torch.Tensor
        ``[batch, pages]``, int32, rows with unit stride; entries that positions lead to are not
        negative, and what becomes of them fits int32. That there are such entries is not checked on
        a GPU, where what lies beside the table would be read; reference mode raises an
        ``IndexError``.
    lengths : torch.Tensor
        ``[rows]``, int32: how many scores each row has; none behind ``max_len`` count.
    k : int
        How many are chosen; from 1 to 8192, also above ``max_len``.
    row_to_batch : torch.Tensor, optional
        ``[rows]``, int32: the row of the page table. Default: each its own.
    deterministic : bool
        The same input gives the same output, by ascending position.
    tie_break : int
        Which of equal scores are chosen, as in :func:`top_k`.
    dsa_graph_safe : bool
        Taken for compatibility: every call can be captured in a CUDA graph.
    row_starts : torch.Tensor, optional
        ``[rows]``, int32: where the scores of each row start. Default: 0.
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
        ``out`` or the new tensor; -1 behind the last position of a row with fewer than ``k``
        scores, whose positions come in ascending order.

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
    if out is None:
        out = new_indices(input, k)
    _PAGED.launch(
        input,
        src_page_table,
        lengths,
        k,
        row_to_batch,
        deterministic,
        tie_break,
        row_starts,
        page_table_row_starts,
        page_size,
        out,
        out_raw_indices,
    )
    return out
