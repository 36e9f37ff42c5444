# SPDX-License-Identifier: Apache-2.0
"""Which kernels compute a plan of MLA, and the packed rows (token, head) of their tiles.

This is a choice of speed alone, because every kernel is right for every length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from precast._base.device import device_index, is_hopper
from precast._base.torch import torch
from precast._ops.attention.heuristics import likely_q_len, shared_kib
from precast._plan.installed import plan_document

if TYPE_CHECKING:
    from precast._ops.attention.plan import PlanShape

_NARROW, _WIDE = 16, 64
#: The shared memory of CTAs that the tile of 64 rows needs: kMlaWideSharedKib in mla/tile.cuh.
MLA_WIDE_SHARED_KIB = 128
#: Up to so many rows of a request two tiles of 16 rows cost less than one of 64.
_MOST_NARROW_ROWS = 32
#: Packed rows of a request from which on mla_sm90 is the faster one for caches of e4m3, which it
#: converts once a tile: 16 heads take 1.3 times as long as on the kernels of every GPU.
_FEWEST_ROWS_OF_FP8 = 17
#: Rows of a tile of mla_sm90: kMlaSm90BlockM in mla/params.cuh.
SM90_BLOCK_M = 64

_TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


def _space(op: str) -> tuple[frozenset[Any], frozenset[Any]]:
    """Return the pairs of dtypes and of head dimensions that an op has; none if there is no op."""
    axes = plan_document()["ops"].get(op, {"axes": {}})["axes"]
    return (
        frozenset(tuple(_TORCH[d] for d in pair) for pair in axes.get("dtype_q,dtype_kv", ())),
        frozenset(tuple(pair) for pair in axes.get("head_dim_ckv,head_dim_kpe", ())),
    )


#: Queries and caches, and head_dim_ckv and head_dim_kpe.
DTYPES, HEAD_DIMS = _space("mla")
_SM90_DTYPES, _SM90_HEAD_DIMS = _space("mla_sm90")


def runs_on_sm90(dtypes: tuple[Any, Any], shape: PlanShape, device: torch.device) -> bool:
    """Whether the kernels for Hopper have what a plan asks for."""
    head_dims = shape.head_dim_vo, shape.head_dim_qk - shape.head_dim_vo
    return dtypes in _SM90_DTYPES and head_dims in _SM90_HEAD_DIMS and is_hopper(device)


def suits_sm90(
    dtypes: tuple[Any, Any],
    shape: PlanShape,
    q_len: int | None,
    tokens: int | None,
    device: torch.device,
) -> bool:
    """Whether the kernels for Hopper are the faster ones of a plan; None is unknown."""
    if not runs_on_sm90(dtypes, shape, device):
        return False
    rows = _likely_q_len(shape, q_len, tokens) * shape.num_qo_heads
    return shape.kv_bytes > 1 or rows >= _FEWEST_ROWS_OF_FP8


def _likely_q_len(shape: PlanShape, q_len: int | None, tokens: int | None) -> int:
    """Return the most queries of a request; what nothing says is taken for a decode."""
    if q_len is not None:
        return q_len
    return 1 if tokens is None else likely_q_len(tokens, shape.batch_size, shape.num_qo_heads)


def block_m(shape: PlanShape, q_len: int | None, tokens: int | None, device: torch.device) -> int:
    """Return the rows of a tile for requests of at most ``q_len`` queries, ``tokens`` in all.

    None is unknown; what neither says is taken for a decode.
    """
    kib = shared_kib(device_index(device)) if device.type == "cuda" else MLA_WIDE_SHARED_KIB
    if kib < MLA_WIDE_SHARED_KIB:
        return _NARROW
    rows = _likely_q_len(shape, q_len, tokens) * shape.num_qo_heads
    return _NARROW if rows <= _MOST_NARROW_ROWS else _WIDE
