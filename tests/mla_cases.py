# SPDX-License-Identifier: Apache-2.0
"""Random cases of MLA: a seed is a batch, a layout in memory, and options that go together.

What a call must give is computed in float64, token by token of the tables and without a line of
the library.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch

from precast._base.tolerances import tolerance_of_attention
from precast.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

HEADS = (1, 8, 12, 16, 16, 20, 24, 32, 40, 64, 96, 128, 128)
E4M3 = torch.float8_e4m3fn
#: A page that no cache has, behind the pages of a request.
GARBAGE = 2**30


@dataclass(frozen=True)
class Space:
    """What cases are drawn from."""

    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    kv_dtypes: tuple[torch.dtype, ...] = (E4M3,)
    head_dims: tuple[tuple[int, int], ...] = ((512, 64), (512, 0), (256, 64), (256, 0))
    most_batch: int = 300
    most_kv: int = 100_000
    most_q: int = 200
    #: Tokens of all requests, and pairs of a query and a token times heads.
    most_tokens: int = 200_000
    most_pairs: int = 1 << 24
    #: Queries of all requests times heads; the reference holds their outputs in float64.
    most_rows: int = 1 << 18
    device: str = "cuda"


@dataclass
class Case:
    """One call."""

    seed: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim_ckv: int
    head_dim_kpe: int
    heads: int
    q_lens: list[int]
    kv_lens: list[int]
    page_size: int
    causal: bool
    sm_scale: float
    form: str  # csr, dense, metadata
    layout: str  # apart, joined, pages (of one buffer with other columns)
    lengths_on_host: bool
    query_form: str  # split, pair, packed
    lse: str = "none"  # base2, basee
    sinks: bool = False
    ckv_scale: float | None = None
    kpe_scale: float | None = None
    scales_on_device: bool = False
    scale_arr: bool = False
    own_outputs: bool = False


def draw(seed: int, space: Space) -> Case:
    """Make the case of a seed."""
    rng = random.Random(seed)
    dtype = rng.choice(space.dtypes)
    kv_dtype = rng.choice((dtype, dtype, *space.kv_dtypes))
    ckv, kpe = rng.choice(space.head_dims)
    heads = rng.choice(HEADS)
    batch = rng.choice((1, 1, 2, 3, 4, 7, 16, rng.randint(1, space.most_batch)))
    uniform = rng.random() < 0.5
    most_q = rng.choice((1, 1, 1, 2, 4, 17, space.most_q))
    q_lens, kv_lens, tokens, pairs, rows = [], [], 0, 0, 0
    for _ in range(batch):
        length = rng.choice((0, 1, 63, 64, 65, 500, 5000, space.most_kv))
        kv = rng.randint(max(0, length - 70), length) if length > 100 else rng.randint(0, length)
        q = most_q if uniform else rng.randint(0, most_q)
        kv = min(kv, space.most_kv, max(0, space.most_tokens - tokens))
        q = min(q, max(0, (space.most_pairs - pairs) // max(1, kv * heads)))
        q = min(q, (space.most_rows - rows) // heads)
        q_lens.append(q)
        kv_lens.append(kv)
        tokens, pairs, rows = tokens + kv, pairs + q * kv * heads, rows + q * heads
    is_fp8 = kv_dtype is E4M3
    scale_arr = is_fp8 and rng.random() < 0.3
    return Case(
        seed,
        dtype,
        kv_dtype,
        ckv,
        kpe,
        heads,
        q_lens,
        kv_lens,
        page_size=rng.choice((1, 1, 2, 3, 7, 8, 16, 32, 48, 64, 64, 128)),
        causal=rng.random() < 0.5,
        sm_scale=rng.choice((1 / math.sqrt(192), 0.1, 0.5, -0.1, 0.0)),
        form=rng.choice(("csr", "csr", "dense", "metadata")),
        layout=rng.choice(("apart", "joined", "pages")),
        lengths_on_host=rng.random() < 0.5,
        query_form=rng.choice(("split", "pair", "packed")),
        lse=rng.choice(("none", "base2", "base2", "basee")),
        sinks=rng.random() < 0.2,
        ckv_scale=rng.choice((0.02, 1.0, 3.0)) if is_fp8 and not scale_arr else None,
        kpe_scale=rng.choice((0.01, 1.0, 2.5)) if is_fp8 else None,
        scales_on_device=is_fp8 and rng.random() < 0.3,
        scale_arr=scale_arr,
        own_outputs=rng.random() < 0.5,
    )


@dataclass
class Batch:
    """The tensors of a case."""

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    ckv: torch.Tensor
    kpe: torch.Tensor
    query: torch.Tensor  # both in one tensor, whose slices they are
    cache: torch.Tensor | None  # likewise, unless they are apart
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    table: torch.Tensor  # [batch, pages]
    pages: list[list[int]]
    sinks: torch.Tensor | None
    scale_arr: torch.Tensor | None


def make(case: Case, device: str) -> Batch:
    """Make tensors; whatever no request has is NaN, or a page that does not exist."""
    generator = torch.Generator(device).manual_seed(case.seed)
    rng = random.Random(case.seed)

    def random_of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    ckv_dim, kpe_dim = case.head_dim_ckv, case.head_dim_kpe
    columns, tokens = ckv_dim + kpe_dim, sum(case.q_lens)
    query = (random_of(tokens, case.heads, columns) * 0.5).to(case.dtype)
    size = case.page_size
    counts = [-(-n // size) for n in case.kv_lens]
    spare = rng.randint(1, 3)
    total = sum(counts) + spare
    numbers = rng.sample(range(total), total)
    pages, at = [], 0
    for count in counts:
        pages.append(numbers[at : at + count])
        at += count
    # Columns of the buffer that belong to neither, 16 bytes' worth.
    more = 32 if case.layout == "pages" else 0
    values = random_of(total, size, columns + more)
    values = values.to(case.kv_dtype)
    used = torch.zeros(total, size, dtype=torch.bool)
    for request, length in zip(pages, case.kv_lens):
        for i, page in enumerate(request):
            used[page, : min(size, length - i * size)] = True
    poison = 0x7F if case.kv_dtype is E4M3 else None
    raw = values.view(torch.uint8) if poison else values
    raw[~used.to(device)] = poison if poison else math.nan
    if more:
        raw[..., columns:] = poison if poison else math.nan
    ckv, kpe = values[..., :ckv_dim], values[..., ckv_dim:columns]
    cache: torch.Tensor | None = values[..., :columns]
    if case.layout == "apart":
        ckv, kpe, cache = ckv.contiguous(), kpe.contiguous(), None
    scale_arr = None
    if case.scale_arr:
        scale_arr = random_of(total, size, ckv_dim // 128).abs() * 0.05 + 1e-3
        scale_arr[~used.to(device)] = math.nan
    i32: Any = {"dtype": torch.int32}
    lengths_at = "cpu" if case.lengths_on_host else device
    bounds = torch.tensor([0, *case.q_lens]).cumsum(0)
    starts = torch.tensor([0, *counts]).cumsum(0)
    width = max([*counts, 1]) + 1
    table = torch.full((len(pages), width), GARBAGE, **i32)
    for row, request in enumerate(pages):
        table[row, : len(request)] = torch.tensor(request, **i32)
    flat = [page for request in pages for page in request]
    return Batch(
        query[..., :ckv_dim],
        query[..., ckv_dim:],
        ckv,
        kpe,
        query,
        cache,
        bounds.to(lengths_at, torch.int32),
        starts.to(lengths_at, torch.int32),
        torch.tensor([*flat, GARBAGE, GARBAGE], **i32).to(device),
        torch.tensor(case.kv_lens, **i32).to(lengths_at),
        table.to(device),
        pages,
        random_of(case.heads) if case.sinks else None,
        scale_arr,
    )


def expected(case: Case, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return outputs and log-sum-exps, float64; a row without a token has zeros and -inf.

    The third tensor is how far a log-sum-exp may be off because queries are rounded to float16, as
    they are for caches of e4m3: an error of up to 2^-11 in each term of a score. They are
    independent, so that four times the root of the sum of their squares is not exceeded.
    """
    device = batch.query.device
    out = torch.zeros(*batch.q_nope.shape, dtype=torch.float64, device=device)
    lse = torch.full(batch.q_nope.shape[:2], -math.inf, dtype=torch.float64, device=device)
    rounding = torch.zeros_like(lse)
    begin = 0
    for q_len, kv_len, pages in zip(case.q_lens, case.kv_lens, batch.pages):
        rows, begin = slice(begin, begin + q_len), begin + q_len
        if not q_len:
            continue
        slots = torch.arange(kv_len)
        chosen = torch.tensor(pages, dtype=torch.long)[slots // case.page_size]
        at = chosen.to(device), (slots % case.page_size).to(device)
        ckv, kpe = (_as_float64(part)[at] for part in (batch.ckv, batch.kpe))
        if batch.scale_arr is not None:
            ckv = ckv * batch.scale_arr[at].double().repeat_interleave(128, -1)
        ckv = ckv * (1.0 if case.ckv_scale is None else case.ckv_scale)
        kpe = kpe * (1.0 if case.kpe_scale is None else case.kpe_scale)
        keys = torch.cat([ckv, kpe], -1)
        if case.kv_dtype is E4M3 and kv_len > 0:
            squares = torch.einsum("qhd,kd->qhk", batch.query[rows].double() ** 2, keys**2)
            rounding[rows] = squares.amax(-1).sqrt() * abs(case.sm_scale) * 2.0**-9
        scores = torch.einsum("qhd,kd->hqk", batch.query[rows].double(), keys) * case.sm_scale
        if case.causal:
            last = kv_len - q_len + torch.arange(q_len, device=device)
            hidden = torch.arange(kv_len, device=device) > last[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        if batch.sinks is not None:
            sink = batch.sinks.double().view(-1, 1, 1).expand(-1, q_len, 1)
            scores = torch.cat([scores, sink], -1)
        total = scores.logsumexp(-1)
        weights = (scores - total.unsqueeze(-1)).exp()[..., :kv_len]
        weights = weights.masked_fill(total.isneginf().unsqueeze(-1), 0.0)
        out[rows] = torch.einsum("hqk,kd->qhd", weights, ckv)
        lse[rows] = total.T
    unit = 1.0 if case.lse == "basee" else math.log(2.0)
    return out, lse / unit, rounding / unit


def _as_float64(part: torch.Tensor) -> torch.Tensor:
    return part.double() if part.element_size() > 1 else part.float().double()


def wrapper_of(
    case: Case, batch: Batch, workspace: torch.Tensor, backend: str = "auto"
) -> BatchMLAPagedAttentionWrapper:
    """Return a wrapper with the plan of a case."""
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    plan(case, batch, wrapper)
    return wrapper


def plan(case: Case, batch: Batch, wrapper: BatchMLAPagedAttentionWrapper) -> None:
    """Plan a case in its form."""
    csr = batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_lens
    dense = batch.qo_indptr, batch.table, batch.kv_lens
    names = ("cum_seq_lens_q", "block_tables", "seq_lens")
    given: dict[str, Any] = {
        "csr": dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), csr)),
        "dense": dict(zip(names, dense)),
        "metadata": {"metadata": MLAPlanMetadata.dual(*csr, **dict(zip(names, dense)))},
    }[case.form]
    wrapper.plan(
        **given,
        num_heads=case.heads,
        head_dim_ckv=case.head_dim_ckv,
        head_dim_kpe=case.head_dim_kpe,
        page_size=case.page_size,
        causal=case.causal,
        sm_scale=case.sm_scale,
        q_data_type=case.dtype,
        kv_data_type=case.kv_dtype,
        lse_mode="none" if case.form == "csr" else case.lse,
        use_sinks=case.sinks,
    )


def run(
    case: Case, batch: Batch, wrapper: BatchMLAPagedAttentionWrapper
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a planned case; outputs of the caller hold NaN before."""
    q: dict[str, Any] = {"query": batch.query}
    if case.query_form == "split":
        q = {"q_nope": batch.q_nope, "q_pe": batch.q_pe}
    elif case.query_form == "pair":
        q = {"query": (batch.q_nope, batch.q_pe)}
    kv: dict[str, Any] = {"ckv_cache": batch.ckv, "kpe_cache": batch.kpe}
    if case.query_form == "pair":
        kv = {"kv_cache": (batch.ckv, batch.kpe)}
    elif case.query_form == "packed" and batch.cache is not None:
        kv = {"kv_cache": batch.cache}
    device = batch.query.device
    scales: dict[str, Any] = {"ckv_scale": case.ckv_scale, "kpe_scale": case.kpe_scale}
    if case.scales_on_device:
        scales = {
            name: None if scale is None else torch.tensor([scale], device=device)
            for name, scale in scales.items()
        }
    out = lse = None
    if case.own_outputs:
        out = torch.full_like(batch.q_nope, math.nan, memory_format=torch.contiguous_format)
        if case.lse != "none":
            lse = torch.full(out.shape[:2], math.nan, device=device)
    result = wrapper.run(
        **q,
        **kv,
        **scales,
        ckv_scale_arr=batch.scale_arr,
        sinks=batch.sinks,
        out=out,
        lse=lse,
        return_lse=case.lse != "none",
        return_lse_base_on_e=case.lse == "basee",
    )
    both = result if isinstance(result, tuple) else (result, None)
    assert out is None or both[0] is out
    assert lse is None or both[1] is lse
    return both


def problem(
    case: Case,
    got: tuple[torch.Tensor, torch.Tensor | None],
    want: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> str:
    """Return what is wrong with a result; nothing if it is right."""
    out, lse = got
    row = tolerance_of_attention(case.dtype)
    # Relative to the largest value, which probabilities that are rounded multiply.
    scale = max(1.0, float(want[0].abs().max()) if want[0].numel() else 0.0)
    words = []
    # A score that is off changes its probability by as much, relatively.
    unit = 1.0 if case.lse == "basee" else math.log(2.0)
    off = (row.atol + want[2].unsqueeze(-1) * unit) * scale
    wrong = ~((out.double() - want[0]).abs() <= off + row.rtol * want[0].abs())
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        words.append(
            f"{int(wrong.sum())} outputs of {wrong.numel()}, the first at {at}: "
            f"{out[tuple(at)].item()}, not {want[0][tuple(at)].item()}"
        )
    if lse is not None:
        same = lse.double() == want[1]  # Infinities, too.
        limit = 2e-3 + 1e-4 * want[1].abs() + want[2]
        wrong = ~(same | ((lse.double() - want[1]).abs() <= limit))
        if wrong.any():
            at = wrong.nonzero()[0].tolist()
            words.append(
                f"{int(wrong.sum())} log-sum-exps of {wrong.numel()}, the first at {at}: "
                f"{lse[tuple(at)].item()}, not {want[1][tuple(at)].item()}"
            )
    return f"{case}: {'; '.join(words)}" if words else ""
