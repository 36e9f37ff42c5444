# SPDX-License-Identifier: Apache-2.0
"""What engines do with the paged KV cache: graphs, torch.compile, devices, huge caches, errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from page_cases import (
    LAYOUTS,
    as_bits,
    keys_and_values,
    kv_cache,
    mla_cache,
    random_bits,
    tokens_for,
)

import precast
from precast._plan.installed import plan
from precast._runtime.library import load_library
from precast._runtime.loader import loader
from precast.jit import JitSpec

BF16 = torch.bfloat16
needs_40_gb = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 40 << 30,
    reason="needs 40 GiB of free GPU memory",
)


def test_a_captured_step_follows_its_indices(generator: torch.Generator) -> None:
    """Positions, then both appends, as an engine captures them: replays see new indices."""
    count, pages, size = 96, 31, 16
    cache = kv_cache("packed", "NHD", (pages, size, 8, 128), BF16, generator)
    rows = keys_and_values(count, 8, 128, BF16, generator, "contiguous")
    fixed = tokens_for(count, pages, size, generator)

    def step() -> None:
        precast.append_paged_kv_cache(*rows, *fixed.places, cache.argument, *fixed.table)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        tokens = tokens_for(count, pages, size, generator)
        for name, tensor in tokens.named().items():
            getattr(fixed, name).copy_(tensor)
        for row in rows:
            as_bits(row).random_(generator=generator)
        before = cache.before()
        graph.replay()
        kept = [row[tokens.kept] for row in rows]
        cache.check(before, kept, tokens.page, tokens.entry, "replay")


@pytest.mark.parametrize("enable_pdl", [True, False])
def test_kernels_that_depend_on_each_other(enable_pdl: bool, generator: torch.Generator) -> None:
    """Launched early by PDL, an append must still see what the kernel before it wrote."""
    batch, size, steps, heads, dim = 64, 16, 24, 8, 128
    device = generator.device
    cache = torch.zeros(batch * 2, 2, size, heads, dim, dtype=BF16, device=device)
    rows = torch.randn(steps, batch, heads, dim, device=device, generator=generator).to(BF16)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=device)
    kv_indptr, kv_indices = 2 * indptr, torch.arange(2 * batch, dtype=torch.int32, device=device)
    last = torch.full((batch,), 1, dtype=torch.int32, device=device)
    lens = torch.zeros(batch, dtype=torch.int32, device=device)
    out = [torch.empty(batch, dtype=torch.int32, device=device) for _ in range(2)]

    def run() -> None:
        for step in range(steps):
            lens.add_(1)
            precast.get_batch_indices_positions(indptr, lens, batch, *out, enable_pdl)
            precast.append_paged_kv_cache(
                rows[step],
                rows[step],
                *out,
                cache,
                kv_indices,
                kv_indptr,
                last,
                enable_pdl=enable_pdl,
            )

    run()
    lens.zero_()
    cache.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        cache.zero_()
        lens.zero_()
        graph.replay()
        flat = cache.view(batch, 2, 2, size, heads, dim).transpose(1, 2).reshape(batch, 2, -1)
        want = rows.transpose(0, 1).reshape(batch, -1)
        for half in range(2):
            assert torch.equal(flat[:, half, : want.shape[1]], want)
        assert not flat[..., want.shape[1] :].any()


def test_a_scale_on_the_gpu_is_read_when_the_graph_runs(generator: torch.Generator) -> None:
    rows = torch.randn(8, 4, 64, device=generator.device, generator=generator).to(BF16)
    cache = torch.zeros(2, 2, 16, 4, 64, device=generator.device).to(torch.float8_e4m3fn)
    slots = torch.arange(8, device=generator.device)
    scale = torch.ones(1, device=generator.device)
    op = precast.fp8_quantize_append_paged_kv_cache_with_slot_mapping
    op(rows, rows, slots, cache, scale, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(rows, rows, slots, cache, scale, scale)
    for value in (0.5, 0.03):
        scale.fill_(value)
        graph.replay()
        want = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(cache[0, 1, :8].float(), want.float())


@pytest.mark.parametrize("form", ["pair", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_compile(layout: str, form: str, generator: torch.Generator) -> None:
    cache = kv_cache(form, layout, (31, 16, 8, 128), BF16, generator)
    halves = cache.argument if form == "pair" else (cache.argument,)

    def block(key: Any, value: Any, places: Any, table: Any, slots: Any, *halves: Any) -> Any:
        argument = halves if len(halves) == 2 else halves[0]
        precast.append_paged_kv_cache(key, value, *places, argument, *table, kv_layout=layout)
        precast.append_paged_kv_cache_with_slot_mapping(key, value, slots, argument, layout)
        return key + 1

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    for count in (40, 41):
        tokens = tokens_for(count, 31, 16, generator)
        rows = keys_and_values(count, 8, 128, BF16, generator, "contiguous")
        before = cache.before()
        compiled(*rows, tokens.places, tokens.table, tokens.slots, *halves)
        kept = [row[tokens.kept] for row in rows]
        cache.check(before, kept, tokens.page, tokens.entry, "compiled")


def test_torch_compile_of_the_others(generator: torch.Generator) -> None:
    device = generator.device
    caches = mla_cache(True, (9, 16), (512, 64), torch.float8_e4m3fn, generator)

    def block(indptr: Any, lens: Any, ckv: Any, kpe: Any, slots: Any, scale: Any, k: Any) -> Any:
        batch, positions = precast.get_batch_indices_positions(indptr, lens, ckv.shape[0])
        precast.fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping(
            ckv, kpe, slots, *caches.argument, scale
        )
        precast.concat_mla_k(k, ckv[:, None, :128].expand(-1, 4, -1), kpe[:, None])
        return batch, positions, k + 0

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for count in (12, 20):
        indptr = torch.tensor([0, 5, count], dtype=torch.int32, device=device)
        lens = torch.tensor([7, 40], dtype=torch.int32, device=device)
        rows = [
            torch.randn(count, d, device=device, generator=generator).to(BF16) for d in (512, 64)
        ]
        tokens = tokens_for(count, 9, 16, generator)
        scale = torch.tensor([0.5], device=device)
        k = torch.empty(count, 4, 192, dtype=BF16, device=device)
        before = caches.before()
        batch, positions, k = compiled(indptr, lens, *rows, tokens.slots, scale, k)
        assert batch.tolist() == [0] * 5 + [1] * (count - 5)
        assert positions.tolist() == [*range(2, 7), *range(40 - (count - 5), 40)]
        want = [(r.float() * 2).clamp(-448, 448).to(torch.float8_e4m3fn) for r in rows]
        where = tokens.page, tokens.entry
        caches.check(before, [w[tokens.kept] for w in want], *where, "compiled")
        assert torch.equal(k[:, 3], torch.cat([rows[0][:, :128], rows[1]], -1))


def every_call(generator: torch.Generator) -> dict[str, Callable[[], object]]:
    """One call of each op with all its outputs given."""
    cache = kv_cache("packed", "NHD", (31, 16, 8, 128), BF16, generator)
    tokens = tokens_for(64, 31, 16, generator)
    rows = keys_and_values(64, 8, 128, BF16, generator, "contiguous")
    mla = mla_cache(True, (31, 16), (512, 64), BF16, generator)
    entries = [random_bits(64, d, dtype=BF16, generator=generator) for d in (512, 64)]
    small = cache.argument.to(torch.float8_e4m3fn)
    scale = torch.ones(1, device=generator.device)
    k = random_bits(64, 128, 192, dtype=BF16, generator=generator)
    parts = k[..., :128].clone(), k[:, :1, 128:].clone()
    out = [torch.empty(64, dtype=torch.int32, device=generator.device) for _ in range(2)]
    indptr = torch.tensor([0, 64], dtype=torch.int32, device=generator.device)
    fp8 = precast.fp8_quantize_append_paged_kv_cache_with_slot_mapping
    slots = tokens.slots
    return {
        "table": lambda: precast.append_paged_kv_cache(
            *rows, *tokens.places, cache.argument, *tokens.table
        ),
        "slots": lambda: precast.append_paged_kv_cache_with_slot_mapping(
            *rows, slots, cache.argument
        ),
        "mla": lambda: precast.append_paged_mla_kv_cache(
            *entries, *tokens.places, *mla.argument, *tokens.table
        ),
        "mla slots": lambda: precast.append_paged_mla_kv_cache_with_slot_mapping(
            *entries, slots, *mla.argument
        ),
        "fp8": lambda: fp8(*rows, slots, small, scale, scale),
        "concat": lambda: precast.concat_mla_k(k, *parts),
        "positions": lambda: precast.get_batch_indices_positions(indptr, indptr[1:], 64, *out),
    }


def test_no_synchronisation_and_no_allocation(generator: torch.Generator) -> None:
    for name, call in every_call(generator).items():
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(5):
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, name


def test_first_call_after_preload_is_captured() -> None:
    """No warm-up in the process: preload alone must make the modules ready for capture."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, precast
from test_gpu_page_frameworks import every_call
precast.preload(["page", "page_fp8", "concat_ops"])
precast.freeze()
calls = every_call(torch.Generator("cuda").manual_seed(1))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for call in calls.values():
        call()
graph.replay()
torch.cuda.synchronize()
print("captured", len(calls))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip() == "captured 7", done.stdout + done.stderr


@pytest.mark.jit
@pytest.mark.parametrize(
    ("op", "axes"),
    [
        ("page", {}),
        ("concat_ops", {}),
        ("page_fp8", {"dtype": "bf16", "dtype_kv": "e4m3"}),
        ("page_nvfp4", {"dtype": "bf16"}),
    ],
)
def test_jit_equals_prebuilt(
    op: str, axes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same machine code: what is not computed differently cannot come out differently."""
    from precast._runtime import elf

    device = torch.cuda.current_device()
    loader.load(op, axes, device)
    resolution = loader.resolution(op, axes, device)
    if any(step.accepted and step.source.startswith("JIT") for step in resolution.steps):
        pytest.skip(f"no prebuilt {resolution.module} is installed")
    monkeypatch.setenv("PRECAST_CACHE_DIR", str(tmp_path))
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    spec = JitSpec.of(plan().spec(op, axes, capability, resolution.cuda_major))
    path = spec.build("a test compares it with the prebuilt module")
    assert path.is_relative_to(tmp_path)
    assert path != resolution.path
    load_library(path, spec.cuda_major)
    assert resolution.path is not None
    mine, theirs = (sorted(elf.read_resources(p)) for p in (path, resolution.path))
    assert mine == theirs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(generator: torch.Generator) -> None:
    other = torch.Generator("cuda:1").manual_seed(generator.initial_seed())
    for one in (other, generator):
        cache = kv_cache("packed", "NHD", (31, 16, 8, 128), BF16, one)
        tokens = tokens_for(100, 31, 16, one)
        rows = keys_and_values(100, 8, 128, BF16, one, "contiguous")
        before = cache.before()
        precast.append_paged_kv_cache(*rows, *tokens.places, cache.argument, *tokens.table)
        kept = [row[tokens.kept] for row in rows]
        cache.check(before, kept, tokens.page, tokens.entry, str(one.device))
        assert torch.cuda.current_device() == 0, "the call changed the current device"
        for call in every_call(one).values():
            call()
    with pytest.raises(ValueError, match="slot_mapping must be on cuda:0"):
        precast.append_paged_kv_cache_with_slot_mapping(
            *rows, tokens.slots.to("cuda:1"), cache.argument
        )


def far_places(pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of 16 entries and more, and entries, on both sides of powers of two and at the ends."""
    page = torch.tensor([0, 1, 32767, 32768, 65535, 65536, pages - 1], device="cuda")
    return page, torch.tensor([0, 15, 7, 8, 3, 0, 15], device="cuda")


def table_of(page: torch.Tensor, entry: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Batch indices, positions, and a page table of requests with one page each."""
    requests = torch.arange(page.numel() + 1, device=page.device)
    return requests[:-1], entry, page, requests, entry + 1


@needs_40_gb
@pytest.mark.parametrize("way", ["slots", "table", "fp8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_of_more_than_2_to_31_elements(
    layout: str, way: str, generator: torch.Generator, free_memory: None
) -> None:
    pages, size, heads, dim = 70_000, 16, 8, 128
    inner = (heads, size) if layout == "HND" else (size, heads)
    dtype = torch.float8_e4m3fn if way == "fp8" else BF16
    shape = (pages, 2, *inner, dim * dtype.itemsize)
    cache = torch.zeros(shape, dtype=torch.uint8, device="cuda").view(dtype)
    assert cache.numel() > 2**31
    page, entry = far_places(pages)
    rows = [torch.randn(7, heads, dim, device="cuda", generator=generator).to(BF16) for _ in "kv"]
    slots = page * size + entry
    want = [row.to(dtype) for row in rows]
    if way == "slots":
        precast.append_paged_kv_cache_with_slot_mapping(*rows, slots, cache, layout)
    elif way == "table":
        batch, positions, *table = table_of(page, entry)
        precast.append_paged_kv_cache(*rows, batch, positions, cache, *table, kv_layout=layout)
    else:
        op = precast.fp8_quantize_append_paged_kv_cache_with_slot_mapping
        op(*rows, slots, cache, 1.0, 1.0, layout)
    for half, row in zip(cache.unbind(1), want, strict=True):
        entries = half.transpose(1, 2) if layout == "HND" else half
        assert torch.equal(as_bits(entries)[page, entry], as_bits(row))
        as_bits(entries)[page, entry] = 0
    assert int(as_bits(cache.view(-1)).count_nonzero()) == 0


@needs_40_gb
@pytest.mark.parametrize("way", ["slots", "table", "fp8"])
def test_mla_caches_of_more_than_2_to_31_elements(
    way: str, generator: torch.Generator, free_memory: None
) -> None:
    pages, size, dims = 70_000, 64, (512, 64)
    dtype = torch.float8_e4m3fn if way == "fp8" else BF16
    shape = (pages, size, sum(dims) * dtype.itemsize)
    whole = torch.zeros(shape, dtype=torch.uint8, device="cuda").view(dtype)
    caches = whole.split(dims, -1)
    assert whole.numel() > 2**31
    page, entry = far_places(pages)
    rows = [torch.randn(7, dim, device="cuda", generator=generator).to(BF16) for dim in dims]
    slots = page * size + entry
    if way == "slots":
        precast.append_paged_mla_kv_cache_with_slot_mapping(*rows, slots, *caches)
    elif way == "table":
        batch, positions, *table = table_of(page, entry)
        precast.append_paged_mla_kv_cache(*rows, batch, positions, *caches, *table)
    else:
        op = precast.fp8_quantize_append_paged_mla_kv_cache_with_slot_mapping
        op(*rows, slots, *caches, 1.0)
    bits, want = as_bits(whole), torch.cat(rows, -1).to(dtype)
    assert torch.equal(bits[page, entry], as_bits(want))
    bits[page, entry] = 0
    assert int(bits.view(-1).count_nonzero()) == 0


@needs_40_gb
def test_rows_and_keys_of_more_than_2_to_31_elements(
    generator: torch.Generator, free_memory: None
) -> None:
    tokens, heads = 100_000, 128
    k = torch.empty(tokens, heads, 192, dtype=BF16, device="cuda")
    assert k.numel() > 2**31
    nope = torch.empty(tokens, heads, 128, dtype=BF16, device="cuda").normal_(generator=generator)
    rope = torch.empty(tokens, 1, 64, dtype=BF16, device="cuda").normal_(generator=generator)
    precast.concat_mla_k(k, nope, rope)
    sample = [0, 1, 43690, 43691, 87381, 87382, tokens - 1]
    want = torch.cat([nope[sample], rope[sample].expand(-1, heads, -1)], -1)
    assert torch.equal(k[sample], want)
    # The same memory as rows whose token stride is beyond 32 bits.
    gap = (1 << 30) + 8
    far = k.view(-1).as_strided((2, 8, 128), (gap, 128, 1))
    cache = torch.zeros(1, 2, 16, 8, 128, dtype=BF16, device="cuda")
    slots = torch.tensor([3, 12], device="cuda")
    precast.append_paged_kv_cache_with_slot_mapping(far, far, slots, cache)
    assert torch.equal(as_bits(cache[0, 1][slots]), as_bits(far.contiguous()))


def test_a_cpu_tensor_is_named(generator: torch.Generator) -> None:
    cache = kv_cache("packed", "NHD", (9, 16, 4, 64), BF16, generator)
    rows = keys_and_values(5, 4, 64, BF16, generator, "contiguous")
    slots = torch.zeros(5, dtype=torch.int32, device="cuda")
    op = precast.append_paged_kv_cache_with_slot_mapping
    with pytest.raises(ValueError, match="append_key must be a CUDA tensor"):
        op(rows[0].cpu(), rows[1], slots, cache.argument)
    for name, bad in (
        ("append_value", (rows[0], rows[1].cpu(), slots, cache.argument)),
        ("slot_mapping", (*rows, slots.cpu(), cache.argument)),
        ("paged_kv_cache", (*rows, slots, cache.argument.cpu())),
    ):
        with pytest.raises(ValueError, match=f"{name} must be on cuda:0 as append_key, got cpu"):
            op(*bad)
    turned = cache.argument.transpose(-1, -2).contiguous().transpose(-1, -2)
    with pytest.raises(ValueError, match="must have stride 1 in its last dimension"):
        op(*rows, slots, turned)
    with pytest.raises(ValueError, match="slot_mapping must be contiguous"):
        op(*rows, slots.repeat(2)[::2], cache.argument)
    op(*rows, slots, cache.argument)
