# SPDX-License-Identifier: Apache-2.0
"""Small wrappers in reference mode, their tables and cache, for tests of what they keep."""

from __future__ import annotations

import torch

import precast
from precast._op.dispatch import Kernel

I32 = torch.int32
TABLE = (
    torch.tensor([0, 2, 3], dtype=I32),
    torch.tensor([4, 1, 0], dtype=I32),
    torch.tensor([3, 8], dtype=I32),
)
OTHER_TABLE = (
    torch.tensor([0, 1, 3], dtype=I32),
    torch.tensor([7, 2, 5], dtype=I32),
    torch.tensor([8, 1], dtype=I32),
)
ROWS, TOKENS = torch.tensor([0, 3, 4], dtype=I32), torch.tensor([0, 5, 9], dtype=I32)
F32 = {"q_data_type": "float32"}
SIZES = (4, 2, 64, 8)


def workspace():
    return torch.empty(1024, dtype=torch.uint8)


def decode(in_graph=False):
    buffers = {
        "use_cuda_graph": True,
        "paged_kv_indptr_buffer": torch.zeros(3, dtype=I32),
        "paged_kv_indices_buffer": torch.zeros(3, dtype=I32),
        "paged_kv_last_page_len_buffer": torch.zeros(2, dtype=I32),
    }
    return precast.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_tensor_cores=True, **(buffers if in_graph else {})
    )


def paged(in_graph=False):
    sizes = {"qo_indptr_buf": 3, "paged_kv_indptr_buf": 3, "paged_kv_indices_buf": 3}
    sizes |= {"paged_kv_last_page_len_buf": 2, "mask_indptr_buf": 3}
    buffers = {name: torch.zeros(size, dtype=I32) for name, size in sizes.items()}
    buffers["custom_mask_buf"] = torch.zeros(10, dtype=torch.uint8)
    return precast.BatchPrefillWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=in_graph, **(buffers if in_graph else {})
    )


def ragged():
    return precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())


def cache(kv_heads=2, page_size=8):
    return torch.randn(8, 2, page_size, kv_heads, 64)


def attributes(wrapper):
    """All of a wrapper and of its plan; tensors by what is in them."""
    plan = {
        f"{group}.{name}": value
        for group in ("model", "shape", "scores", "tables", "mask", "items", "hints")
        for name, value in getattr(wrapper._plan, group)._asdict().items()
    }
    return {
        name: (id(value), value.tolist())
        if isinstance(value, torch.Tensor) and value.numel() < 100
        else value
        for name, value in {**vars(wrapper), **plan}.items()
    }


def record_launches(monkeypatch):
    """The names of exports that are called from now on, but for those that launch nothing."""
    launched, run = [], Kernel._run_reference

    def recorded(self, *args):
        if self.export not in ("pack_plan", "workspace_size"):
            launched.append(self.export)
        run(self, *args)

    monkeypatch.setattr(Kernel, "_run_reference", recorded)
    return launched
