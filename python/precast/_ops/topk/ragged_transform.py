# SPDX-License-Identifier: Apache-2.0
"""Find the k largest scores of each query, as positions in a ragged KV cache."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._op.export import Export, launches
from precast._ops.topk._common import KINDS, check_scores, largest_in_windows, new_indices
from precast._ops.topk._trace import transform_trace
from precast._ops.topk.top_k import TopKTieBreak, top_k
from precast.api_logging import precast_api

NAME = "top_k_ragged_transform"


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
    NAME,
    "input:T[rows,columns] offsets:i32[rows] lengths:i32[rows] k:size deterministic:bool "
    "tie_break:enum row_starts?:i32[rows] out!:i32[rows,k] enable_pdl:pdl_on",
    reference=top_k_ragged_transform_reference,
    check=check_scores,
    new={"out": new_indices},
    kinds=KINDS,
)


@precast_api(
    trace=transform_trace(
        NAME,
        "Finds the k largest scores of each row, as positions in a ragged cache",
        top_k_ragged_transform_reference,
        False,
    )
)
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
        How many are chosen; from 1 to 8192, also above ``max_len``.
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
