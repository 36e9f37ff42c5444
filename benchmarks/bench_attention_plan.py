# SPDX-License-Identifier: Apache-2.0
"""Plans of attention, each with one run; lengths are on the device, as in an engine's step.

The CPU time matters here. The KV caches are short, so that the GPU is not the limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from _attention import Batch, Function, workspace
from _harness import Case
from _script import script

from precast.testing.tolerances import tolerance_of_attention

COUNT = 64
TOKENS = (128, 1024)


def _decode(batch: Batch) -> Function:
    def bind(wrapper: Function) -> Function:
        made: list[Any] = []

        def call(q: Any, k: Any, v: Any, *table: Any) -> Any:
            if not made:
                made.append(wrapper(workspace(q), "NHD"))
            batch.plan_decode(made[0], *table)
            return made[0].run(q, (k, v))

        return call

    return bind


def _graph(batch: Batch) -> Function:
    """Copy new lengths to where the graph reads them."""

    def bind(wrapper: Function) -> Function:
        made: list[Any] = []

        def call(q: Any, k: Any, v: Any, *table: Any) -> Any:
            if not made:
                buffers = [torch.empty_like(part) for part in table]
                made.append(wrapper(workspace(q), *buffers, "NHD"))
            batch.plan_decode(made[0], *table)
            return made[0].run(q, (k, v))

        return call

    return bind


def _paged(batch: Batch) -> Function:
    def bind(wrapper: Function) -> Function:
        made: list[Any] = []

        def call(q: Any, k: Any, v: Any, *table: Any) -> Any:
            if not made:
                made.append(wrapper(workspace(q), "NHD"))
            batch.plan_paged(made[0], *table, max_token_per_sequence=max(batch.queries))
            return made[0].run(q, (k, v))

        return call

    return bind


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens in TOKENS:
        lengths = [tokens] * COUNT
        one = Batch([1] * COUNT, lengths, dtype=dtype, kv_dtype=dtype)
        some = Batch([16] * COUNT, lengths, dtype=dtype, kv_dtype=dtype)
        decode = one, one.decode, one.eager_decode
        prefill = some, some.paged, some.eager_paged
        for op, bind, (batch, make, eager) in (
            ("BatchDecodeWithPagedKVCacheWrapper", _decode(one), decode),
            ("CUDAGraphBatchDecodeWithPagedKVCacheWrapper", _graph(one), decode),
            ("BatchPrefillWithPagedKVCacheWrapper", _paged(some), prefill),
        ):
            queries = f" x {batch.queries[0]}" * batch.causal
            yield Case(
                op,
                f"{batch.label} b{COUNT}{queries} {tokens}: plan and run",
                batch.bytes_moved,
                make,
                bind,
                eager,
                batch.flops,
                close=tolerance_of_attention(dtype),
                # A peer's plan may wait for the GPU. It then has no graph, only whole calls.
                whole=lambda wrapper, bind=bind: bind(wrapper),
                reads=True,
            )


if __name__ == "__main__":
    script(__file__)
