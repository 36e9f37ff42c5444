# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged cache in NVFP4: the numbers of the reference, whatever lies around them.

Pages that no request has, and entries behind the last token of one, have codes of 6 and scales that
are NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast
from precast.quantization import nvfp4_kv_dequantize_reference
from precast.testing import assert_close
from precast.testing.tolerances import tolerance_of_attention

F16, BF16, U8, I32 = torch.float16, torch.bfloat16, torch.uint8, torch.int32
E4M3 = torch.float8_e4m3fn
WORKSPACE = 64 << 20
K_SCALE, V_SCALE = 0.0021, 0.0017
MOST = 6 * 240 * V_SCALE  # the largest value: tolerances are relative to it
dtypes = pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])
layouts = pytest.mark.parametrize("layout", ["NHD", "HND"])
dims = pytest.mark.parametrize("dim", [64, 128, 256])
FORMS = ("pair", "packed", "one buffer", "layers", "odd scales")


@pytest.fixture
def workspace() -> torch.Tensor:
    """May hold anything."""
    return torch.full((WORKSPACE,), 0xFF, dtype=U8, device="cuda")


class Batch:
    """Requests over a cache in NVFP4, and the same numbers in float16."""

    def __init__(
        self,
        generator: torch.Generator,
        kv_lens: list[int],
        q_lens: list[int] | None = None,
        *,
        dim: int = 128,
        heads: tuple[int, int] = (8, 2),
        page: int = 16,
        layout: str = "NHD",
        form: str = "pair",
        dtype: torch.dtype = BF16,
    ) -> None:
        self.layout, self.dtype, self.sizes = layout, dtype, (*heads, dim, page)
        q_lens = q_lens or [1] * len(kv_lens)
        counts = torch.tensor([-(-n // page) for n in kv_lens])
        pages = int(counts.sum()) + 5
        order = torch.randperm(pages, device="cuda", generator=generator)
        self.indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to("cuda", I32)
        self.indices = order[: pages - 5].to(I32)
        last = [(n - 1) % page + 1 if n else 0 for n in kv_lens]
        self.last = torch.tensor(last, dtype=I32, device="cuda")
        rows = torch.tensor(q_lens).cumsum(0)
        self.qo_indptr = torch.nn.functional.pad(rows, (1, 0)).to("cuda", I32)
        shape = (int(rows[-1]), heads[0], dim)
        self.q = torch.randn(shape, device="cuda", generator=generator).to(dtype)
        exists = torch.zeros(pages, page, dtype=torch.bool, device="cuda")
        bounds = self.indptr.tolist()
        for i, tokens in enumerate(kv_lens):
            flat = exists.new_zeros((bounds[i + 1] - bounds[i]) * page)
            flat[:tokens] = True
            exists[self.indices[bounds[i] : bounds[i + 1]].long()] = flat.view(-1, page)
        parts = [self._made(generator, pages, exists) for _ in range(2)]
        (k, k_sf, k16), (v, v_sf, v16) = parts
        self.values = (k16, v16)
        self.cache, self.factors = _in_form(form, (k, v), (k_sf, v_sf))

    def _made(
        self, generator: torch.Generator, pages: int, exists: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        _, kv_heads, dim, page = self.sizes
        shape = (pages, page, kv_heads, dim)

        def bytes_of(per_byte: int, most: int) -> torch.Tensor:
            size = (*shape[:-1], dim // per_byte)
            return torch.randint(most, size, device="cuda", generator=generator).to(U8)

        codes = bytes_of(2, 256)
        # Scales from 0.25 to 240, so that numbers by the global scale are about 1.
        factors = bytes_of(16, 0x78 - 0x28) + 0x28
        codes[~exists], factors[~exists] = 0xFF, 0x7F
        one = torch.ones(1, device="cuda")
        values = nvfp4_kv_dequantize_reference(codes, factors, one, F16)
        values[~exists] = 0
        if self.layout == "HND":
            codes, factors, values = (
                t.transpose(1, 2).contiguous() for t in (codes, factors, values)
            )
        return codes, factors.view(E4M3), values

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr, self.indices, self.last

    def decode(self, workspace: torch.Tensor, kv: torch.dtype = U8, **options: Any) -> Any:
        wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(
            workspace, self.layout, use_tensor_cores=True
        )
        each = self.q.shape[0] // self.last.numel()
        wrapper.plan(
            *self.table,
            *self.sizes,
            q_len_per_req=each,
            q_data_type=self.dtype,
            kv_data_type=kv,
            **options,
        )
        return wrapper

    def paged(self, workspace: torch.Tensor, kv: torch.dtype = U8, **options: Any) -> Any:
        wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace, self.layout)
        wrapper.plan(
            self.qo_indptr,
            *self.table,
            *self.sizes,
            q_data_type=self.dtype,
            kv_data_type=kv,
            **options,
        )
        return wrapper

    def run(self, wrapper: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scales = {"k_scale": K_SCALE, "v_scale": V_SCALE}
        out, lse = wrapper.run(
            self.q,
            self.cache,
            kv_cache_sf=self.factors,
            return_lse=True,
            **{**scales, **options},
        )
        return out, lse

    def check(self, wrapper: Any, run: dict[str, Any] | None = None, **options: Any) -> None:
        """Against the reference in float32 over the numbers in float16."""
        run = run or {}
        got = self.run(wrapper, **run)
        rows = () if "Decode" in type(wrapper).__name__ else (self.qo_indptr,)
        if not rows:
            options["q_len_per_req"] = self.q.shape[0] // self.last.numel()
        want = type(wrapper).reference(
            self.q,
            self.values,
            *rows,
            *self.table,
            kv_layout=self.layout,
            k_scale=K_SCALE,
            v_scale=V_SCALE,
            o_dtype=torch.float32,
            **run,
            **options,
        )
        rtol = tolerance_of_attention(self.dtype).rtol
        assert_close(got[0].float(), want[0].float(), rtol=rtol, atol=rtol * MOST)
        assert_close(got[1], want[1], rtol=rtol, atol=rtol)
        assert got[0].isfinite().all()


def _in_form(form: str, codes: Any, factors: Any) -> tuple[Any, Any]:
    """Put both into memory as engines have them."""
    if form == "packed":
        return torch.stack(codes, 1), torch.stack([f.view(U8) for f in factors], 1).view(E4M3)
    if form == "one buffer":  # Codes and scales of an entry in one row, padded to 16 bytes.
        made = []
        for c, f in zip(codes, factors):
            size, blocks = c.shape[-1], f.shape[-1]
            row = c.new_full((*c.shape[:-1], -(-(size + blocks) // 16) * 16), 0xFF)
            row[..., :size], row[..., size : size + blocks] = c, f.view(U8)
            made.append((row[..., :size], row[..., size : size + blocks].view(E4M3)))
        return tuple(m[0] for m in made), tuple(m[1] for m in made)
    if form == "layers":  # Pages of a larger buffer, with other layers' between.
        stacked = torch.stack([codes[0], codes[1].flip(0), codes[1]], 1)
        more = torch.stack([f.view(U8) for f in (factors[1], factors[0], factors[1])], 1)
        return (stacked[:, 0], stacked[:, 2]), (more[:, 1].view(E4M3), more[:, 2])
    if form == "odd scales":  # At odd addresses, with odd strides.
        odd = [torch.cat([f.view(U8), f.view(U8)[..., :3]], -1) for f in factors]
        shifted = [torch.cat([o[..., -1:], o], -1)[..., 1:-3] for o in odd]
        return codes, tuple(s.view(E4M3) for s in shifted)
    return codes, factors


# -- numbers --------------------------------------------------------------------------------------


@dims
@layouts
@dtypes
@pytest.mark.parametrize("form", FORMS)
def test_decode(
    form: str,
    dtype: torch.dtype,
    layout: str,
    dim: int,
    workspace: torch.Tensor,
    generator: torch.Generator,
) -> None:
    lens = [1, 900, 33, 0, 257, 16, 15]
    batch = Batch(generator, lens, dim=dim, layout=layout, form=form, dtype=dtype)
    batch.check(batch.decode(workspace))


@pytest.mark.parametrize("page", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (32, 8), (64, 4), (48, 1)])
def test_pages_and_heads(
    heads: tuple[int, int], page: int, workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch(generator, [5, 129, 1000], heads=heads, page=page)
    batch.check(batch.decode(workspace))
    batch.check(batch.paged(workspace))


@pytest.mark.parametrize("lens", [[20000], [1] * 200, [4000, 1, 1, 2000], [0, 0]])
def test_decode_by_splits(
    lens: list[int], workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch(generator, lens, heads=(16, 2))
    batch.check(batch.decode(workspace))
    batch.check(batch.decode(workspace, fixed_split_size=4))
    batch.check(batch.decode(workspace, disable_split_kv=True))


@dims
@layouts
@dtypes
@pytest.mark.parametrize("causal", [False, True])
def test_prefill(
    causal: bool,
    dtype: torch.dtype,
    layout: str,
    dim: int,
    workspace: torch.Tensor,
    generator: torch.Generator,
) -> None:
    """Short, of tiles of 64 rows, and long, of 128."""
    for q_lens, kv_lens in (
        ([3, 0, 17], [40, 7, 300]),
        ([70, 1, 129], [70, 400, 260]),
        ([1500, 700], [1500, 1900]),
    ):
        batch = Batch(generator, kv_lens, q_lens, dim=dim, heads=(8, 4), layout=layout, dtype=dtype)
        batch.check(batch.paged(workspace, causal=causal), causal=causal)


@dims
@pytest.mark.parametrize(
    "options",
    [
        {"window_left": 37},
        {"logits_soft_cap": 15.0},
        {"pos_encoding_mode": "ROPE_LLAMA"},
        {"pos_encoding_mode": "ALIBI"},
        {"sm_scale": 0.3},
        {"custom": True},
    ],
    ids=str,
)
def test_options_of_scores(
    options: dict[str, Any], dim: int, workspace: torch.Tensor, generator: torch.Generator
) -> None:
    """The general kernels too, of all tiles."""
    options = dict(options)
    custom = options.pop("custom", False)
    for q_lens, kv_lens in (([1, 1, 1], [5, 300, 64]), ([40, 1, 300], [64, 300, 333])):
        batch = Batch(generator, kv_lens, q_lens, dim=dim, heads=(4, 2))
        given = {**options, "causal": not custom}
        if custom:
            pairs = sum(q * kv for q, kv in zip(q_lens, kv_lens))
            given["custom_mask"] = torch.rand(pairs, device="cuda", generator=generator) < 0.7
        batch.check(batch.paged(workspace, **given), **given)
        if not custom and len(set(q_lens)) == 1:
            batch.check(batch.decode(workspace, **options), **options)


def test_sinks_and_scales_on_the_gpu(workspace: torch.Tensor, generator: torch.Generator) -> None:
    batch = Batch(generator, [900, 3, 70])
    sinks = torch.randn(8, device="cuda", generator=generator)
    wrapper = batch.decode(workspace)
    batch.check(wrapper, {"sinks": sinks})
    want = batch.run(wrapper)
    scales = [torch.tensor([s], device="cuda") for s in (K_SCALE, V_SCALE)]
    got = batch.run(wrapper, k_scale=scales[0], v_scale=scales[1])
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine.float(), theirs.float(), rtol=2e-2, atol=2e-2)


def test_draft_tokens(workspace: torch.Tensor, generator: torch.Generator) -> None:
    batch = Batch(generator, [900, 30, 64], [4, 4, 4])
    batch.check(batch.decode(workspace))


@dims
def test_a_cache_of_16_bits_gives_the_same(
    dim: int, workspace: torch.Tensor, generator: torch.Generator
) -> None:
    """Keys and values are exact in float16, so only sums in another order may differ."""
    batch = Batch(generator, [700, 33, 2000], dim=dim, dtype=F16)
    mine = batch.run(batch.decode(workspace))
    other = batch.decode(workspace, kv=F16)
    want = other.run(batch.q, batch.values, k_scale=K_SCALE, v_scale=V_SCALE, return_lse=True)
    for left, right in zip(mine, want, strict=True):
        assert_close(left.float(), right.float(), rtol=2e-3, atol=2e-3)


def test_queries_that_f16_cannot_hold(workspace: torch.Tensor, generator: torch.Generator) -> None:
    """A bf16 beyond the largest f16 becomes that, and the result stays finite."""
    batch = Batch(generator, [100, 40])
    batch.q[0, 0, 0] = 1e6
    out, _ = batch.run(batch.decode(workspace), k_scale=1e-6)
    assert out.isfinite().all()


def test_a_nan_scale_of_a_token_is_its_requests_alone(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch(generator, [100, 40])
    before, _ = batch.run(batch.decode(workspace))
    batch.factors[1].view(U8)[batch.indices[0].long(), 3] = 0x7F
    after, _ = batch.run(batch.decode(workspace))
    assert after[0].isnan().all()
    assert torch.equal(after[1], before[1])


def test_what_was_appended_is_read(workspace: torch.Tensor, generator: torch.Generator) -> None:
    """Quantise and append by slots, then attend, as an engine does."""
    rows = torch.randn(2, 61, 2, 128, device="cuda", generator=generator).to(BF16)
    g = rows.float().abs().amax() / (448 * 6)
    cache = torch.full((6, 2, 16, 2, 64), 0xFF, dtype=U8, device="cuda")
    factors = torch.full((6, 2, 16, 2, 8), 0x7F, dtype=U8, device="cuda")
    pages = torch.tensor([4, 0, 5, 2], device="cuda")
    at = torch.arange(61, device="cuda")
    append = precast.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
    append(*rows, pages[at // 16] * 16 + at % 16, cache, factors, g, g)
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace)
    table = [torch.tensor(t, dtype=I32, device="cuda") for t in ([0, 4], pages.tolist(), [13])]
    wrapper.plan(*table, 8, 2, 128, 16, q_data_type=BF16, kv_data_type=U8)
    q = torch.randn(1, 8, 128, device="cuda", generator=generator).to(BF16)
    out = wrapper.run(q, cache, k_scale=g, v_scale=g, kv_cache_sf=factors)
    dense = torch.nn.functional.scaled_dot_product_attention(
        q.float().transpose(0, 1)[None],
        rows[0].float().repeat_interleave(4, 1).transpose(0, 1)[None],
        rows[1].float().repeat_interleave(4, 1).transpose(0, 1)[None],
    )[0].transpose(0, 1)
    # Of the quantisation, not of the kernel: a step of e2m1 is a sixth of a block's maximum.
    assert (out.float() - dense).abs().mean() < 0.05


# -- what engines do ------------------------------------------------------------------------------


def test_a_graph_follows_its_cache(workspace: torch.Tensor, generator: torch.Generator) -> None:
    batch = Batch(generator, [300, 5, 64])
    wrapper = batch.decode(workspace)
    batch.run(wrapper)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = batch.run(wrapper)
    for _ in range(3):
        batch.q.copy_(torch.randn(batch.q.shape, device="cuda", generator=generator))
        for part in batch.cache:
            part.copy_(part.flip(-1))
        out.fill_(float("nan"))
        graph.replay()
        got = out.clone()
        assert torch.equal(got, batch.run(wrapper)[0])


def test_torch_compile(workspace: torch.Tensor, generator: torch.Generator) -> None:
    batch = Batch(generator, [300, 5, 64])
    wrapper = batch.decode(workspace)

    def model(q: Any, k: Any, v: Any, k_sf: Any, v_sf: Any) -> Any:
        out = wrapper.run(q * 2, (k, v), k_scale=K_SCALE, kv_cache_sf=(k_sf, v_sf))
        return out + 1

    torch._dynamo.reset()
    arguments = batch.q, *batch.cache, *batch.factors
    assert torch.equal(torch.compile(model, fullgraph=True)(*arguments), model(*arguments))


def test_no_synchronisation(workspace: torch.Tensor, generator: torch.Generator) -> None:
    batch = Batch(generator, [300, 5, 64])
    wrapper = batch.decode(workspace)
    out = torch.empty_like(batch.q)
    call = {"k_scale": K_SCALE, "v_scale": V_SCALE, "kv_cache_sf": batch.factors, "out": out}
    wrapper.run(batch.q, batch.cache, **call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            wrapper.run(batch.q, batch.cache, **call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_errors_name_their_tensor_and_write_nothing(
    workspace: torch.Tensor, generator: torch.Generator
) -> None:
    batch = Batch(generator, [300, 5, 64])
    wrapper = batch.decode(workspace)
    (k, v), (k_sf, v_sf) = batch.cache, batch.factors
    out = torch.full_like(batch.q, 7.0)
    bad: list[tuple[str, Any, Any]] = [
        ("kv_cache_sf must be given", (k, v), None),
        ("kv_cache_sf must be a torch.Tensor or a tuple", (k, v), [k_sf, v_sf]),
        (r"kv_cache_sf\[1\] must have shape", (k, v), (k_sf, v_sf[..., :-1])),
        (r"kv_cache_sf\[0\] must be on cuda:0", (k, v), (k_sf.cpu(), v_sf)),
        (r"kv_cache_sf\[1\] must be float8_e4m3fn or uint8", (k, v), (k_sf, v_sf.float())),
        (r"paged_kv_cache\[1\] must have shape", (k, v[:-1]), (k_sf, v_sf)),
        ("does not match the kv_data_type", (k.view(E4M3), v), (k_sf, v_sf)),
        (r"a multiple of 16 bytes", (_misaligned(k), v), (k_sf, v_sf)),
    ]
    for words, cache, factors in bad:
        with pytest.raises(ValueError, match=words):
            wrapper.run(batch.q, cache, out=out, kv_cache_sf=factors)
    assert (out == 7).all()
    wrapper.run(batch.q, (k, v), out=out, kv_cache_sf=(k_sf, v_sf))
    assert not (out == 7).all()


def _misaligned(cache: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(cache.numel() + 8, dtype=cache.dtype, device=cache.device)
    moved = flat[8:].view(cache.shape)
    moved.copy_(cache)
    return moved


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(workspace: torch.Tensor, generator: torch.Generator) -> None:
    batch = Batch(generator, [300, 5, 64])
    want, _ = batch.run(batch.decode(workspace))
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace.to("cuda:1"))
    table = (t.to("cuda:1") for t in batch.table)
    wrapper.plan(*table, *batch.sizes, q_data_type=BF16, kv_data_type=U8)
    cache, factors = (tuple(t.to("cuda:1") for t in x) for x in (batch.cache, batch.factors))
    got = wrapper.run(
        batch.q.to("cuda:1"), cache, k_scale=K_SCALE, v_scale=V_SCALE, kv_cache_sf=factors
    )
    assert torch.cuda.current_device() == 0
    assert_close(got.to("cuda:0").float(), want.float(), rtol=1e-2, atol=1e-2)
