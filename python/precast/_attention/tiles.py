# SPDX-License-Identifier: Apache-2.0
"""How many rows a tile has: queries times the heads that share a KV head.

A choice of speed alone: every kernel is right for every length.
"""

from __future__ import annotations

from precast._torch import torch
from precast.utils import get_compute_capability, get_device_sm_count

#: One token of a request, some, and a prefill; the last not of every ``head_dim_vo``.
NARROW, MIDDLE, WIDE = 16, 64, 128

#: An SM needs this many wide tiles, or it waits for the last ones too long.
_WIDE_TILES_PER_SM = 6


def _has_wide(head_dim_vo: int, device: torch.device) -> bool:
    if head_dim_vo <= 128 or head_dim_vo > 256:
        return head_dim_vo <= 128
    # 128 queries take 66 KB of shared memory, of which the others have 99 KB.
    if device.type != "cuda":
        return False
    capability = get_compute_capability(device)
    return (9, 0) <= capability < (12, 0) or capability in ((8, 0), (8, 7))


def largest(head_dim_vo: int, device: torch.device) -> int:
    """The largest tile that there is."""
    return WIDE if _has_wide(head_dim_vo, device) else MIDDLE


def choose(
    q_len: int | None,
    tokens: int | None,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_vo: int,
    device: torch.device,
) -> int:
    """For requests of at most ``q_len`` queries, ``tokens`` in all; None is unknown."""
    rows = None if q_len is None else q_len * (num_qo_heads // num_kv_heads)
    if rows is not None and rows <= NARROW:
        return NARROW
    if tokens is None or (rows is not None and rows <= MIDDLE):
        return MIDDLE
    sms = get_device_sm_count(device) if device.type == "cuda" else 0
    few = tokens * num_qo_heads < _WIDE_TILES_PER_SM * WIDE * sms
    return MIDDLE if few else largest(head_dim_vo, device)
