# SPDX-License-Identifier: Apache-2.0
"""Decodes whose kernels find their own work, so that no planning kernel runs before them.

These kernels need split counters that are zero, and leave them zero. A workspace may hold anything,
so the counters are kept beside it: one buffer for the address of a workspace, because calls that
share a workspace run one after another, and calls that do not may run at once.
"""

from __future__ import annotations

from precast._base.device import get_device_sm_count
from precast._base.torch import torch
from precast._ops.attention import heuristics as tiles
from precast._ops.attention.buffers import is_capturing
from precast._ops.attention.functional.calls import PagedCall
from precast._ops.attention.functional.geometry import is_plain, plan_bytes
from precast._ops.attention.plan import PlanShape

#: Those of ``attention/self_plan.cuh``: the least tile, and the most requests.
_BLOCK_M, _MOST_REQUESTS = tiles.BLOCK_MS[0], 256
#: Bytes of counters, four for each CTA of a GPU.
_COUNTER_BYTES = 4096
_MOST_COUNTERS = 1024
#: By device and address of a workspace. They stay: a graph may use them as long as it lives.
_counters: dict[tuple[int, int], torch.Tensor] = {}


def counters_of(call: PagedCall, shape: PlanShape) -> torch.Tensor | None:
    """Return the split counters of a call whose kernels can find their own work, else None."""
    if not _can_plan_itself(call, shape):
        return None
    workspace = call.workspace
    key = workspace.get_device(), workspace.data_ptr()
    kept = _counters.get(key)
    if kept is None:
        device = workspace.device
        # A buffer that is zeroed in a graph is not zero before its first replay.
        if is_capturing(device) or len(_counters) >= _MOST_COUNTERS:
            return None
        kept = torch.zeros(_COUNTER_BYTES, dtype=torch.uint8, device=device)
        _counters[key] = kept
    return kept


def _can_plan_itself(c: PagedCall, s: PlanShape) -> bool:
    rows = s.q_len_per_req * (s.num_qo_heads // s.num_kv_heads)
    if not (
        is_plain(c)
        and s.block_m == _BLOCK_M
        and 0 < rows <= _BLOCK_M
        and 0 < s.batch_size <= _MOST_REQUESTS
    ):
        return False
    # Room for two partial results of each CTA, in float32.
    ctas = tiles.MAX_CTAS_PER_SM * _sm_count(c.query.device)
    partial = 4 * _BLOCK_M * (s.head_dim_vo + 2)
    room = c.workspace.numel() - plan_bytes(s)
    return 4 * ctas <= _COUNTER_BYTES and room >= 2 * ctas * partial


def _sm_count(device: torch.device) -> int:
    return get_device_sm_count(device) if device.type == "cuda" else 1
