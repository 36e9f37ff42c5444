# SPDX-License-Identifier: Apache-2.0
"""Wrappers of older engines for one prefix that all requests share, in tensors without pages.

Source: Juravsky et al., Hydragen, arXiv:2402.05099.
"""

from __future__ import annotations

from typing import Any

from precast._base.dtypes import canonicalize_torch_dtype
from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention._docs import PAGED_RUN, PLAN, WRAPPER
from precast._ops.attention.batch_reference import (
    batch_decode_with_paged_kv_cache_reference,
    batch_prefill_with_paged_kv_cache_reference,
)
from precast._ops.attention.cascade.level_trace import shared_prefix_trace
from precast._ops.attention.cascade.merge import (
    merge_state_in_place,
    merge_state_in_place_reference,
)
from precast._ops.attention.decode.wrapper import BatchDecodeWithPagedKVCacheWrapper
from precast._ops.attention.parts import of_part, passed_on
from precast._ops.attention.plan import Dtype
from precast._ops.attention.prefill.paged import BatchPrefillWithPagedKVCacheWrapper
from precast._ops.attention.prefill.single import (
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_reference,
)
from precast._ops.attention.signature import checked_first, gathers
from precast._ops.paged._cache import Cache
from precast.api_logging import precast_api

_PREFIX = """
Parameters
----------
k_shared, v_shared : torch.Tensor
    ``[prefix, num_kv_heads, head_dim]`` in layout ``NHD``, ``[num_kv_heads, prefix, head_dim]`` in
    ``HND``: what all requests have in common.
unique_kv_cache : torch.Tensor or tuple of torch.Tensor
    The cache of the pages of ``begin_forward``, as ``paged_kv_cache`` of
    :meth:`BatchPrefillWithPagedKVCacheWrapper.run`.

Returns
-------
torch.Tensor
    The output, of the shape of ``q``.

Notes
-----
Plans and runs the prefix, runs the rest, and merges: four launches. Allocates workspaces and
outputs. Newer code uses :class:`MultiLevelCascadeAttentionWrapper`, which plans once for all
layers.
"""


def batch_decode_with_shared_prefix_reference(
    q: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    unique_kv_cache: Cache,
    paged_kv_indptr: torch.Tensor,
    paged_kv_indices: torch.Tensor,
    paged_kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> torch.Tensor:
    """:class:`BatchDecodeWithSharedPrefixPagedKVCacheWrapper` in plain PyTorch, in one call."""
    table = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
    shared = single_prefill_with_kv_cache_reference(
        q, k_shared, v_shared, kv_layout=kv_layout, return_lse=True
    )
    own = batch_decode_with_paged_kv_cache_reference(q, unique_kv_cache, *table, kv_layout)
    return merge_state_in_place_reference(*shared, *own)[0]


def batch_prefill_with_shared_prefix_reference(
    q: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    unique_kv_cache: Cache,
    qo_indptr: torch.Tensor,
    paged_kv_indptr: torch.Tensor,
    paged_kv_indices: torch.Tensor,
    paged_kv_last_page_len: torch.Tensor,
    causal: bool = False,
    sm_scale: float | None = None,
    kv_layout: str = "NHD",
) -> torch.Tensor:
    """:class:`BatchPrefillWithSharedPrefixPagedKVCacheWrapper` in plain PyTorch, in one call."""
    table = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
    shared = single_prefill_with_kv_cache_reference(
        q, k_shared, v_shared, kv_layout=kv_layout, sm_scale=sm_scale, return_lse=True
    )
    own = batch_prefill_with_paged_kv_cache_reference(
        q, unique_kv_cache, *table, kv_layout, causal=causal, sm_scale=sm_scale
    )
    return merge_state_in_place_reference(*shared, *own)[0]


class _UniqueDecode(BatchDecodeWithPagedKVCacheWrapper):
    """What requests do not share, with errors of the whole."""

    _name = "BatchDecodeWithSharedPrefixPagedKVCacheWrapper"
    _cache_argument = "unique_kv_cache"


class _UniquePrefill(BatchPrefillWithPagedKVCacheWrapper):
    """What requests do not share, with errors of the whole."""

    _name = "BatchPrefillWithSharedPrefixPagedKVCacheWrapper"
    _cache_argument = "unique_kv_cache"


def _prefix_state(unique: Any, given: Any, **options: Any) -> Any:
    """Return outputs and log-sum-exps over the prefix."""
    unique._check_planned(f"{unique._name}.forward")
    with of_part("the prefix", k="k_shared", v="v_shared"):
        return single_prefill_with_kv_cache(
            given.q,
            given.k_shared,
            given.v_shared,
            kv_layout=unique._kv_layout,
            return_lse=True,
            **options,
        )


@documented(WRAPPER, PLAN)
class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Compute attention of the newest tokens over a shared prefix and over pages of their own.

    The prefix is two tensors, and the rest a paged cache.

    Raises
    ------
    precast.errors.CacheLayoutError
        Another layout (a ``KeyError`` and a ``ValueError``).
    ValueError
        A workspace that is not aligned.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(
    ...         torch.empty(1024).byte()
    ...     )
    ...     one = torch.ones(1).int()
    ...     wrapper.begin_forward(torch.arange(2).int(), one - 1, one, 2, 1, 64, 1, "float32")
    ...     shared, own = torch.zeros(1, 1, 64), torch.ones(1, 2, 1, 1, 64)
    ...     wrapper.forward(torch.zeros(1, 2, 64), shared, shared, own)[0, :, 0]
    tensor([0.5000, 0.5000])
    """

    @precast_api
    @checked_first
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._batch_decode_wrapper = _UniqueDecode(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    @checked_first
    @documented(BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer)
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Take other workspaces; then plan again."""
        self._batch_decode_wrapper.reset_workspace_buffer(
            float_workspace_buffer, int_workspace_buffer
        )

    def _plan_unique(self, given: Any) -> None:
        wrapper = self._batch_decode_wrapper
        kv_dtype = canonicalize_torch_dtype(given.data_type, f"{wrapper._name}: data_type")
        tables = {
            name: getattr(given, f"unique_kv_{name}")
            for name in ("indptr", "indices", "last_page_len")
        }
        # Queries of 8 bits do not exist.
        dtypes = {"q_data_type": "float16" if kv_dtype.itemsize == 1 else kv_dtype}
        plan = BatchDecodeWithPagedKVCacheWrapper.plan
        wrapper.plan(**passed_on(plan, given, **tables, **dtypes))

    @precast_api
    @documented(PLAN)
    @gathers(_plan_unique)
    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: torch.dtype | str = "float16",
    ) -> None:
        """Divide the work of a batch over what its requests do not share.

        Parameters
        ----------
        unique_kv_indptr : torch.Tensor
            ``[batch_size + 1]``, int32, on the device or on the host: where the pages of each
            request start in ``unique_kv_indices``.
        unique_kv_indices : torch.Tensor
            int32: the pages.
        unique_kv_last_page_len : torch.Tensor
            ``[batch_size]``, int32: tokens in the last page of each request, 0 if it has none.
        head_dim : int
            64, 80, 96, 128, 256 or 512.
        data_type : torch.dtype or str
            Of queries, keys and values; of keys and values alone, beside queries of float16, if
            it has 8 bits.

        Raises
        ------
        ValueError
            As for :meth:`BatchDecodeWithPagedKVCacheWrapper.plan`.
        """

    def _attend(self, given: Any) -> Any:
        unique = self._batch_decode_wrapper
        out, lse = _prefix_state(unique, given)
        with of_part("unique_kv_cache"):
            merge_state_in_place(
                out, lse, *unique.run(given.q, given.unique_kv_cache, return_lse=True)
            )
        return out

    @precast_api(
        trace=shared_prefix_trace(
            "shared_prefix_decode",
            batch_decode_with_shared_prefix_reference,
            lambda: BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
        )
    )
    @documented(_PREFIX, PAGED_RUN)
    @gathers(_attend)
    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Cache,
    ) -> torch.Tensor:
        """Compute attention over the prefix and the pages of each request.

        Parameters
        ----------
        q : torch.Tensor
            ``[batch_size, num_qo_heads, head_dim]``.
        """

    def end_forward(self) -> None:
        """Do nothing; older engines call it."""


@documented(WRAPPER, PLAN)
class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Compute attention of a ragged batch over a shared prefix and over pages of its requests.

    The same as :class:`BatchDecodeWithSharedPrefixPagedKVCacheWrapper` with any number of queries
    of each request.

    Raises
    ------
    precast.errors.CacheLayoutError
        Another layout (a ``KeyError`` and a ``ValueError``).
    ValueError
        A workspace that is not aligned.

    Examples
    --------
    >>> import torch, precast
    >>> with precast.reference_mode():
    ...     wrapper = precast.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(
    ...         torch.empty(1024).byte()
    ...     )
    ...     two, one = torch.tensor([0, 2]).int(), torch.ones(1).int()
    ...     wrapper.begin_forward(two, two // 2, one - 1, 2 * one, 2, 1, 64, 2)
    ...     shared, own = torch.zeros(1, 1, 64).half(), torch.ones(1, 2, 2, 1, 64).half()
    ...     q = torch.zeros(2, 2, 64).half()
    ...     wrapper.forward(q, shared, shared, own, causal=True)[:, 0, 0]
    tensor([0.5000, 0.6665], dtype=torch.float16)
    """

    @precast_api
    @checked_first
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._batch_prefill_wrapper = _UniquePrefill(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    @checked_first
    @documented(BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer)
    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Take other workspaces; then plan again."""
        self._batch_prefill_wrapper.reset_workspace_buffer(
            float_workspace_buffer, int_workspace_buffer
        )

    def _plan_unique(self, given: Any) -> None:
        plan = BatchPrefillWithPagedKVCacheWrapper.plan
        self._batch_prefill_wrapper.plan(**passed_on(plan, given, head_dim_qk=given.head_dim))

    @precast_api
    @documented(BatchPrefillWithPagedKVCacheWrapper.plan, PLAN)
    @gathers(_plan_unique)
    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_data_type: torch.dtype | str = "float16",
        kv_data_type: Dtype = None,
    ) -> None:
        """Divide the work of a batch over what its requests do not share.

        Parameters
        ----------
        head_dim : int
            64, 80, 96, 128, 256 or 512.
        q_data_type, kv_data_type : torch.dtype or str, optional
            As for :meth:`BatchPrefillWithPagedKVCacheWrapper.plan`. FlashInfer's method has no such
            arguments.
        """

    def _attend(self, given: Any) -> Any:
        unique, forward = self._batch_prefill_wrapper, _UniquePrefill.forward
        names = ("use_fp16_qk_reduction", "sm_scale", "rope_scale", "rope_theta")
        options = {name: getattr(given, name) for name in names}
        out, lse = _prefix_state(unique, given, **options)
        with of_part("unique_kv_cache"):
            state = unique.forward_return_lse(
                **passed_on(forward, given, paged_kv_cache=given.unique_kv_cache)
            )
            merge_state_in_place(out, lse, *state)
        return out

    @precast_api(
        trace=shared_prefix_trace(
            "shared_prefix_prefill",
            batch_prefill_with_shared_prefix_reference,
            lambda: BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
        )
    )
    @documented(_PREFIX, PLAN, PAGED_RUN)
    @gathers(_attend, ("causal", "use_fp16_qk_reduction"))
    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Cache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Compute attention over the prefix and the pages of each request.

        Parameters
        ----------
        q : torch.Tensor
            ``[qo_indptr[-1], num_qo_heads, head_dim]``.
        causal : bool
            Whether a query sees only itself and what is before it among the tokens of its request;
            it sees the whole prefix.
        """

    def end_forward(self) -> None:
        """Do nothing; older engines call it."""
