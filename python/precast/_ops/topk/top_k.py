# SPDX-License-Identifier: Apache-2.0
"""Find the k largest elements of each row."""

from __future__ import annotations

import enum

from precast._base.torch import torch
from precast._op.export import Export, launches
from precast._ops.topk._common import KINDS, by_value, check_scores, new
from precast._ops.topk._trace import top_k_trace
from precast.api_logging import precast_api


class TopKTieBreak(enum.IntEnum):
    """Which of equal elements are chosen where not all of them are."""

    NONE = 0
    SMALL = 1
    LARGE = 2

    def __str__(self) -> str:
        return self.name.lower()

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, format_spec: str) -> str:
        return format(str(self), format_spec)


def top_k_reference(
    input: torch.Tensor, k: int, sorted: bool = False, tie_break: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`top_k` in plain PyTorch on any device, in the order of ``deterministic=True``."""
    indices = by_value(input, tie_break)[:, :k].sort(dim=1).values
    values = input.gather(1, indices)
    if sorted:
        order = values.sort(dim=1, descending=True, stable=True).indices
        values, indices = values.gather(1, order), indices.gather(1, order)
    return values, indices


def _check(export: str, input: torch.Tensor, k: int, tie_break: int) -> None:
    check_scores(export, input, k, tie_break)
    if k > input.shape[1]:
        raise ValueError(f"{export}: k must be at most input's {input.shape[1]} columns, got {k}")


_TOP_K = Export(
    "topk",
    "top_k",
    "input:T=f32|f16|bf16[rows,columns] k:size sorted:bool deterministic:bool tie_break:enum "
    "values!:T[rows,k] indices!:i64[rows,k] enable_pdl:pdl_on",
    reference=top_k_reference,
    check=_check,
    new={"values": new("input.dtype"), "indices": new("_torch.int64")},
    kinds=KINDS,
)


@precast_api(trace=top_k_trace(top_k_reference))
@launches(_TOP_K, explain=check_scores)
def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the k largest elements of each row.

    Parameters
    ----------
    input : torch.Tensor
        ``[rows, d]``, float32, float16 or bfloat16, rows with unit stride, on a CUDA device; ``d``
        up to 2^20. NaN is larger than all numbers.
    k : int
        How many; from 1 to ``d``. Above 8192 it is slower: parts of the result are found apart.
    sorted : bool
        By descending value.
    deterministic : bool
        The same input gives the same output, order included: equal values by ascending position,
        and where the output is not sorted, all.
    tie_break : int
        Which of the elements that equal the k-th largest are chosen: any (``TopKTieBreak.NONE``;
        with ``deterministic``, the first), the first (``SMALL``) or the last (``LARGE``).
    dsa_graph_safe : bool
        Taken for compatibility: every call can be captured in a CUDA graph.

    Returns
    -------
    tuple of torch.Tensor
        Values, ``[rows, k]``, dtype of ``input``, and their positions, ``[rows, k]``, int64.

    Raises
    ------
    ValueError
        A tensor that is not on a CUDA device; another dtype, shape or stride; ``k`` out of range;
        an unknown ``tie_break``.

    Notes
    -----
    Exact. Allocates its results; safe in CUDA graphs; not differentiable.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     values, indices = precast.top_k(torch.tensor([[1.0, 3.0, 2.0]]), 2, sorted=True)
    >>> values.tolist(), indices.tolist()
    ([[3.0, 2.0]], [[1, 2]])
    """


def can_implement_filtered_topk() -> bool:
    """Return whether the GPU is one that top-k is built for.

    FlashInfer's answer says whether its kernel with tie-breaking fits the GPU's shared memory. Here
    each GPU that has a target breaks ties.

    Returns
    -------
    bool
        True for compute capability 8.0 and later; False without a CUDA device.
    """
    return bool(torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0))
