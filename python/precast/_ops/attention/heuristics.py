# SPDX-License-Identifier: Apache-2.0
"""Choose BLOCK_M: the query rows of a tile, packed with the heads of a KV head.

This is a choice of speed alone, because every kernel is right for every length. Which tiles exist
is said in ``aot_configs/attention.toml``.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from precast._base.device import device_index, get_device_sm_count
from precast._base.torch import torch
from precast._plan.installed import plan_document


class Tile(NamedTuple):
    """One row of ``[tiles]``."""

    block_m: int
    min_shared_kib: int
    min_tiles_per_sm: int


_OP = plan_document()["ops"]["attention"]
_ARCHS = plan_document()["archs"]

#: The sizes that there are, smallest first: for one token of a request, for some, for a prefill.
BLOCK_MS: tuple[int, ...] = tuple(sorted({shape["block_m"] for shape in _OP["tiles"]["shapes"]}))
_DECODE, _CHUNK = BLOCK_MS[:2]

#: The most CTAs of one kernel that an SM holds.
MAX_CTAS_PER_SM: int = _OP["tiles"]["max_ctas_per_sm"]


#: The tiles by ``(head_dim_qk, head_dim_vo)``, smallest first.
_TILES: dict[tuple[int, int], list[Tile]] = {}
for _shape in _OP["tiles"]["shapes"]:
    _tile = Tile(*(_shape[field] for field in Tile._fields))
    _TILES.setdefault((_shape["head_dim_qk"], _shape["head_dim_vo"]), []).append(_tile)

#: KiB of shared memory of a CTA, by 10 times the compute capability of a device, which runs what is
#: built for its best target.
_SHARED_KIB: dict[int, int] = {
    int(capability.replace(".", "")): _ARCHS[name]["shared_kib"]
    for name in sorted(_OP["archs"], key=lambda name: int("".join(filter(str.isdigit, name))))
    for capability in _ARCHS[name]["serves"]
}


@functools.cache
def shared_kib(index: int) -> int:
    """Return the shared memory of a CTA in what is built for this GPU."""
    # Why not get_device_capability: TorchDynamo takes these properties for constants.
    properties = torch.cuda.get_device_properties(index)
    return _SHARED_KIB.get(10 * int(properties.major) + int(properties.minor), 0)


def _largest(head_dims: tuple[int, int], device: torch.device) -> Tile:
    tiles = _TILES[head_dims]
    if not tiles[-1].min_shared_kib:  # Every target has it.
        return tiles[-1]
    kib = shared_kib(device_index(device)) if device.type == "cuda" else 0
    return [tile for tile in tiles if tile.min_shared_kib <= kib][-1]


def largest(head_dims: tuple[int, int], device: torch.device) -> int:
    """Return the largest BLOCK_M that there is."""
    return _largest(head_dims, device).block_m


def _padded(rows: int, block_m: int) -> int:
    return -(-rows // block_m) * block_m


def likely_q_len(tokens: int, batch_size: int, group_size: int) -> int:
    """Return the queries to expect of a request where only their sum is known.

    As many tokens as requests are a decode. Otherwise it is the mean, but never what is for the
    tiles of a decode: some request has more than one query.
    """
    if tokens <= batch_size:
        return 1
    return max(-(-tokens // max(batch_size, 1)), _DECODE // group_size + 1)


def choose(
    q_len: int | None,
    tokens: int | None,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    device: torch.device,
) -> int:
    """Choose for requests of at most ``q_len`` queries, ``tokens`` in all; None is unknown."""
    rows = None if q_len is None else q_len * (num_qo_heads // num_kv_heads)
    if rows is not None and rows <= _DECODE:
        return _DECODE
    if tokens is None or (rows is not None and rows <= _CHUNK):
        return _CHUNK
    block_m, _, min_tiles_per_sm = _largest(head_dims, device)
    if min_tiles_per_sm:
        sms = get_device_sm_count(device) if device.type == "cuda" else 0
        return _CHUNK if tokens * num_qo_heads < min_tiles_per_sm * block_m * sms else block_m
    # Rows that only pad the last tile cost as much as others.
    wasteful = rows is not None and 4 * _padded(rows, block_m) > 5 * _padded(rows, _CHUNK)
    return _CHUNK if wasteful else block_m


def partial_bytes(device: torch.device, block_m: int, head_dim_vo: int) -> int:
    """Return the bytes of partial results that are enough for a plan without a split size.

    With less room a plan divides less, so this is a matter of speed.
    """
    sms = get_device_sm_count(device) if device.type == "cuda" else 0
    return 4 * 2 * sms * MAX_CTAS_PER_SM * block_m * (head_dim_vo + 2)


def most_partial_bytes(device: torch.device) -> int:
    """Return the same for any tile."""
    sizes = ((tile.block_m, vo) for (_, vo), row in _TILES.items() for tile in row)
    return max(partial_bytes(device, *size) for size in sizes)
