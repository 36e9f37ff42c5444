# SPDX-License-Identifier: Apache-2.0
"""``wrapper._cached_module.plan(...)``, which engines call with positional arguments of their own.

They plan past ``plan()`` to save its copies: with the workspaces, lengths on the host, and options,
in the order that FlashInfer's modules take them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from precast._base.torch import torch

_DECODE_ARGUMENTS = 15
_PREFILL_ARGUMENTS = (16, 18, 19, 20)


class PrefillArguments(NamedTuple):
    """What engines pass of a prefill, in their order."""

    float_workspace: torch.Tensor
    int_workspace: torch.Tensor
    pinned_workspace: object
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_len: torch.Tensor
    total_num_rows: int
    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    use_cuda_graph: bool
    head_dim_qk: int
    head_dim_vo: int
    causal: bool
    window_left: int
    fixed_split_size: int | None = -1
    disable_split_kv: bool = False
    num_colocated_ctas: int = 0
    uniform_q_len: int = 0


class DecodeArguments(NamedTuple):
    """What engines pass of a decode, in their order."""

    float_workspace: torch.Tensor
    int_workspace: torch.Tensor
    pinned_workspace: object
    kv_indptr: torch.Tensor
    batch_size: int
    num_qo_heads: int
    num_kv_heads: int
    page_size: int
    use_cuda_graph: bool
    window_left: int
    logits_soft_cap: float
    head_dim_qk: int
    head_dim_vo: int
    q_dtype_like: torch.Tensor
    kv_dtype_like: torch.Tensor


class CachedModule:
    """Plans for its wrapper; what :meth:`plan` returns belongs into ``wrapper._plan_info``."""

    def __init__(
        self,
        plan_decode: Callable[[DecodeArguments], list[int]],
        plan_prefill: Callable[[PrefillArguments], list[int]],
    ) -> None:
        self._plan_decode = plan_decode
        self._plan_prefill = plan_prefill

    def plan(self, *args: Any) -> list[int]:
        """Plan by position.

        Parameters
        ----------
        *args
            Of decode, 15: float, int and pinned workspace, ``indptr``, batch size, query heads,
            KV heads, page size, whether CUDA graphs are on, ``window_left``, ``logits_soft_cap``,
            both head dimensions, an empty tensor of the dtype of queries, one of that of keys.

            Of prefill, 16 to 20: the workspaces, ``qo_indptr``, ``kv_indptr``, KV lengths, rows,
            batch size, query heads, KV heads, page size, whether CUDA graphs are on, both head
            dimensions, ``causal``, ``window_left``, and then if given ``fixed_split_size``,
            ``disable_split_kv``, the number of CTAs that run beside, queries of every request.

        Returns
        -------
        list of int
            Rows of a tile, ``causal`` and ``window_left`` of the plan.

        Raises
        ------
        TypeError
            Another number of arguments.
        """
        if len(args) == _DECODE_ARGUMENTS:
            return self._plan_decode(DecodeArguments(*args))
        if len(args) in _PREFILL_ARGUMENTS:
            return self._plan_prefill(PrefillArguments(*args))
        legal = ", ".join(map(str, (_DECODE_ARGUMENTS, *_PREFILL_ARGUMENTS)))
        raise TypeError(f"_cached_module.plan: takes {legal} arguments, got {len(args)}")
