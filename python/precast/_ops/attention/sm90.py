# SPDX-License-Identifier: Apache-2.0
"""Which calls the kernels for Hopper compute: ``attention_sm90``, by TMA and wgmma.

Those of ``attention_sm90_fp8`` run the same plans where queries, keys and values are all e4m3.

What they lack is for the kernels of every GPU: e5m2, other head dimensions. So is what they are
not faster at: short requests. Masks and options of scores do not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from precast._base.device import is_hopper
from precast._base.torch import torch
from precast._ops.attention.enums import PosEncodingMode
from precast._plan.installed import plan_document

if TYPE_CHECKING:
    from precast._ops.attention.plan import PlanShape

_AXES = plan_document()["ops"]["attention_sm90"]["axes"]
_TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
_DTYPES = frozenset(tuple(_TORCH[d] for d in pair) for pair in _AXES["dtype_q,dtype_kv"])
_HEAD_DIMS = frozenset(tuple(pair) for pair in _AXES["head_dim_qk,head_dim_vo"])
_FP8_AXES = plan_document()["ops"]["attention_sm90_fp8"]["axes"]
_FP8_OUTPUTS = frozenset(_TORCH[d] for d in _FP8_AXES["dtype_o"])
_FP8_HEAD_DIMS = frozenset(tuple(pair) for pair in _FP8_AXES["head_dim_qk,head_dim_vo"])
#: Requests with fewer packed rows are for the 16-row tile of a decode, or where two warpgroups do
#: not share the rows of a tile, as ``kSharesRows`` says, for the tile of 64 rows.
_FEWEST_ROWS, _FEWEST_UNSHARED_ROWS = 17, 65
_MOST_GROUP = 64


def rows_of_tile(head_dim_vo: int, kv_bytes: int) -> int:
    """Return the rows that a tile has room for, ``sm90_consumers()`` warpgroups of 64."""
    return 64 * (3 if head_dim_vo <= 64 and kv_bytes == 2 else 2)


def block_m(shape: PlanShape) -> int:
    """Return the packed rows of a tile: whole groups of heads, as ``sm90_block_m()`` says."""
    group = shape.num_qo_heads // shape.num_kv_heads
    return rows_of_tile(shape.head_dim_vo, shape.kv_bytes) // group * group


def suits(
    dtypes: tuple[Any, ...], shape: PlanShape, q_len: int | None, device: torch.device
) -> bool:
    """Whether these kernels are the faster ones for a plan.

    ``dtypes`` are those of queries and of keys in kernels; ``q_len`` is None where the host does
    not know how many queries a request has.
    """
    group = shape.num_qo_heads // shape.num_kv_heads
    return runs(dtypes, shape, device) and (
        q_len is None or q_len * group >= fewest_rows(shape.head_dim_vo, shape.kv_bytes)
    )


def fewest_rows(head_dim_vo: int, kv_bytes: int) -> int:
    """Return the packed rows from which on these kernels are the faster ones."""
    shares_rows = kv_bytes == 2 and head_dim_vo <= 128
    return _FEWEST_ROWS if shares_rows else _FEWEST_UNSHARED_ROWS


def runs(dtypes: tuple[Any, ...], shape: PlanShape, device: torch.device) -> bool:
    """Whether these kernels run a plan."""
    group = shape.num_qo_heads // shape.num_kv_heads
    return (
        is_hopper(device)
        and dtypes in _DTYPES
        and (shape.head_dim_qk, shape.head_dim_vo) in _HEAD_DIMS
        and group <= _MOST_GROUP
    )


def fp8_key(
    dtypes: tuple[Any, Any, Any], head_dims: tuple[int, int], device_index: int
) -> tuple[Any, ...] | None:
    """Return the key of kernels for e4m3; ``dtypes`` are those of q, keys and their output."""
    e4m3 = _TORCH["e4m3"]
    if dtypes[:2] != (e4m3, e4m3) or dtypes[2] not in _FP8_OUTPUTS:
        return None
    return (dtypes[2], *head_dims, device_index) if head_dims in _FP8_HEAD_DIMS else None


def multiplies_fp8(
    dtypes: tuple[Any, Any, Any],
    heads: int,
    kv_heads: int,
    head_dims: tuple[int, int],
    q_len: int,
    device: torch.device,
    pos_encoding: int,
) -> bool:
    """Whether kernels for e4m3 are the faster ones for a call; ``dtypes`` as of fp8_key()."""
    group = heads // kv_heads
    return (
        pos_encoding != PosEncodingMode.ROPE_LLAMA
        and fp8_key(dtypes, head_dims, 0) is not None
        and q_len * group >= _FEWEST_UNSHARED_ROWS
        and group <= _MOST_GROUP
        and is_hopper(device)
    )


def takes_fp8(
    query: torch.Tensor, values: torch.Tensor, kv_heads: int, q_len: int, output: torch.dtype
) -> bool:
    """Whether those kernels are the faster ones for these tensors; keys are like values."""
    dims = query.shape[-1], values.shape[-1]
    dtypes = query.dtype, values.dtype, output
    heads = query.shape[-2]
    return kv_heads > 0 and multiplies_fp8(
        dtypes, heads, kv_heads, dims, q_len, query.device, PosEncodingMode.NONE
    )


def with_tile(shape: PlanShape) -> PlanShape:
    """Return the shape of a plan for these kernels."""
    return shape.with_tile(block_m(shape), True)
