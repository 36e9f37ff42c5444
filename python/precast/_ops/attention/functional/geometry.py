# SPDX-License-Identifier: Apache-2.0
"""How a call divides the caller's workspace, and the numbers that its plan depends on.

A workspace holds nothing between calls: each call writes its plan before it reads it. So callers
share one among layers and batches, and what it holds before a call does not matter.
"""

from __future__ import annotations

from precast._ops.attention import heuristics as tiles
from precast._ops.attention import sm90
from precast._ops.attention.functional.calls import PagedCall, RaggedCall
from precast._ops.attention.plan import PlanShape

#: Parts of a workspace start at multiples of this.
ALIGNMENT = 256
#: Below it, the product of scales may round to 0 as a float, which is for other kernels.
LEAST_SCALE = 1e-30
#: Bytes of a plan without those of its requests and tiles.
_PLAN_BYTES = 1 << 16
_BYTES_OF_REQUEST = _BYTES_OF_TILE = 32


def aligned(size: int) -> int:
    """Return the bytes of a part of the workspace that holds ``size``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def plan_bytes(shape: PlanShape) -> int:
    """Return the bytes at the start of the workspace that any plan of this shape fits into.

    What the workspace has besides holds partial results.
    """
    s = shape
    tiles_of_head = s.rows * (s.num_qo_heads // s.num_kv_heads) // s.block_m + s.batch_size + 2
    requests = _BYTES_OF_REQUEST * s.batch_size
    return aligned(_PLAN_BYTES + requests + _BYTES_OF_TILE * tiles_of_head)


def is_plain(call: PagedCall | RaggedCall) -> bool:
    """Whether causal mask and window are all that changes scores."""
    return (
        not (isinstance(call, PagedCall) and call.mask is not None)
        and not call.is_alibi
        and call.logits_soft_cap <= 0.0
        and call.sm_scale >= LEAST_SCALE
    )


def shape_of(call: PagedCall | RaggedCall) -> PlanShape:
    """Return what the plan of a call depends on; a draft mask takes the place of ``causal``."""
    tokens, heads, head_dim_qk = call.query.shape
    causal = call.causal
    if isinstance(call, PagedCall):
        batch, keys, values = call.lens.shape[0], call.k_cache, call.values
        kv_heads, page_size = call.kv_sizes
        causal = causal and call.mask is None
    else:
        batch, keys, values = call.q_bounds.shape[0] - 1, call.k, call.v
        kv_heads, page_size = keys.shape[1], 0
    dims = head_dim_qk, values.shape[-1]
    shape = PlanShape(
        batch_size=batch,
        rows=tokens,
        q_len_per_req=call.q_len if call.q_bounds is None else 0,
        page_size=page_size,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=dims[1],
        kv_bytes=keys.element_size(),
        block_m=tiles.choose(call.q_len, tokens, heads, kv_heads, dims, call.query.device),
        causal=causal,
        window_left=call.window_left,
        may_pair_heads=is_plain(call),
    )
    dtypes = call.query.dtype, keys.dtype
    # Queries of 8 bits come here where the kernels for them are the faster ones.
    if dtypes[0].itemsize == 1 or sm90.suits(dtypes, shape, call.q_len, call.query.device):
        return sm90.with_tile(shape)
    return shape
