# SPDX-License-Identifier: Apache-2.0
"""Cases of the attention wrappers that consist of others: cascade, mixed batches, POD, sparse.

As in bench_attention, a wrapper plans at its first call, which is not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from _attention import PAGE, Arguments, Batch, Function, on_host, workspace
from _harness import Case
from torch.nn import functional

from precast.testing.tolerances import tolerance_of_attention

#: Requests, tokens that they share, tokens of their own.
CASCADES = ((4, 512, 64), (32, 8192, 256))
#: Queries and tokens of each prefill, requests and tokens of the decode.
MIXED = (
    ((128, 128), (4, 256)),
    ((2048, 2048), (64, 4096)),
    ((512, 8192), (64, 4096)),
    ((8192, 8192), (16, 8192)),
)
#: Queries, which are also keys, rows and columns of a block, share of blocks that are not zero.
MATRICES = ((512, 64, 64, 0.5), (8192, 128, 128, 0.25), (32768, 128, 64, 0.1), (8192, 16, 16, 0.1))
#: The same for blocks of several sizes, in multiples of the last number.
VARIABLE = ((512, 8, 8, 0.5, 16), (16384, 128, 128, 0.2, 64), (16384, 128, 128, 0.2, 1))
HEADS, KV_HEADS, DIM = 32, 8, 128


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for shape in CASCADES:
        yield _cascade(dtype, *shape)
    for prefill, decode in MIXED:
        yield _mixed(dtype, prefill, decode)
        yield _pod(dtype, prefill, decode)
        yield _batch_pod(dtype, prefill, decode)
    for matrix in MATRICES:
        yield _blocks(dtype, *matrix)
    for blocks in VARIABLE:
        yield _variable(dtype, *blocks)


def _once(plan: Callable[..., Any], run: Callable[..., Any]) -> Function:
    """A call that plans when it is made for the first time."""
    planned: list[Any] = []

    def call(*args: Any) -> Any:
        if not planned:
            planned.append(plan(*args))
        return run(planned[0], *args)

    return call


def _case(
    op: str,
    shape: str,
    moved: int,
    flops: int,
    make: Callable[[], Arguments],
    bind: Callable[[Function], Function],
    dtype: torch.dtype,
    eager: Function | None = None,
) -> Case:
    return Case(
        op,
        f"{HEADS}/{KV_HEADS} {shape}",
        moved,
        make,
        bind,
        eager,
        flops,
        close=tolerance_of_attention(dtype),
    )


def _types(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {"q_data_type": dtype, "kv_data_type": dtype}


def _sdpa(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Of one request, tokens before heads."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(0, 1)


def _causal(n: int, m: int, device: torch.device) -> Any:
    return torch.ones(n, m, dtype=torch.bool, device=device).tril(m - n)


# -- a shared prefix ------------------------------------------------------------------------------


def _cascade(dtype: torch.dtype, count: int, prefix: int, own: int) -> Case:
    top = Batch([count], [prefix], dtype=dtype, kv_dtype=dtype)
    below = Batch([1] * count, [own] * count, dtype=dtype, kv_dtype=dtype)

    def make() -> Arguments:
        """Both levels have their pages in one cache."""
        q, k, v, *table = below.paged()
        _, shared_k, shared_v, *shared = top.paged()
        shared[2] = shared[2] + len(k)
        levels = [level for pair in zip(shared, table, strict=True) for level in pair]
        return q, torch.cat([k, shared_k]), torch.cat([v, shared_v]), *levels

    def bind(wrapper: Function) -> Function:
        def plan(q: Any, k: Any, v: Any, *levels: Any) -> Any:
            planned = wrapper(2, workspace(q), "NHD")
            lists = [
                [t if i == 2 else t.cpu() for t in levels[2 * i : 2 * i + 2]] for i in range(4)
            ]
            planned.plan(*lists, HEADS, KV_HEADS, DIM, PAGE, **_types(dtype))
            return planned

        return _once(plan, lambda planned, q, k, v, *levels: planned.run(q, (k, v)))

    def eager(q: Any, k: Any, v: Any, *levels: Any) -> Any:
        shared, pages = (levels[i].long() for i in (4, 5))
        keys, values = (
            torch.cat(
                [
                    x[shared].flatten(0, 1).expand(count, -1, -1, -1),
                    x[pages].flatten(0, 1).unflatten(0, (count, own)),
                ],
                1,
            )
            for x in (k, v)
        )
        q, keys, values = (x.transpose(1, 2) for x in (q.unsqueeze(1), keys, values))
        out = functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return out.squeeze(2)

    moved = below.bytes_moved + top.bytes_moved
    flops = 4 * count * (prefix + own) * HEADS * DIM
    shape = f"b{count} {prefix} shared, {own} of their own"
    op = "MultiLevelCascadeAttentionWrapper"
    return _case(op, shape, moved, flops, make, bind, dtype, eager)


# -- prefill and decode ---------------------------------------------------------------------------


def _parts(
    dtype: torch.dtype, prefill: tuple[int, int], decode: tuple[int, int]
) -> tuple[Batch, Batch, str]:
    count, tokens = decode
    first = Batch([prefill[0]], [prefill[1]], dtype=dtype, kv_dtype=dtype)
    rest = Batch([1] * count, [tokens] * count, dtype=dtype, kv_dtype=dtype)
    return first, rest, f"{prefill[0]} of {prefill[1]} beside b{count} {tokens}"


def _mixed(dtype: torch.dtype, prefill: tuple[int, int], decode: tuple[int, int]) -> Case:
    first, rest, shape = _parts(dtype, prefill, decode)
    queries, lengths = [*first.queries, *rest.queries], [*first.lengths, *rest.lengths]
    batch = Batch(queries, lengths, dtype=dtype, kv_dtype=dtype)

    def make() -> Arguments:
        q, k, v, rows, starts, pages, last = batch.paged()
        return q, k, v, rows, starts, pages, torch.tensor(lengths, dtype=last.dtype).to(q.device)

    def bind(wrapper: Function) -> Function:
        def plan(q: Any, k: Any, v: Any, rows: Any, starts: Any, pages: Any, counts: Any) -> Any:
            planned = wrapper("NHD", str(q.device))
            heads = HEADS, KV_HEADS, DIM, DIM, PAGE
            tables = rows.cpu(), starts.cpu(), pages, counts.cpu()
            planned.plan(*tables, *heads, causal=True, **_types(dtype))
            return planned

        return _once(plan, lambda planned, q, k, v, *table: planned.run(q, (k, v)))

    def eager(q: Any, k: Any, v: Any, rows: Any, starts: Any, pages: Any, counts: Any) -> Any:
        """Outputs and log-sum-exps, request after request."""
        outs, lses = [], []
        row = 0
        for i, (n, m) in enumerate(zip(queries, lengths, strict=True)):
            own = pages[int(starts[i]) : int(starts[i + 1])].long()
            keys, values = (x[own].flatten(0, 1)[:m] for x in (k, v))
            rows_of = q[row : row + n]
            mask = _causal(n, m, q.device)
            outs.append(_sdpa(rows_of, keys, values, mask))
            grouped = keys.repeat_interleave(HEADS // KV_HEADS, 1).float()
            logits = torch.einsum("nhd,mhd->nhm", rows_of.float(), grouped) * DIM**-0.5
            logits = logits.masked_fill(~mask.unsqueeze(1), -torch.inf)
            lses.append(torch.logsumexp(logits, -1) * 1.4426950408889634)
            row += n
        return torch.cat(outs), torch.cat(lses)

    moved, flops = first.bytes_moved + rest.bytes_moved, first.flops + rest.flops
    small = eager if max(queries) < 1024 else None
    return _case("BatchAttention", shape, moved, flops, make, bind, dtype, small)


def _pod(dtype: torch.dtype, prefill: tuple[int, int], decode: tuple[int, int]) -> Case:
    first, rest, shape = _parts(dtype, prefill, decode)

    def make() -> Arguments:
        return *first.ragged()[:3], *rest.decode()

    def bind(wrapper: Function) -> Function:
        def plan(q_p: Any, k_p: Any, v_p: Any, q: Any, k: Any, v: Any, *table: Any) -> Any:
            planned = wrapper(workspace(q), "NHD")
            planned.plan(*table, HEADS, KV_HEADS, DIM, PAGE, **_types(dtype))
            return planned

        def run(
            planned: Any, q_p: Any, k_p: Any, v_p: Any, q: Any, k: Any, v: Any, *table: Any
        ) -> Any:
            return planned.run(q_p, k_p, v_p, q, (k, v), causal_p=True)

        return _once(plan, run)

    def eager(q_p: Any, k_p: Any, v_p: Any, q: Any, k: Any, v: Any, *table: Any) -> Any:
        mask = _causal(*prefill, q.device)
        return _sdpa(q_p, k_p, v_p, mask), rest.eager_decode(q, k, v, *table)

    moved, flops = first.bytes_moved + rest.bytes_moved, first.flops + rest.flops
    op = "PODWithPagedKVCacheWrapper"
    return _case(op, shape, moved, flops, make, bind, dtype, eager)


def _batch_pod(dtype: torch.dtype, prefill: tuple[int, int], decode: tuple[int, int]) -> Case:
    first, rest, shape = _parts(dtype, prefill, decode)

    def make() -> Arguments:
        return *first.paged(), *rest.paged()

    def bind(wrapper: Function) -> Function:
        def plan(*args: Any) -> Any:
            planned = wrapper(workspace(args[0]), "NHD")
            tables = *on_host(args[3:7]), *on_host(args[10:14])
            planned.plan(*tables, HEADS, KV_HEADS, DIM, PAGE, **_types(dtype))
            return planned

        def run(planned: Any, *args: Any) -> Any:
            caches = args[0], args[1:3], args[7], args[8:10]
            return planned.run(*caches, causal_p=True)

        return _once(plan, run)

    def eager(*args: Any) -> Any:
        q, k, v, _, _, pages, _ = args[:7]
        keys, values = (x[pages.long()].flatten(0, 1)[: prefill[1]] for x in (k, v))
        mask = _causal(*prefill, q.device)
        return _sdpa(q, keys, values, mask), rest.eager_paged(*args[7:])

    moved, flops = first.bytes_moved + rest.bytes_moved, first.flops + rest.flops
    op = "BatchPODWithPagedKVCacheWrapper"
    return _case(op, shape, moved, flops, make, bind, dtype, eager)


# -- block-sparse matrices ------------------------------------------------------------------------


def _chosen(shape: tuple[int, ...], share: float) -> torch.Tensor:
    """The same blocks in every run; the first of each row is one of them."""
    chosen = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < share
    chosen[..., 0] = True
    return chosen


def _blocks(dtype: torch.dtype, tokens: int, r: int, c: int, share: float) -> Case:
    chosen = _chosen((tokens // r, tokens // c), share)

    def make() -> Arguments:
        q = torch.randn(tokens, HEADS, DIM, device="cuda").to(dtype)
        k, v = (torch.randn(tokens, KV_HEADS, DIM, device="cuda").to(dtype) for _ in range(2))
        bounds = functional.pad(chosen.sum(1).cumsum(0), (1, 0)).int()
        return q, k, v, bounds.to(q.device), chosen.nonzero()[:, 1].int().to(q.device)

    def bind(wrapper: Function) -> Function:
        def plan(q: Any, k: Any, v: Any, bounds: Any, columns: Any) -> Any:
            planned = wrapper(workspace(q))
            sizes = tokens, tokens, r, c, HEADS, KV_HEADS, DIM
            planned.plan(bounds, columns, *sizes, **_types(dtype), o_data_type=dtype)
            return planned

        return _once(plan, lambda planned, q, k, v, *table: planned.run(q, k, v))

    def eager(q: Any, k: Any, v: Any, *table: Any) -> Any:
        mask = chosen.repeat_interleave(r, 0).repeat_interleave(c, 1).to(q.device)
        return _sdpa(q, k, v, mask)

    moved = 2 * tokens * (HEADS + KV_HEADS) * DIM * dtype.itemsize
    flops = 4 * int(chosen.sum()) * r * c * HEADS * DIM
    shape = f"{tokens} in blocks {r} x {c}, {share:.0%}"
    small = eager if tokens <= 8192 else None
    return _case("BlockSparseAttentionWrapper", shape, moved, flops, make, bind, dtype, small)


def _sizes(tokens: int, count: int, unit: int) -> torch.Tensor:
    """Sizes of blocks, each a multiple of ``unit``, for each KV head."""
    generator = torch.Generator().manual_seed(4)
    cuts = torch.rand(KV_HEADS, count, generator=generator) + 0.5
    ends = (cuts.cumsum(1) / cuts.sum(1, keepdim=True) * (tokens // unit)).round().int() * unit
    return ends.diff(dim=1, prepend=torch.zeros(KV_HEADS, 1, dtype=ends.dtype))


def _variable(
    dtype: torch.dtype, tokens: int, rows: int, columns: int, share: float, unit: int
) -> Case:
    chosen = _chosen((KV_HEADS, rows, columns), share)
    row_sizes, column_sizes = _sizes(tokens, rows, 1), _sizes(tokens, columns, unit)

    def make() -> Arguments:
        q = torch.randn(HEADS, tokens, DIM, device="cuda").to(dtype)
        k, v = (torch.randn(KV_HEADS, tokens, DIM, device="cuda").to(dtype) for _ in range(2))
        return q, k, v, *(t.to(q.device) for t in (chosen, row_sizes, column_sizes))

    def bind(wrapper: Function) -> Function:
        def plan(q: Any, k: Any, v: Any, *blocks: Any) -> Any:
            planned = wrapper(workspace(q))
            planned.plan(*blocks, HEADS, KV_HEADS, DIM, **_types(dtype))
            return planned

        return _once(plan, lambda planned, q, k, v, *blocks: planned.run(q, k, v))

    def eager(q: Any, k: Any, v: Any, *blocks: Any) -> Any:
        masks = [
            one.repeat_interleave(r, 0).repeat_interleave(c, 1)
            for one, r, c in zip(chosen, row_sizes, column_sizes, strict=True)
        ]
        mask = torch.stack(masks).repeat_interleave(HEADS // KV_HEADS, 0).to(q.device)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    pairs = torch.einsum("hrc,hr,hc->", chosen.double(), row_sizes.double(), column_sizes.double())
    moved = 2 * tokens * (HEADS + KV_HEADS) * DIM * dtype.itemsize
    flops = 4 * int(pairs) * (HEADS // KV_HEADS) * DIM
    shape = f"{tokens} in {rows} x {columns} blocks, multiples of {unit}, {share:.0%}"
    small = eager if tokens <= 8192 else None
    op = "VariableBlockSparseAttentionWrapper"
    return _case(op, shape, moved, flops, make, bind, dtype, small)
