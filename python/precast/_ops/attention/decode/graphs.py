# SPDX-License-Identifier: Apache-2.0
"""The decode wrapper for CUDA graphs, with its buffers by position."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.attention.decode.wrapper import BatchDecodeWithPagedKVCacheWrapper


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
        As for the class above.
    """

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
