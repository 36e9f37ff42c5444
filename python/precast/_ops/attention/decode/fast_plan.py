# SPDX-License-Identifier: Apache-2.0
"""``fast_decode_plan`` leaves copying to its caller."""

from __future__ import annotations

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention.decode.wrapper import BatchDecodeWithPagedKVCacheWrapper, Dtype
from precast.api_logging import precast_api


@precast_api
@documented(BatchDecodeWithPagedKVCacheWrapper.plan)
def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Dtype = None,
    kv_data_type: Dtype = None,
    data_type: Dtype = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plan as :meth:`BatchDecodeWithPagedKVCacheWrapper.plan` does, without its copies.

    Engines put it into a wrapper: ``wrapper.begin_forward = partial(fast_decode_plan, wrapper)``.

    Parameters
    ----------
    self : BatchDecodeWithPagedKVCacheWrapper
        The wrapper. If it is for CUDA graphs, the caller has filled its buffers, and the lengths in
        them count; of ``indptr``, ``indices`` and ``last_page_len`` only the sizes are read.
    indptr, indices, last_page_len : torch.Tensor
        As for ``plan``; without CUDA graphs the wrapper keeps them and does not copy those that are
        on its device.
    q_data_type, kv_data_type, data_type : torch.dtype or str, optional
        As for ``plan``; by default float16.
    global_override_indptr_cpu : torch.Tensor, optional
        A copy of ``indptr`` on the host, which saves other libraries a transfer. Not read: nothing
        is planned on the host.

    Raises
    ------
    ValueError
        As for ``plan``.

    Notes
    -----
    With lengths on the device it launches one kernel and waits for nothing.
    """
    given = self._cached_o_data_type is not self._cached_q_data_type
    if self._use_cuda_graph:
        self._check_frozen(last_page_len.shape[0], indices, q_len_per_req)
        tables = self._plan.tables
        indptr, last_page_len = tables.kv_indptr, tables.kv_last_page_len
        indices = tables.kv_indices
    # The class's own method: a wrapper's may be this function.
    type(self).plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type or data_type or "float16",
        kv_data_type=kv_data_type or data_type,
        o_data_type=self._cached_o_data_type if given else None,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        non_blocking=non_blocking,
        block_tables=self._block_tables,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
