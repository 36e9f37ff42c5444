# SPDX-License-Identifier: Apache-2.0
"""Numbers of a paged NVFP4 cache: bit for bit what the formats' definition says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_calls import same_bits
from paged_calls import FORMS, Paged

import precast
from precast.errors import CacheLayoutError
from precast.quantization import nvfp4_kv_dequantize_paged_reference

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])


@dtypes
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", FORMS)
def test_numbers(form: str, layout: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    call = Paged(form=form, layout=layout, dtype=dtype).make(generator)
    call.run()
    call.check()


@pytest.mark.parametrize(
    "sizes",
    [
        Paged(dims=(16, 128)),
        Paged(dims=(256, 48), layout="HND"),
        Paged(page_size=1),
        Paged(page_size=7, layout="HND"),
        Paged(page_size=64, form="packed"),
        Paged(index=torch.int64),
        Paged(scale_dtype=torch.uint8),
        Paged(heads=1, dims=(576, 16)),
        Paged(lens=(1,), length=1),
        Paged(lens=(0, 0, 0)),
        Paged(lens=(-3, 1 << 30, 2)),
        Paged(keywords={"enable_pdl": False}),
    ],
    ids=lambda sizes: " ".join(
        f"{name}={value}" for name, value in vars(sizes).items() if value != getattr(Paged(), name)
    ),
)
def test_sizes(sizes: Paged, generator: torch.Generator) -> None:
    call = sizes.make(generator)
    call.run()
    call.check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("page_size", "length"), [(16, 1001), (16, 1000), (9, 1001)])
def test_large(
    page_size: int, length: int, layout: str, form: str, generator: torch.Generator
) -> None:
    """Where a thread takes several tokens, and where pages do not allow it."""
    dims = (64, 128) if form == "joined" else (128, 128)
    sizes = Paged((length, 3, 998) * 2, length, 8, dims, page_size, layout, form, finite=True)
    call = sizes.make(generator)
    # Before the call: what a request does not reach is what the outputs hold, which is poison now.
    wanted = nvfp4_kv_dequantize_paged_reference(*call.arguments)
    call.run()
    for part, want in enumerate(wanted):
        same_bits(call.buffers[part].view, want)
        call.buffers[part].check()


def test_page_size_1_without_its_dimension(generator: torch.Generator) -> None:
    for form in ("pair", "packed"):
        call = Paged(page_size=1, form=form).make(generator)
        flat = [
            tuple(t.squeeze(1) for t in value) if form == "pair" else value.squeeze(2)
            for value in (call.cache, call.factors)
        ]
        precast.nvfp4_kv_dequantize_paged(*flat, *call.arguments[2:])
        call.check()


def test_pages_that_are_not_in_the_cache(generator: torch.Generator) -> None:
    for index in (torch.int32, torch.int64):
        call = Paged(index=index).make(generator)
        call.table[0, 0] = -1
        call.table[2, 1] = call.cache[0].shape[0]
        call.table[3, 0] = torch.iinfo(index).max
        call.run()
        call.check()


def test_tables_may_be_slices_and_longer(generator: torch.Generator) -> None:
    call = Paged().make(generator)
    wide = torch.nn.functional.pad(call.table, (1, 6), value=-5)
    call.table = wide[:, 1:-2]
    call.run()
    call.check()


def test_empty(generator: torch.Generator) -> None:
    for sizes in (
        Paged(lens=()),
        Paged(heads=0),
        Paged(length=0, lens=(3, 4)),
        Paged(dims=(0, 0)),
    ):
        sizes.make(generator).run()
    call = Paged(dims=(0, 32)).make(generator)
    call.run()
    call.buffers[1].check()


def test_what_was_quantised_and_appended_comes_back(generator: torch.Generator) -> None:
    tokens, heads, dim, page_size = 37, 2, 64, 16
    x = torch.randn(tokens, heads, dim, device="cuda", generator=generator).bfloat16()
    g = (448 * 6 / x.abs().amax().float()).reshape(1)
    codes, scales = precast.nvfp4_quantize(x, g, precast.SfLayout.layout_linear)
    scales = scales.view(tokens, heads, dim // 16)
    pages = -(-tokens // page_size)
    cache, factors = (
        torch.zeros(pages, page_size, heads, size, dtype=torch.uint8, device="cuda")
        for size in (dim // 2, dim // 16)
    )
    table = torch.randperm(pages, device="cuda").int()
    slots = torch.arange(tokens, device="cuda")
    slots = table[slots // page_size].long() * page_size + slots % page_size
    precast.append_paged_kv_cache_with_slot_mapping(codes, scales, slots, (cache, factors))
    keys, values = torch.zeros(2, 1, tokens, heads, dim, dtype=x.dtype, device="cuda")
    lens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    both = (cache, cache), (factors, factors)
    precast.nvfp4_kv_dequantize_paged(*both, table[None], lens, 1 / g, 1 / g, keys, values)
    same_bits(keys[0], precast.nvfp4_kv_dequantize(codes, scales.flatten(), 1 / g))
    same_bits(values, keys)


def test_graph_and_compile(generator: torch.Generator) -> None:
    call = Paged(finite=True).make(generator)
    call.run()
    want = [buffer.view.clone() for buffer in call.buffers]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: precast.nvfp4_kv_dequantize_paged(*args), fullgraph=True)
    for again in (graph.replay, lambda: compiled(*call.arguments)):
        for buffer in call.buffers:
            buffer.bytes.fill_(0xA5)
        again()
        for buffer, its in zip(call.buffers, want, strict=True):
            same_bits(buffer.view, its)


def test_more_than_2_to_31_numbers(free_memory: None) -> None:
    requests, length, heads, dim, page_size = 3, 180_000, 32, 128, 16
    if torch.cuda.mem_get_info()[0] < 18 << 30:
        pytest.skip("needs 18 GiB of GPU memory")
    pages = 2**31 // (page_size * heads * dim // 2) + 2  # More bytes of codes than 31 bits count.
    inner = (page_size, heads)
    cache = torch.randint(0, 256, (pages, *inner, dim // 2), dtype=torch.uint8, device="cuda")
    factors = torch.randint(40, 80, (pages, *inner, dim // 16), dtype=torch.uint8, device="cuda")
    columns = -(-length // page_size)
    table = (pages - 1 - torch.arange(requests * columns, device="cuda") % pages).int()
    table = table.view(requests, columns)
    lens = torch.full((requests,), length, dtype=torch.int32, device="cuda")
    g = torch.ones(1, device="cuda")
    keys = torch.empty(requests, length, heads, dim, dtype=torch.bfloat16, device="cuda")
    values = torch.empty(requests, length, heads, dim, dtype=torch.bfloat16, device="cuda")
    assert keys.numel() > 2**31
    both = (cache, cache), (factors, factors)
    precast.nvfp4_kv_dequantize_paged(*both, table, lens, g, g, keys, values)
    assert torch.equal(keys, values)
    for request, token in ((0, 0), (1, 17), (requests - 1, length - 1)):
        page = int(table[request, token // page_size])
        entry = token % page_size
        want = precast.nvfp4_kv_dequantize(
            cache[page, entry].clone(), factors[page, entry].flatten(), g
        )
        same_bits(keys[request, token], want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_second_device(generator: torch.Generator) -> None:
    call = Paged(finite=True).make(generator)
    call.run()

    def there(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(there, value))
        return value.to("cuda:1") if isinstance(value, torch.Tensor) else value

    arguments = tuple(map(there, call.arguments))
    for output in arguments[6:8]:
        output.zero_()
    precast.nvfp4_kv_dequantize_paged(*arguments)
    assert torch.cuda.current_device() == 0
    for part, (request, tokens) in ((i, r) for i in range(2) for r in enumerate(call.sizes.lens)):
        got = arguments[6 + part][request, :tokens].cpu()
        same_bits(got, call.buffers[part].view[request, :tokens].cpu())


Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: {"k_scale": a["k_scale"].cpu()}, "k_scale must be on cuda:0"),
        (lambda a: {"output_k": a["output_k"].float()}, "dtype=f32 is not supported"),
        (
            lambda a: {"output_v": a["output_v"].transpose(1, 2).contiguous().transpose(1, 2)},
            "output_v must be contiguous",
        ),
        (
            lambda a: {"block_tables": a["block_tables"].T.contiguous().T},
            "block_tables must have stride 1",
        ),
        (
            lambda a: {"paged_kv_cache": (a["paged_kv_cache"][0][..., ::2],) * 2},
            r"paged_kv_cache\[0\] must have stride 1",
        ),
    ],
)
def test_invalid_arguments(change: Change, words: str, generator: torch.Generator) -> None:
    call = Paged().make(generator)
    names = ("paged_kv_cache", "kv_cache_sf", "block_tables", "seq_lens", "k_scale", "v_scale")
    arguments = dict(zip((*names, "output_k", "output_v", "kv_layout"), call.arguments))
    with pytest.raises(ValueError, match=words):
        precast.nvfp4_kv_dequantize_paged(**{**arguments, **change(arguments)})
    for buffer in call.buffers:
        assert (buffer.bytes == 0xA5).all()
    with pytest.raises(CacheLayoutError):
        precast.nvfp4_kv_dequantize_paged(**{**arguments, "kv_layout": "HDN"})


def test_an_output_at_an_odd_address_is_an_error(generator: torch.Generator) -> None:
    call = Paged().make(generator)
    arguments = list(call.arguments)
    output = arguments[6]
    memory = torch.empty(output.numel() + 1, dtype=output.dtype, device="cuda")
    arguments[6] = memory[1:].view(output.shape)
    with pytest.raises(ValueError, match="output_k must start at a multiple of 16 bytes"):
        precast.nvfp4_kv_dequantize_paged(*arguments)
