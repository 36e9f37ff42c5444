# SPDX-License-Identifier: Apache-2.0
"""Random calls of the attention functions without a plan: a case of attention as a block table."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attention_calls import Batch, indptr, make
from attention_cases import GROUPS, Case, Space

import precast

DECODES = ("xqa_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache", "xqa")
FMHA_V2 = "trtllm_fmha_v2_prefill"
PREFILLS = ("trtllm_batch_context_with_kv_cache", FMHA_V2)
#: Of FMHA v2, with the kind of case that each is.
LAYOUTS = {
    "PACKED_QKV": "ragged",
    "CONTIGUOUS_Q_KV": "ragged",
    "SEPARATE_Q_K_V": "ragged",
    "Q_PAGED_KV_NHD": "paged",
    "Q_PAGED_KV_HND": "paged",
}
FUNCTIONS = (*DECODES, *PREFILLS)
_16_BIT = (torch.float16, torch.bfloat16)


@dataclass
class Drawn:
    """A case, the function that it is for, and what the function is told besides."""

    function: str
    case: Case
    ragged: bool = False  # q_cu_seq_lens
    drafts: bool = False  # a draft mask
    wide_rows: bool = False  # gaps between the rows of the block table
    unsigned: bool = False  # uint32 lengths
    rows_more: int = 0  # queries of no request at the end
    layout: str = ""  # of FMHA v2

    @property
    def q_len(self) -> int:
        return max([1, *self.case.q_lens])


def draw(seed: int, space: Space, functions: tuple[str, ...] = FUNCTIONS) -> Drawn:
    """The call of a seed."""
    r = random.Random(f"functional {seed}")
    function = r.choice(functions)
    dtype = r.choice(space.dtypes)
    dims = r.choice(space.head_dims)
    case = Case(
        seed=seed,
        kind="paged",
        dtype=dtype,
        kv_dtype=r.choice((dtype, dtype, *space.kv_dtypes)),
        head_dim_qk=dims[0],
        head_dim_vo=dims[1],
        num_kv_heads=r.choice((1, 2, 4)),
        group=r.choice(GROUPS),
        q_lens=[],
        kv_lens=[],
        page_size=r.choice((1, 2, 3, 5, 8, 16, 16, 32, 64)),
        kv_layout=r.choice(("NHD", "HND")),
        strided=r.random() < 0.3,
        out_given=r.random() < 0.4,
        sinks=r.random() < 0.3,
    )
    if case.kv_dtype.itemsize == 1 or r.random() < 0.3:
        case.scales = r.choice(("", "float", "tensor"))
    case.packed_cache = function != "xqa" and dims[0] == dims[1] and r.random() < 0.5
    if r.random() < 0.3:
        case.window_left = r.choice((0, 1, 7, 63, 1000))
    drawn = Drawn(function, case, wide_rows=r.random() < 0.3, unsigned=r.random() < 0.2)
    batch = r.choice((1, 1, 2, 3, 5, 9))
    top = r.choice((1, 17, 64, space.most_kv))
    case.kv_lens = [r.choice((0, 1, top, r.randint(1, top))) for _ in range(batch)]
    _queries(r, drawn, batch, space)
    if function == FMHA_V2:
        _layout(r, drawn, space)
    _fewer_heads(case, space)
    return drawn


def _layout(r: random.Random, drawn: Drawn, space: Space) -> None:
    case = drawn.case
    drawn.layout = r.choice([*LAYOUTS])
    case.kind = LAYOUTS[drawn.layout]
    case.kv_layout = "HND" if drawn.layout.endswith("HND") else "NHD"
    case.pos_encoding_mode = r.choice(("NONE", "NONE", "ALIBI"))
    case.logits_soft_cap = r.choice((0.0, 0.0, 8.0))
    if drawn.layout in ("PACKED_QKV", "CONTIGUOUS_Q_KV"):
        case.head_dim_vo = case.head_dim_qk
    if drawn.layout == "PACKED_QKV":
        case.group, case.kv_dtype, drawn.rows_more = 1, case.dtype, 0
        case.kv_lens = case.q_lens = [min(n, space.most_q) for n in case.kv_lens]
    if not case.causal:
        case.window_left = -1


def _queries(r: random.Random, drawn: Drawn, batch: int, space: Space) -> None:
    case = drawn.case
    if drawn.function in PREFILLS:
        case.q_lens = [r.choice((0, r.randint(1, space.most_q))) for _ in range(batch)]
        case.causal = r.random() < 0.7
        drawn.ragged, drawn.rows_more = True, r.choice((0, 0, 3))
        return
    each = r.choice((1, 1, 2, 3, 4, 7, 33))
    case.q_lens = [each] * batch
    case.causal = each > 1
    drawn.ragged = r.random() < 0.3
    if drawn.ragged:
        case.q_lens = [r.randint(0, each) for _ in range(batch)]
        drawn.rows_more = r.choice((0, 0, 2))
        case.causal = drawn.q_len > 1
    drawn.drafts = drawn.q_len > 1 and r.random() < 0.5


def _fewer_heads(case: Case, space: Space) -> None:
    pairs = sum(q * kv for q, kv in zip(case.q_lens, case.kv_lens)) * case.num_qo_heads
    while pairs > space.most_pairs and case.num_qo_heads > 1:
        case.num_kv_heads, case.group = max(1, case.num_kv_heads // 2), max(1, case.group // 2)
        pairs //= 2


# -- tensors --------------------------------------------------------------------------------------


@dataclass
class Made:
    """The tensors of a call, and the case and batch that say what must come of it."""

    case: Case
    batch: Batch
    arguments: dict[str, Any]
    #: Rows that a request has.
    rows: int


def made(drawn: Drawn, device: str, workspace: torch.Tensor) -> Made:
    """Fresh tensors; what may not be read is NaN."""
    case = drawn.case
    batch = make(case, device)
    g = torch.Generator().manual_seed(case.seed)
    if drawn.drafts:
        case = dataclasses.replace(case, mask="bool")
        draft_mask, batch.mask = _drafts(drawn, device, g)
    tables = _tables(drawn, batch, device) if case.kind == "paged" else None
    lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    scale = 1 / math.sqrt(case.head_dim_qk)
    q_scale, k_scale, v_scale = batch.scales
    if drawn.function == "xqa" and case.kv_dtype.itemsize > 1:
        v_scale = 1.0
        batch.scales = (q_scale, 1.0, 1.0)
    elif drawn.function == "xqa":
        v_scale = k_scale
        batch.scales = (q_scale, k_scale, k_scale)
    query = batch.q
    if drawn.rows_more:
        query = torch.cat([query, query.new_full((drawn.rows_more, *query.shape[1:]), torch.nan)])
    number: Callable[[float], Any] = float
    if case.scales == "tensor":
        number = lambda x: torch.tensor([x], device=device)  # noqa: E731
    given: dict[str, Any] = {
        "workspace_buffer": workspace,
        "seq_lens": lens.to(torch.uint32) if drawn.unsigned else lens,
        "sinks": batch.sinks,
        "kv_layout": case.kv_layout,
    }
    bounds = indptr(case.q_lens).to(device)
    if drawn.function == FMHA_V2:
        del given["kv_layout"]
        given |= _fmha_v2(drawn, batch, query, tables)
        given["bmm1_scale"] = number(scale * q_scale * batch.scales[1])
        given["bmm2_scale"] = number(v_scale)
        given |= {k: v for k, v in _named(drawn, bounds, lens).items() if k != "causal"}
        if case.out_given:
            shape = (*query.shape[:2], case.head_dim_vo)
            given["out"] = query.new_full(shape, torch.nan)
    elif drawn.function == "xqa":
        assert tables is not None
        given |= _xqa(drawn, batch, query, tables, number)
        if drawn.ragged:
            given["q_cu_seq_lens"] = bounds
    else:
        given |= {
            "query": query,
            "kv_cache": batch.kv,
            "block_tables": tables,
            "bmm1_scale": number(scale * q_scale * batch.scales[1]),
            "bmm2_scale": number(v_scale),
            "window_left": case.window_left,
        }
        if case.out_given:
            shape = (*query.shape[:2], case.head_dim_vo)
            given["out"] = query.new_full(shape, torch.nan)
        given |= _named(drawn, bounds, lens)
    if drawn.drafts:
        given["mask"] = draft_mask
    return Made(case, batch, given, batch.q.shape[0])


def _xqa(
    drawn: Drawn,
    batch: Batch,
    query: torch.Tensor,
    tables: torch.Tensor,
    number: Callable[[float], Any],
) -> dict[str, Any]:
    case, requests = drawn.case, len(drawn.case.q_lens)
    q = query
    if not drawn.ragged:
        drafts = [drawn.q_len] if drawn.q_len > 1 else []
        q = query.contiguous().view(requests, 1, *drafts, *query.shape[1:])
    sinks = batch.sinks
    return {
        "q": q,
        "k_cache": batch.kv[0],
        "v_cache": batch.kv[1],
        "page_table": tables,
        "output": q.new_full((*q.shape[:-1], case.head_dim_vo), torch.nan),
        "semaphores": torch.zeros(8, dtype=torch.uint8, device=query.device),
        "num_kv_heads": case.num_kv_heads,
        "page_size": case.page_size,
        "q_scale": number(batch.scales[0] * math.sqrt(q.shape[-1] / case.head_dim_qk)),
        "kv_scale": number(batch.scales[1]),
        "sliding_win_size": case.window_left + 1,
        "q_seq_len": drawn.q_len,
        "sinks": None if sinks is None else sinks.view(case.num_kv_heads, -1),
    }


def _fmha_v2(
    drawn: Drawn, batch: Batch, query: torch.Tensor, tables: torch.Tensor | None
) -> dict[str, Any]:
    case, qkv = drawn.case, (query, batch.kv)
    if drawn.layout == "PACKED_QKV":
        qkv = torch.stack((query, *batch.kv), 1)
    elif drawn.layout == "CONTIGUOUS_Q_KV":
        parts = [part.view(torch.uint8 if part.itemsize == 1 else part.dtype) for part in batch.kv]
        qkv = (query, torch.stack(parts, 1).view(batch.kv[0].dtype))
    elif drawn.layout == "SEPARATE_Q_K_V":
        qkv = (query, *batch.kv)
    elif isinstance(batch.kv, tuple) and case.seed % 2 and tables is not None:
        # Values have pages of their own, moved by the distance of both tensors.
        tables = torch.stack((tables, tables + 12345), 1)
    return {
        "qkv": qkv,
        "input_layout": drawn.layout,
        "block_tables": tables,
        "mask_mode": "causal" if case.causal else "padding",
        "window_left": case.window_left,
        "pos_encoding_mode": "alibi" if case.pos_encoding_mode == "ALIBI" else None,
        "logits_soft_cap_scale": case.logits_soft_cap or None,
    }


def _named(drawn: Drawn, bounds: torch.Tensor, lens: torch.Tensor) -> dict[str, Any]:
    """The lengths, as each function names them."""
    if drawn.function in PREFILLS:
        return {
            "max_q_len": drawn.q_len,
            "max_kv_len": max(drawn.case.kv_lens),
            "batch_size": len(drawn.case.kv_lens),
            "cum_seq_lens_q": bounds,
            "cum_seq_lens_kv": torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int(),
            "causal": drawn.case.causal,
        }
    given: dict[str, Any] = {"max_seq_len": max(drawn.case.kv_lens)}
    if drawn.ragged and drawn.function.startswith("trtllm"):
        return {**given, "max_q_len": drawn.q_len, "cum_seq_lens_q": bounds, "q_len_per_req": None}
    if drawn.ragged:
        given["q_cu_seq_lens"] = bounds
    return {**given, "q_len_per_req": drawn.q_len}


def _tables(drawn: Drawn, batch: Batch, device: str) -> torch.Tensor:
    """The block table of the case's pages; what no request has names pages that do not exist."""
    case = drawn.case
    counts = batch.kv_indptr.diff().tolist()
    width = max([1, *counts]) + (case.seed % 2)
    table = torch.full((len(counts), width + 3 * drawn.wide_rows), 1 << 20, dtype=torch.int32)
    for row, count, first in zip(table, counts, batch.kv_indptr.tolist()):
        row[:count] = batch.indices[first : first + count]
    return table.to(device)[:, :width]


def _drafts(
    drawn: Drawn, device: str, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A draft mask, and the same for all tokens of each request, one request after the other."""
    case = drawn.case
    words = -(-drawn.q_len // 32) * 2
    rows, whole = [], []
    for n, m in zip(case.q_lens, case.kv_lens):
        sees = torch.rand(n, n, generator=generator) < 0.6
        bits = torch.nn.functional.pad(sees, (0, 16 * words - n)).view(n, words, 16).int()
        rows.append((bits << torch.arange(16, dtype=torch.int32)).sum(-1))
        whole.append(torch.nn.functional.pad(sees, (m - n, 0), value=True).flatten())
    garbage = torch.full((drawn.rows_more, words), 0x5A5A)
    mask = torch.cat([*rows, garbage]).to(torch.uint16)
    if not drawn.ragged:
        mask = mask.view(len(case.q_lens), drawn.q_len, words)
    return mask.to(device), torch.cat(whole).to(device)


# -- calls ----------------------------------------------------------------------------------------


def call(drawn: Drawn, made: Made) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output rows of requests, and their log-sum-exps where the function has them."""
    function: Any = getattr(precast, drawn.function)
    given = made.arguments
    if drawn.function == "xqa":
        assert function(**given) is None
        return given["output"].flatten(0, -3)[: made.rows], None
    if not drawn.function.startswith("trtllm"):
        out, lse = function(**given), None
    elif drawn.function == FMHA_V2:
        out, statistics = function(**given, save_softmax_stats=True)
        sums, ones = statistics[: made.rows].unbind(-1)
        assert ones.eq(1).all()
        lse = sums / math.log(2.0)
    else:
        out, lse = function(**given, return_lse=True)
        lse = lse[: made.rows]
    assert out is given.get("out", out)
    if drawn.rows_more and "out" in given:
        assert out[made.rows :].isnan().all(), "rows of no request were written"
    return out[: made.rows], lse


# -- one decode -----------------------------------------------------------------------------------


def decode_arguments(
    q_len: int = 1, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> dict[str, Any]:
    """Two requests of 5 and 11 tokens over a block table, layout NHD, pages of 8 tokens."""
    g = torch.Generator().manual_seed(7)
    cache = torch.randn(4, 2, 8, 2, 64, generator=g)
    return {
        "query": torch.randn(2 * q_len, 4, 64, generator=g).to(dtype),
        "kv_cache": cache.to(dtype),
        "workspace_buffer": torch.full((1 << 18,), 0xA5, dtype=torch.uint8),
        "block_tables": torch.tensor([[3, 0], [1, 2]], dtype=torch.int32),
        "seq_lens": torch.tensor((5, 11), dtype=torch.int32),
        "max_seq_len": 16,
        "bmm1_scale": 0.125,
        "kv_layout": "NHD",
        "q_len_per_req": q_len,
        **options,
    }
