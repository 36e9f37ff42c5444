# SPDX-License-Identifier: Apache-2.0
"""The tensors of a random case, the call that it is, and what must come of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from attention_cases import FP8, Case

import precast
from precast._ops.attention import sm90
from precast.decode import (
    batch_decode_with_paged_kv_cache_reference,
    single_decode_with_kv_cache_reference,
)
from precast.prefill import (
    batch_prefill_with_paged_kv_cache_reference,
    batch_prefill_with_ragged_kv_cache_reference,
    single_prefill_with_kv_cache_reference,
)

#: Splits of a fixed size need much of it.
WORKSPACE_BYTES = 1 << 30


@dataclass
class Batch:
    """What a case is called with."""

    q: torch.Tensor
    kv: Any  # a cache, or a pair of ragged tensors
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    mask: torch.Tensor | None
    sinks: torch.Tensor | None
    prefix_len: torch.Tensor | None
    token_pos: torch.Tensor | None
    scales: tuple[float, float, float]


def indptr(lens: list[int]) -> torch.Tensor:
    """Where each request starts."""
    return torch.tensor([0, *lens]).cumsum(0).int()


def make(case: Case, device: str) -> Batch:
    """Fresh tensors; what may not be read is NaN."""
    g = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int, dtype: torch.dtype, strided: bool = False) -> torch.Tensor:
        if strided:  # A part of something wider, as of packed projections.
            wide = torch.randn(*shape[:-1], shape[-1] + 16, generator=g, device=device)
            return wide.to(dtype)[..., : shape[-1]]
        return torch.randn(*shape, generator=g, device=device).to(dtype)

    heads, kv_heads = case.num_qo_heads, case.num_kv_heads
    q = normal(sum(case.q_lens), heads, case.head_dim_qk, dtype=case.dtype, strided=case.strided)
    paged = case.kind in ("decode", "paged")
    pages = [-(-kv // case.page_size) for kv in case.kv_lens]
    total = (sum(pages) + 3, case.page_size) if paged else (sum(case.kv_lens),)
    dims = (case.head_dim_qk, case.head_dim_vo)
    order = torch.randperm(total[0], generator=g, device=device).int()
    indices = order[: sum(pages)] if paged else order[:0]
    parts = [
        normal(*total, kv_heads, dim, dtype=case.kv_dtype, strided=case.strided) for dim in dims
    ]
    if paged:
        _poison(case, parts, indices, pages)
    if case.kv_layout == "HND":
        parts = [part.transpose(-3, -2).contiguous() for part in parts]
        if case.strided:
            parts = [part.transpose(-3, -2).contiguous().transpose(-3, -2) for part in parts]
    kv: Any = tuple(parts)
    if paged and case.packed_cache:
        kv = _stack(parts)
    mask = prefix = places = sinks = None
    if case.mask in ("bool", "packed"):
        pairs = sum(a * b for a, b in zip(case.q_lens, case.kv_lens))
        mask = torch.rand(pairs, generator=g, device=device) < 0.7
    if case.mask == "items":
        prefix, places = _items(case, device)
    if case.sinks:
        sinks = torch.randn(heads, generator=g, device=device)
    return Batch(
        q=q,
        kv=kv,
        qo_indptr=indptr(case.q_lens).to(device),
        kv_indptr=indptr(pages if paged else case.kv_lens).to(device),
        indices=indices,
        last_page_len=torch.tensor(
            [(kv - 1) % case.page_size + 1 if kv else 0 for kv in case.kv_lens],
            dtype=torch.int32,
            device=device,
        ),
        mask=mask,
        sinks=sinks,
        prefix_len=prefix,
        token_pos=places,
        scales=(0.9, 1.2, 0.7) if case.scales else (1.0, 1.0, 1.0),
    )


def _poison(case: Case, parts: list[torch.Tensor], indices: torch.Tensor, pages: list[int]) -> None:
    """NaN in pages that no request has, and behind the last token of each."""
    size, first = case.page_size, 0
    for part in parts:
        bytes_of = part.view(torch.uint8) if case.kv_dtype in FP8 else part
        nan: Any = 0x7F if case.kv_dtype in FP8 else torch.nan
        used = torch.zeros(part.shape[0], dtype=torch.bool, device=part.device)
        used[indices.long()] = True
        bytes_of[~used] = nan
        first = 0
        for kv, count in zip(case.kv_lens, pages):
            if kv % size:
                bytes_of[int(indices[first + count - 1]), kv % size :] = nan
            first += count


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    narrow = parts[0].element_size() == 1
    raw = [part.view(torch.uint8) if narrow else part for part in parts]
    return torch.stack(raw, dim=1).view(parts[0].dtype)


def _items(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = []
    for _prefix, *items in case.items:
        rows.append([0] + [place for size in items for place in [*range(1, size + 1), 0]])
    width = max(map(len, rows))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    prefix = torch.tensor([items[0] for items in case.items])
    return prefix.to(torch.uint32).to(device), padded.flatten().to(torch.uint16).to(device)


# -- the call -------------------------------------------------------------------------------------


def _scales(case: Case, batch: Batch) -> dict[str, Any]:
    if not case.scales:
        return {}
    values: list[Any] = list(batch.scales)
    if case.scales == "tensor":
        values = [torch.tensor(s, device=batch.q.device) for s in values]
    names = ("q_scale", "k_scale", "v_scale")
    return {
        name: value
        for name, value in zip(names, values)
        if not (case.kind == "single_prefill" and name == "q_scale")
    }


def _outputs(case: Case, batch: Batch) -> dict[str, torch.Tensor]:
    if not case.out_given:
        return {}
    tokens, heads = batch.q.shape[:2]
    new = functools.partial(torch.full, fill_value=torch.nan, device=batch.q.device)
    out = new((tokens, heads, case.head_dim_vo), dtype=case.o_dtype or case.dtype)
    return {"out": out, "lse": new((tokens, heads), dtype=torch.float32)}


def call(case: Case, batch: Batch, workspace: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and log-sum-exps of the public API."""
    if case.kind.startswith("single"):
        return _call_single(case, batch)
    both: Any
    host = (lambda t: t.cpu()) if case.lengths_on_host else (lambda t: t)
    table = tuple(host(t) for t in (batch.kv_indptr, batch.indices, batch.last_page_len))
    types = {"q_data_type": case.dtype, "kv_data_type": case.kv_dtype}
    if case.o_dtype is not None:
        types["o_data_type"] = case.o_dtype
    schedule: dict[str, Any] = {
        "fixed_split_size": case.fixed_split_size,
        "disable_split_kv": case.disable_split_kv,
    }
    sinks = {"sinks": batch.sinks}
    heads = case.num_qo_heads, case.num_kv_heads
    run = {**_scales(case, batch), **_outputs(case, batch), "return_lse": True}
    if case.kind == "decode":
        decode = precast.BatchDecodeWithPagedKVCacheWrapper(
            workspace, case.kv_layout, use_tensor_cores=case.use_tensor_cores
        )
        each = case.q_lens[0]
        dims = (case.head_dim_qk, case.page_size)
        extra = {**types, **schedule, **case.options(), "q_len_per_req": each}
        decode.plan(*table, *heads, *dims, **extra)
        both = decode.run(batch.q, batch.kv, **run, **sinks)
        return both
    masks: dict[str, Any] = {"causal": case.causal}
    if case.mask == "bool":
        masks["custom_mask"] = batch.mask
    elif case.mask == "packed":
        masks["packed_custom_mask"] = _packed(case, batch)
    elif case.mask == "items":
        masks["prefix_len_ptr"], masks["token_pos_in_items_ptr"] = batch.prefix_len, batch.token_pos
        assert batch.token_pos is not None
        masks["token_pos_in_items_len"] = batch.token_pos.numel() // len(case.q_lens)
    extra = {**types, **schedule, **case.options(), **masks}
    if case.kind == "paged":
        paged = precast.BatchPrefillWithPagedKVCacheWrapper(workspace, case.kv_layout)
        paged.plan(
            host(batch.qo_indptr),
            *table,
            *heads,
            case.head_dim_qk,
            case.page_size,
            case.head_dim_vo,
            **extra,
        )
        both = paged.run(batch.q, batch.kv, **run, **sinks)
        return both
    ragged = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace, case.kv_layout)
    lengths = host(batch.qo_indptr), host(batch.kv_indptr)
    ragged.plan(*lengths, *heads, case.head_dim_qk, case.head_dim_vo, **extra)
    both = ragged.run(batch.q, *batch.kv, **run)
    return both


def _call_single(case: Case, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    both: Any
    k, v = batch.kv
    extra = {**case.options(), **_scales(case, batch), "return_lse": True}
    if case.kind == "single_decode":
        both = precast.single_decode_with_kv_cache(batch.q[0], k, v, case.kv_layout, **extra)
        return both[0].unsqueeze(0), both[1].unsqueeze(0)
    extra.update(kv_layout=case.kv_layout, causal=case.causal)
    if case.mask == "bool":
        assert batch.mask is not None
        extra["custom_mask"] = batch.mask.view(case.q_lens[0], case.kv_lens[0])
    elif case.mask == "packed":
        extra["packed_custom_mask"] = _packed(case, batch)
    both = precast.single_prefill_with_kv_cache(batch.q, k, v, o_dtype=case.o_dtype, **extra)
    return both


def _packed(case: Case, batch: Batch) -> torch.Tensor:
    """Bits by hand, each request from a byte of its own on."""
    assert batch.mask is not None
    parts, first = [], 0
    for q, kv in zip(case.q_lens, case.kv_lens):
        bits = batch.mask[first : first + q * kv].to(torch.int32)
        first += q * kv
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
        weights = 2 ** torch.arange(8, device=bits.device, dtype=torch.int32)
        parts.append((bits * weights).sum(1).to(torch.uint8))
    return torch.cat(parts)


# -- what must come of it -------------------------------------------------------------------------


def expected(case: Case, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """By the references, in float32."""
    # Queries of 8 bits are those of 16 bits with the same values.
    q = batch.q if case.o_dtype is None else batch.q.to(case.o_dtype)
    options: dict[str, Any] = {**case.options(), "kv_layout": case.kv_layout}
    options["o_dtype"] = torch.float32
    q_scale, k_scale, v_scale = batch.scales
    if case.kind == "single_prefill":
        q_scale = 1.0
    if case.kind.startswith("single"):
        k, v = batch.kv
        options.update(v_scale=v_scale)
        if case.kind == "single_decode":
            options.update(q_scale=q_scale, k_scale=k_scale)
            both: Any = single_decode_with_kv_cache_reference(
                q[0], k, v, return_lse=True, **options
            )
            return both[0].unsqueeze(0), both[1].unsqueeze(0)
        options.update(k_scale=k_scale, causal=case.causal)
        options["custom_mask"] = batch.mask
        return single_prefill_with_kv_cache_reference(  # type: ignore[return-value]
            q, k, v, return_lse=True, **options
        )
    options.update(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    if case.kind == "decode":
        return batch_decode_with_paged_kv_cache_reference(
            q,
            batch.kv,
            batch.kv_indptr,
            batch.indices,
            batch.last_page_len,
            sinks=batch.sinks,
            q_len_per_req=case.q_lens[0],
            **options,
        )
    options.update(
        causal=case.causal,
        custom_mask=batch.mask,
        prefix_len_ptr=batch.prefix_len,
        token_pos_in_items_ptr=batch.token_pos,
        token_pos_in_items_len=0
        if batch.token_pos is None
        else batch.token_pos.numel() // len(case.q_lens),
    )
    if case.kind == "paged":
        return batch_prefill_with_paged_kv_cache_reference(
            q,
            batch.kv,
            batch.qo_indptr,
            batch.kv_indptr,
            batch.indices,
            batch.last_page_len,
            sinks=batch.sinks,
            **options,
        )
    return batch_prefill_with_ragged_kv_cache_reference(
        q, *batch.kv, batch.qo_indptr, batch.kv_indptr, **options
    )


#: Of outputs, relative and absolute, by the dtype of queries. In e4m3, probabilities are rounded to
#: four bits.
E4M3 = torch.float8_e4m3fn
TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5, E4M3: 0.1}
#: Of the root mean square of outputs, where there are many.
MEAN_TOLERANCES = {E4M3: 0.04}
MANY = 4096
#: The share of outputs that may differ by twice as much.
RARE = 1e-6
#: Of log-sum-exps.
LSE_TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5, E4M3: 6e-2}


def _multiplies_fp8(case: Case, device: torch.device) -> bool:
    """Whether queries of float16 are the sums of e4m3 numbers: see docs/decisions.md."""
    plain = case.pos_encoding_mode == "NONE" and not (case.logits_soft_cap or case.mask)
    rows = max(case.q_lens) * case.group
    # The kernel of a plan whose splits are fixed does not depend on the batch.
    is_fixed = case.disable_split_kv or bool(case.fixed_split_size)
    return (
        (case.dtype, case.kv_dtype) == (torch.float16, E4M3)
        and plain
        and (is_fixed or rows >= sm90.fewest_rows(case.head_dim_vo, E4M3.itemsize))
        and sm90.is_hopper(device)
    )


def problem(
    case: Case,
    got: tuple[torch.Tensor, torch.Tensor],
    want: tuple[torch.Tensor, torch.Tensor],
) -> str | None:
    """What is wrong with results, in a line; None if nothing is."""
    for name, actual, right, table in (
        ("out", got[0], want[0], TOLERANCES),
        ("lse", got[1], want[1], LSE_TOLERANCES),
    ):
        if actual.shape != right.shape:
            return f"{name} has shape {[*actual.shape]}, not {[*right.shape]}: {case}"
        a, b = actual.double(), right.double()
        limit, rare = table[case.dtype] * (1 + b.abs()), RARE
        spread = (case.sm_scale or 0.0) * case.head_dim_qk**0.5
        if _multiplies_fp8(case, a.device):
            # Tensor cores keep 14 bits of a sum in FP8, which large scores make visible.
            if name == "out":
                limit = TOLERANCES[torch.bfloat16] * (1 + b.abs())
            else:
                limit = limit * max(1.0, spread)
        is_turned = case.pos_encoding_mode == "ROPE_LLAMA" and case.dtype != torch.float32
        if is_turned:
            # Turned queries and keys are rounded to 16 bits: where the angles' last bits differ
            # some are rounded the other way, which a large scale of scores makes visible. The
            # reference rounds to the type of the queries; Hopper's kernels turn keys of e4m3 in
            # f16, which is nearer to the numbers themselves than bf16.
            limit, rare = limit * max(2.0, spread), 10 * RARE
        fits = (a == b) | ((a - b).abs() <= limit)  # Infinities are equal.
        # Probabilities are rounded to 16 bits, of which few elements get the worst: in a million,
        # one may be twice as far off. So may the score of a turned query and key.
        is_rare = (name == "out" or is_turned) and int((~fits).sum()) <= rare * fits.numel()
        if is_rare:
            fits = (a == b) | ((a - b).abs() <= 2 * limit)
        if not bool(fits.all()):
            at = tuple((~fits).nonzero()[0].tolist())
            share = 1 - float(fits.double().mean())
            return f"{name}{list(at)} is {a[at]:.6g}, not {b[at]:.6g} ({share:.1%} wrong): {case}"
        if name == "out" and case.dtype in MEAN_TOLERANCES and b.numel() >= MANY:
            error, size = (float(x.square().mean().sqrt()) for x in (a - b, b))
            if error > MEAN_TOLERANCES[case.dtype] * size:
                return f"out differs by {error:.3g} on average, it is {size:.3g}: {case}"
    return None
