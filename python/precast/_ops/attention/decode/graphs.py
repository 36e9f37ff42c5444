# SPDX-License-Identifier: Apache-2.0
"""What engines use to capture a decode: a wrapper for CUDA graphs, and a plan without copies."""

from __future__ import annotations

from typing import Any

from precast._base.torch import torch
from precast._op.docs import documented
from precast._ops.attention.decode.wrapper import BatchDecodeWithPagedKVCacheWrapper
from precast._ops.attention.plan import Dtype
from precast._ops.attention.signature import checked_first, gathers
from precast.api_logging import precast_api


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """:class:`BatchDecodeWithPagedKVCacheWrapper` with ``use_cuda_graph=True``.

    Parameters
    ----------
    workspace_buffer : torch.Tensor
        The float workspace.
    indptr_buffer, indices_buffer, last_page_len_buffer : torch.Tensor
        int32 on the device: ``[batch_size + 1]``, as many pages as there ever are,
        ``[batch_size]``.
    kv_layout : str
        ``NHD`` or ``HND``.
    use_tensor_cores : bool
        Whether ``q_len_per_req`` and ``fixed_split_size`` are allowed.

    Raises
    ------
    ValueError
        As for :class:`BatchDecodeWithPagedKVCacheWrapper`.
    """

    @checked_first
    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def _plan_without_copies(self: BatchDecodeWithPagedKVCacheWrapper, given: Any) -> None:
    if not isinstance(self, BatchDecodeWithPagedKVCacheWrapper):
        raise TypeError(
            f"fast_decode_plan: self must be a BatchDecodeWithPagedKVCacheWrapper, got "
            f"{type(self).__name__}"
        )
    options = given._asdict()
    del options["global_override_indptr_cpu"]
    if self._cached_o_data_type is not self._cached_q_data_type:
        options["o_data_type"] = self._cached_o_data_type
    if self._use_cuda_graph:
        self._check_frozen(given.last_page_len.shape[0], given.indices, given.q_len_per_req)
        tables = self._plan.tables
        options |= {"indptr": tables.kv_indptr, "last_page_len": tables.kv_last_page_len}
        options["indices"] = tables.kv_indices
    # The class's own method: a wrapper's may be this function.
    type(self).plan(self, **options, block_tables=self._block_tables)


@precast_api
@documented(BatchDecodeWithPagedKVCacheWrapper.plan)
@gathers(_plan_without_copies, ("non_blocking", "global_override_indptr_cpu"))
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
