# SPDX-License-Identifier: Apache-2.0
"""FlashMLA (PyPI ``sgl-flash-mla``), behind the methods of the wrapper of MLA.

Its pages have 64 tokens, and all requests of a call have the same number of queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PACKAGE = "flash_mla"


class Wrapper:
    """For requests with the same number of pages, as a block table must be made of them."""

    def __init__(self, workspace: Any) -> None:
        self.made: tuple[Any, ...] = ()

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        pages: Any,
        lens: Any,
        heads: int,
        head_dim_v: int,
        *rest: Any,
    ) -> None:
        import flash_mla

        _, page_size, causal, sm_scale, dtype, kv_dtype = rest
        if page_size != 64 or dtype != kv_dtype:
            raise ValueError("no kernel for this page size, or for this cache")
        each = int(qo_indptr[1])
        metadata = flash_mla.get_mla_metadata()
        table = pages.view(lens.shape[0], -1)
        # It has dense decodes among its older kernels alone.
        options = {"softmax_scale": sm_scale, "causal": causal, "use_legacy": True}
        self.made = each, (table, lens, head_dim_v, *metadata), options

    def run(self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any) -> Any:
        import flash_mla

        each, given, options = self.made
        # The halves are slices of one buffer each, and a kernel wants the whole.
        q, cache = (
            left.as_strided((*left.shape[:2], left.shape[2] + right.shape[2]), left.stride())
            for left, right in ((q_nope, q_pe), (ckv_cache, kpe_cache))
        )
        out, _ = flash_mla.flash_mla_with_kvcache(
            q.unflatten(0, (-1, each)), cache.unsqueeze(2), *given, **options
        )
        return out.flatten(0, 1)


def adapt(case: Any, family: str) -> Callable[..., Any] | None:
    # Its plan reads a number of the tables on the host, which no graph can hold.
    if case.op != "BatchMLAPagedAttentionWrapper" or case.whole is not None:
        return None
    return case.bind(Wrapper)
