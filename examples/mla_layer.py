# SPDX-License-Identifier: Apache-2.0
"""One attention layer of DeepSeek-V2-Lite on precast's kernels: prompts in chunks, then decodes.

The layer has the shapes of the model and random weights from a seed; YaRN is left out. A token's
cache is one row for all heads: 512 compressed columns, and 64 that RoPE rotates. New tokens of a
prompt attend to each other with the keys and values of each head, and to what is cached in the
compressed space, where the projections to keys and values are part of queries and outputs; the two
states are merged. Decodes and drafts are computed in the compressed space alone::

    q, ckv, kpe -> rmsnorm, rope -> append (quantised) -> MLA over pages     -> merge_state -> out
                                                       -> ragged prefill

Each output is compared with the plain form in fp32: all tokens of a request at once, with the keys
and values of each head and without a cache. With a GPU the kernels run, without one the references.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import linear

import precast

DTYPE = torch.bfloat16
HIDDEN, HEADS = 2048, 16
NOPE, ROPE, V_DIM, RANK = 128, 64, 128, 512
SM_SCALE = 1 / math.sqrt(NOPE + ROPE)
THETA, EPS = 10000.0, 1e-6
PAGE, LONGEST = 64, 256
#: Rows are about 1, and up to 448 is a number of e4m3.
FP8_SCALE = 32.0
#: bf16 keeps 8 bits. e4m3 keeps 4, which change what is cached by 2.6 %, and so the weights of it.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 8e-2}
#: New tokens of each request by step: prompts in chunks, one after the other, decodes, drafts.
STEPS = ((40, 150, 0), (30, 65, 129), (1, 1, 1), (1, 1, 1), (4, 4, 4))
#: A request with this many new tokens attends to them in the compressed space, too.
FEW = 8


class Weights(NamedTuple):
    """Projections are ``[out_features, in_features]``."""

    q: torch.Tensor  # [heads * (nope + rope), hidden]
    kv_a: torch.Tensor  # [rank + rope, hidden]
    norm: torch.Tensor  # [rank]
    k_b: torch.Tensor  # [heads, nope, rank]
    v_b: torch.Tensor  # [heads, v_dim, rank]
    out: torch.Tensor  # [hidden, heads * v_dim]


def random_weights(generator: torch.Generator) -> Weights:
    def weight(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device=generator.device)
        return (x * shape[-1] ** -0.5).to(DTYPE)

    # Queries are larger, so that a few tokens have most of the weight, as in a trained model.
    return Weights(
        weight(HEADS * (NOPE + ROPE), HIDDEN) * 3,
        weight(RANK + ROPE, HIDDEN),
        1 + weight(1, RANK)[0],
        weight(HEADS, NOPE, RANK),
        weight(HEADS, V_DIM, RANK),
        weight(HIDDEN, HEADS * V_DIM),
    )


# -- the plain form -------------------------------------------------------------------------------


def plain(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """The layer's output for all tokens of one request, in fp32 from the formulas."""
    w = Weights(*(tensor.float() for tensor in weights))
    hidden = hidden.float()
    q_nope, q_pe = linear(hidden, w.q).view(-1, HEADS, NOPE + ROPE).split([NOPE, ROPE], -1)
    ckv, k_pe = linear(hidden, w.kv_a).split([RANK, ROPE], -1)
    ckv = ckv * torch.rsqrt(ckv.square().mean(-1, keepdim=True) + EPS) * w.norm
    k = torch.einsum("hdr,nr->nhd", w.k_b, ckv)
    v = torch.einsum("hdr,nr->nhd", w.v_b, ckv)
    scores = torch.einsum("nhd,mhd->hnm", q_nope, k)
    scores += torch.einsum("nhd,md->hnm", rotated(q_pe), rotated(k_pe[:, None])[:, 0])
    count = len(hidden)
    unseen = torch.ones(count, count, dtype=torch.bool, device=hidden.device).triu(1)
    weight = (scores * SM_SCALE).masked_fill(unseen, -math.inf).softmax(-1)
    return linear(torch.einsum("hnm,mhd->nhd", weight, v).flatten(1), w.out)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Row ``i`` of ``[tokens, heads, rope]`` at position ``i``; neighbours rotate together."""
    cos, sin = angles(len(x), x.device)
    a, b = x[..., ::2], x[..., 1::2]
    pairs = a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]
    return torch.stack(pairs, -1).flatten(-2)


def angles(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = THETA ** (-torch.arange(0, ROPE, 2, device=device) / ROPE)
    products = torch.arange(count, device=device)[:, None] * frequencies
    return products.cos(), products.sin()


# -- the layer ------------------------------------------------------------------------------------


class Step(NamedTuple):
    """New tokens of each request, one request after the other, and tokens cached before."""

    new: Sequence[int]
    old: Sequence[int]

    @property
    def lens(self) -> list[int]:
        return [n + m for n, m in zip(self.new, self.old)]


class Layer:
    """The layer, its cache and its wrappers; requests have pages of their own."""

    def __init__(self, weights: Weights, kv_dtype: torch.dtype, requests: int) -> None:
        self.weights, self.kv_dtype = weights, kv_dtype
        self.device = device = weights.q.device
        self.is_fp8 = kv_dtype.itemsize == 1
        pages = requests * LONGEST // PAGE
        # Pages of a request lie anywhere in the pool.
        self.table = torch.randperm(pages).view(requests, -1).int()
        self.cache = torch.zeros(pages, PAGE, RANK + ROPE, dtype=DTYPE, device=device).to(kv_dtype)
        self.cos_sin = torch.cat(angles(LONGEST, device), -1)
        workspaces = (torch.zeros(64 << 20, dtype=torch.uint8, device=device) for _ in range(2))
        self.mla = precast.mla.BatchMLAPagedAttentionWrapper(next(workspaces))
        self.ragged = precast.BatchPrefillWithRaggedKVCacheWrapper(next(workspaces), "NHD")

    def forward(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Append the new tokens to the cache, return their outputs ``[tokens, hidden]``."""
        w = self.weights
        q = linear(hidden, w.q).view(-1, HEADS, NOPE + ROPE)
        q_nope, q_pe = q.split([NOPE, ROPE], -1)  # views
        ckv, k_pe = linear(hidden, w.kv_a).split([RANK, ROPE], -1)
        ckv = precast.rmsnorm(ckv, w.norm, EPS)
        kv_indptr, kv_indices = self.pages(step.lens)
        lens, indptr = self.ints(step.lens), self.indptr(step.new)
        owners, positions = precast.get_batch_indices_positions(indptr, lens, len(hidden))
        raw_k_pe = k_pe.clone()
        precast.apply_rope_pos_ids_inplace(
            q_pe, k_pe[:, None], positions, interleave=True, rope_theta=THETA
        )

        halves = self.cache.split([RANK, ROPE], -1)  # views
        if self.is_fp8:
            # Rotates, scales, rounds and appends in one pass. It does the same with queries, of
            # which it gets one head here: MLA takes those in 16 bits.
            precast.rope_quantize_fp8_append_paged_kv_cache(
                *(q_pe[:, :1], raw_k_pe, None, ckv, None, self.cos_sin, positions),
                *(halves, kv_indices, kv_indptr, owners, positions),
                is_neox=False,
                quant_scale_kv=FP8_SCALE,
                page_size=PAGE,
            )
        else:
            last = self.ints([(n - 1) % PAGE + 1 if n else 0 for n in step.lens])
            precast.append_paged_mla_kv_cache(
                ckv, k_pe, owners, positions, *halves, kv_indices, kv_indptr, last
            )

        if max(step.new) <= FEW:
            out, _ = self.over_cache(q_nope, q_pe, step, step.lens, causal=True)
        else:
            out, lse = self.over_new(q_nope, q_pe, ckv, k_pe, step)
            if any(step.old):  # What is cached is before all new tokens.
                state = self.over_cache(q_nope, q_pe, step, step.old, causal=False)
                out, _ = precast.merge_state(out, lse, *state)
        return linear(out.flatten(1), w.out)

    def over_new(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        step: Step,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of new tokens to each other, with the keys and values of each head."""
        k_nope = torch.einsum("hdr,nr->nhd", self.weights.k_b, ckv)
        v = torch.einsum("hdr,nr->nhd", self.weights.v_b, ckv)
        k = k_nope.new_empty(len(ckv), HEADS, NOPE + ROPE)
        k[..., :NOPE], k[..., NOPE:] = k_nope, k_pe[:, None]
        q = torch.cat([q_nope, q_pe], -1)
        indptr = self.indptr(step.new)
        sizes = HEADS, HEADS, NOPE + ROPE, V_DIM
        self.ragged.plan(indptr, indptr, *sizes, causal=True, sm_scale=SM_SCALE, q_data_type=DTYPE)
        out, lse = self.ragged.run(q, k, v.contiguous(), return_lse=True)
        return out, lse

    def over_cache(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, step: Step, lens: list[int], causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to the first ``lens`` tokens of the cache, computed in its columns."""
        absorbed = torch.einsum("hdr,nhd->nhr", self.weights.k_b, q_nope).contiguous()
        kv_indptr, kv_indices = self.pages(lens)
        # A model with many layers plans once for all of them.
        self.mla.plan(
            *(self.indptr(step.new), kv_indptr, kv_indices, self.ints(lens)),
            *(HEADS, RANK, ROPE, PAGE, causal, SM_SCALE, DTYPE, self.kv_dtype),
        )
        scales = dict.fromkeys(("ckv_scale", "kpe_scale"), 1 / FP8_SCALE) if self.is_fp8 else {}
        out, lse = self.mla.run(
            absorbed, q_pe, *self.cache.split([RANK, ROPE], -1), return_lse=True, **scales
        )
        return torch.einsum("hdr,nhr->nhd", self.weights.v_b, out).contiguous(), lse

    def pages(self, lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        counts = [-(-n // PAGE) for n in lens]
        chosen = [row[:count] for row, count in zip(self.table, counts)]
        return self.indptr(counts), torch.cat(chosen).to(self.device)

    def indptr(self, counts: Sequence[int]) -> torch.Tensor:
        return self.ints([sum(counts[:i]) for i in range(len(counts) + 1)])

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


# -- the comparison -------------------------------------------------------------------------------


def errors(kv_dtype: torch.dtype, device: torch.device, seed: int) -> Iterator[tuple[Step, float]]:
    """Each step, and how far its outputs are from those of the plain form."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = random_weights(generator)
    totals = [sum(counts) for counts in zip(*STEPS)]
    hidden = [torch.randn(n, HIDDEN, generator=generator, device=device).to(DTYPE) for n in totals]
    exact = [plain(weights, rows) for rows in hidden]
    layer, old = Layer(weights, kv_dtype, len(totals)), [0] * len(totals)
    for new in STEPS:
        step = Step(new, old)
        parts = [slice(m, n) for m, n in zip(old, step.lens)]
        given = torch.cat([rows[part] for rows, part in zip(hidden, parts)])
        want = torch.cat([rows[part] for rows, part in zip(exact, parts)])
        got = layer.forward(given, step).float()
        yield step, float((got - want).norm() / want.norm())
        old = step.lens


def run(device: torch.device, seed: int) -> bool:
    fine = True
    for kv_dtype, limit in TOLERANCES.items():
        print(f"cache of {kv_dtype}, {HEADS} heads, {RANK} + {ROPE} columns, on {device}")
        for step, error in errors(kv_dtype, device, seed):
            verdict = "ok" if error <= limit else "TOO LARGE"
            counts = f"{' + '.join(map(str, step.new))} new after {step.old}"
            print(f"  {counts:36} error {error:.1e} (limit {limit:.0e}): {verdict}")
            fine &= error <= limit
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        print(torch.cuda.get_device_name(device))
        fine = run(device, args.seed)
    else:
        print("no GPU: reference mode")
        with precast.reference_mode():
            fine = run(torch.device("cpu"), args.seed)
    print("every output is that of the plain form in fp32" if fine else "outputs differ")
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
