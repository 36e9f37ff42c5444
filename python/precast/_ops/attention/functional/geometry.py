# SPDX-License-Identifier: Apache-2.0
"""How a call divides the caller's workspace, and the sizes that the rest of a call follows from.

A workspace holds nothing between calls: each call writes its plan before it reads it. So callers
share one among layers and batches, and what it holds before a call does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

from precast._ops.attention import heuristics as tiles
from precast._ops.attention.functional.calls import PagedCall, RaggedCall
from precast._ops.attention.functional.draft_mask import CustomMask
from precast._ops.attention.plan import PlanShape

#: Parts of a workspace start at multiples of this.
ALIGNMENT = 256
#: Bytes of a plan without those of its requests and tiles.
_PLAN_BYTES = 1 << 16
_BYTES_OF_REQUEST = _BYTES_OF_TILE = 32


def aligned(size: int) -> int:
    """Return the bytes of a part of the workspace that holds ``size``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Geometry(NamedTuple):
    """The sizes of a call."""

    shape: PlanShape
    mask: CustomMask | None = None

    @property
    def plan_bytes(self) -> int:
        """Bytes at the start of the workspace that any plan of such a call fits into."""
        s = self.shape
        tiles_of_head = s.rows * (s.num_qo_heads // s.num_kv_heads) // s.block_m + s.batch_size + 2
        requests = _BYTES_OF_REQUEST * s.batch_size
        return aligned(_PLAN_BYTES + requests + _BYTES_OF_TILE * tiles_of_head)

    @property
    def mask_bytes(self) -> int:
        """Bytes of a custom mask behind the plan."""
        return 0 if self.mask is None else aligned(self.mask.nbytes)

    @property
    def least_bytes(self) -> int:
        """Bytes that the workspace must have; what is more holds partial results."""
        return self.plan_bytes + self.mask_bytes


def geometry_of(call: PagedCall | RaggedCall) -> Geometry:
    """Return the sizes of a call; a draft mask takes the place of ``causal``."""
    tokens, heads, head_dim_qk = call.query.shape
    mask = None
    if isinstance(call, PagedCall):
        batch, keys, values = call.lens.shape[0], call.k_cache, call.values
        kv_heads, page_size = call.kv_sizes
        if call.mask is not None:
            mask = CustomMask(batch, call.q_len, call.tables.shape[1] * page_size)
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
        causal=call.causal and mask is None,
        window_left=call.window_left,
    )
    return Geometry(shape, mask)
