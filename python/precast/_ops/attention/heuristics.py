# SPDX-License-Identifier: Apache-2.0
"""How many rows a tile has: queries times the heads that share a KV head.

A choice of speed alone: every kernel is right for every length.
"""

from __future__ import annotations

import functools

from precast._base.device import device_index, get_device_sm_count
from precast._base.torch import torch

#: One token of a request, some, and a prefill; the last not of every ``head_dim_vo``.
NARROW, MIDDLE, WIDE = 16, 64, 128

#: An SM needs this many wide tiles, or it waits for the last ones too long.
_WIDE_TILES_PER_SM = 6


@functools.cache
def _has_room(index: int) -> bool:
    """Whether what is built for this GPU may use more than 99 KB of shared memory."""
    # Of the ways to ask, TorchDynamo takes this one for a constant.
    properties = torch.cuda.get_device_properties(index)
    capability = int(properties.major), int(properties.minor)
    return (9, 0) <= capability < (12, 0) or capability == (8, 0)


def largest(head_dim_vo: int, device: torch.device) -> int:
    """The largest tile that there is."""
    if head_dim_vo <= 128:
        return WIDE
    # Of heads of 256 the queries of a wide tile take 66 KB of shared memory.
    if head_dim_vo <= 256 and device.type == "cuda" and _has_room(device_index(device)):
        return WIDE
    return MIDDLE


def _padded(rows: int, tile: int) -> int:
    return -(-rows // tile) * tile


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
    if head_dim_vo > 128:
        # Wide tiles of heads of 256 are a quarter faster, however few there are.
        wasteful = rows is not None and 4 * _padded(rows, WIDE) > 5 * _padded(rows, MIDDLE)
        return MIDDLE if wasteful else largest(head_dim_vo, device)
    sms = get_device_sm_count(device) if device.type == "cuda" else 0
    few = tokens * num_qo_heads < _WIDE_TILES_PER_SM * WIDE * sms
    return MIDDLE if few else WIDE
