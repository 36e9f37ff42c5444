# SPDX-License-Identifier: Apache-2.0
"""The reference of the paged dequantisation against gathered rows, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import precast
from precast.errors import CacheLayoutError

BF16 = torch.bfloat16
PAGES, SIZE, HEADS, DIM, LENGTH = 7, 4, 3, 32, 10
LENS = (9, 0, 10)

pytestmark = pytest.mark.usefixtures("reference_mode")


def valid_call(packed: bool = False, hnd: bool = False, dims: tuple[int, int] = (DIM, DIM)) -> Any:
    generator = torch.Generator().manual_seed(3)

    def data(dim: int) -> torch.Tensor:
        shape = (PAGES, HEADS, SIZE, dim) if hnd else (PAGES, SIZE, HEADS, dim)
        return torch.randint(0, 120, shape, generator=generator).to(torch.uint8)

    caches = [[data(dim // per_byte) for dim in dims] for per_byte in (2, 16)]  # codes, scales
    arguments = [torch.stack(pair, 1) if packed else tuple(pair) for pair in caches]
    return {
        "paged_kv_cache": arguments[0],
        "kv_cache_sf": arguments[1],
        "block_tables": torch.tensor([[6, 0, 3], [1, 1, 1], [2, 5, 4]], dtype=torch.int32),
        "seq_lens": torch.tensor(LENS, dtype=torch.int32),
        "k_scale": torch.tensor([0.3]),
        "v_scale": torch.tensor(0.7),
        "output_k": torch.full((3, LENGTH, HEADS, dims[0]), -1.0, dtype=BF16),
        "output_v": torch.full((3, LENGTH, HEADS, dims[1]), -1.0, dtype=BF16),
        "kv_layout": "HND" if hnd else "NHD",
    }


@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize(
    ("packed", "dims"), [(True, (32, 32)), (False, (32, 32)), (False, (16, 64))]
)
def test_numbers_are_those_of_gathered_rows(packed: bool, hnd: bool, dims: tuple[int, int]) -> None:
    call = valid_call(packed, hnd, dims)
    call["block_tables"][2, 1] = -1
    assert precast.nvfp4_kv_dequantize_paged(**call) is None
    for part, (out, scale) in enumerate((("output_k", "k_scale"), ("output_v", "v_scale"))):
        codes, factors = (
            call[name][:, part] if packed else call[name][part]
            for name in ("paged_kv_cache", "kv_cache_sf")
        )
        for request in range(3):
            for token in range(LENGTH):
                got = call[out][request, token]
                page, entry = int(call["block_tables"][request, token // SIZE]), token % SIZE
                if token >= LENS[request] or page < 0:
                    assert (got == -1).all()
                    continue
                place = (page, slice(None), entry) if hnd else (page, entry)
                want = precast.nvfp4_kv_dequantize(
                    codes[place].contiguous(), factors[place].contiguous(), call[scale].view(1)
                )
                assert torch.equal(got, want)


def test_scales_may_be_fp8_and_the_table_wide() -> None:
    call, other = valid_call(), valid_call()
    other["kv_cache_sf"] = tuple(t.view(torch.float8_e4m3fn) for t in other["kv_cache_sf"])
    other["block_tables"] = other["block_tables"].long()
    for arguments in (call, other):
        precast.nvfp4_kv_dequantize_paged(**arguments)
    for name in ("output_k", "output_v"):
        assert torch.equal(call[name], other[name])


def test_page_size_1_may_be_left_out() -> None:
    call = valid_call()
    for name in ("paged_kv_cache", "kv_cache_sf"):
        call[name] = tuple(t[:, :1] for t in call[name])
    call["block_tables"] = torch.arange(3 * LENGTH, dtype=torch.int32).view(3, -1) % PAGES
    flat = {**call}
    for name in ("paged_kv_cache", "kv_cache_sf"):
        flat[name] = tuple(t.squeeze(1) for t in call[name])
    for name in ("output_k", "output_v"):
        flat[name] = call[name].clone()
    precast.nvfp4_kv_dequantize_paged(**call)
    precast.nvfp4_kv_dequantize_paged(**flat)
    assert torch.equal(call["output_k"], flat["output_k"])
    assert (call["output_k"] != -1).any()


Change = Callable[[dict[str, Any]], dict[str, Any]]


def _pair(name: str, change: Callable[[torch.Tensor], torch.Tensor], part: int = 1) -> Change:
    return lambda a: {
        name: (a[name][0], change(a[name][1])) if part else (change(a[name][0]), a[name][1])
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_pair("paged_kv_cache", torch.Tensor.float), r"paged_kv_cache\[1\] must be uint8"),
        (_pair("kv_cache_sf", torch.Tensor.float), r"kv_cache_sf\[1\] must be float8_e4m3fn or"),
        (
            _pair("paged_kv_cache", lambda t: t[1:]),
            r"paged_kv_cache\[1\] must have 7 pages of 4 as paged_kv_cache\[0\], got 6 of 4",
        ),
        (
            _pair("kv_cache_sf", lambda t: t[:, 1:], 0),
            r"kv_cache_sf\[0\] must have 7 pages of 4 as paged_kv_cache\[0\], got 7 of 3",
        ),
        (
            _pair("kv_cache_sf", lambda t: t[..., 1:]),
            r"kv_cache_sf\[1\] must hold rows of 3 x 2 bytes for output_v, got shape "
            r"\[7, 4, 3, 1\] in layout NHD",
        ),
        (_pair("paged_kv_cache", lambda t: t[0, 0]), "must have 3 to 4 dimensions"),
        (
            lambda a: {"paged_kv_cache": torch.stack([*a["paged_kv_cache"]] * 2, 1)},
            "must hold keys and values in dimension 1 of size 2",
        ),
        (lambda a: {"kv_layout": "HND"}, "in layout HND"),
        (lambda a: {"output_k": a["output_k"].float()}, "output_k must be float16 or bfloat16"),
        (lambda a: {"output_v": a["output_v"].half()}, "output_v must be bfloat16, got float16"),
        (lambda a: {"output_k": a["output_k"][0]}, "output_k must have 4 dimensions"),
        (
            lambda a: {"output_v": a["output_v"][..., :24]},
            "output_v's last dimension must be a multiple of 16, got 24",
        ),
        (
            lambda a: {"output_v": a["output_v"][:, 1:]},
            "output_v must have the requests, tokens and heads of output_k",
        ),
        (lambda a: {"k_scale": torch.ones(2)}, "k_scale must hold one number"),
        (lambda a: {"v_scale": torch.ones(1).half()}, "v_scale must be float32, got float16"),
        (lambda a: {"block_tables": a["block_tables"].short()}, "must be int32 or int64"),
        (lambda a: {"block_tables": a["block_tables"][1:]}, r"must have shape \[3, pages of a"),
        (
            lambda a: {"block_tables": a["block_tables"][:, 1:]},
            "must have pages of 4 entries for the 10 tokens of output_k, got 2 pages a request",
        ),
        (lambda a: {"seq_lens": a["seq_lens"].long()}, "seq_lens must be int32, got int64"),
        (lambda a: {"seq_lens": a["seq_lens"][1:]}, r"seq_lens must have shape \[3\], got \[2\]"),
        (lambda a: {"output_v": a["output_k"]}, "output_v must not overlap output_k's memory"),
        (
            lambda a: {"seq_lens": a["output_k"].view(-1)[:6].view(torch.int32)},
            "output_k must not overlap seq_lens's memory",
        ),
    ],
)
def test_invalid_arguments(change: Change, words: str) -> None:
    call = valid_call()
    kept = {name: call[name] for name in ("output_k", "output_v")}
    with pytest.raises(ValueError, match=words):
        precast.nvfp4_kv_dequantize_paged(**{**call, **change(call)})
    for out in kept.values():
        assert (out == -1).all()


def test_classes_of_errors() -> None:
    call = valid_call()
    for change, words in (
        ({"kv_layout": "HDN"}, "kv_layout must be NHD or HND"),
        ({"paged_kv_cache": [*call["paged_kv_cache"]]}, "paged_kv_cache must be .* got list"),
        ({"kv_cache_sf": call["kv_cache_sf"][:1]}, "kv_cache_sf must be .* a tuple of Tensor"),
    ):
        with pytest.raises(CacheLayoutError, match=words) as error:
            precast.nvfp4_kv_dequantize_paged(**{**call, **change})
        assert isinstance(error.value, KeyError)
        assert isinstance(error.value, ValueError)
    for name in ("block_tables", "seq_lens", "k_scale", "output_v"):
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
            precast.nvfp4_kv_dequantize_paged(**{**call, name: [1.0]})


def test_torch_compile_without_a_graph_break() -> None:
    call, other = valid_call(), valid_call()
    precast.nvfp4_kv_dequantize_paged(**call)
    torch._dynamo.reset()
    run = torch.compile(
        lambda a: precast.nvfp4_kv_dequantize_paged(**a), fullgraph=True, backend="aot_eager"
    )
    run(other)
    assert torch.equal(call["output_v"], other["output_v"])
