# SPDX-License-Identifier: Apache-2.0
"""Plans and runs over a paged cache in NVFP4, in reference mode: the numbers of 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast
from precast.errors import CacheLayoutError, UnsupportedConfigError

F16, BF16, U8 = torch.float16, torch.bfloat16, torch.uint8
PAGES, PAGE, HEADS, KV_HEADS = 9, 4, 4, 2
TABLE = (
    torch.tensor([0, 2, 5, 5], dtype=torch.int32),
    torch.tensor([3, 1, 0, 7, 2], dtype=torch.int32),
    torch.tensor([2, 4, 0], dtype=torch.int32),
)
ROWS = torch.tensor([0, 3, 10, 11], dtype=torch.int32)
SCALES = {"k_scale": 0.011, "v_scale": 0.013}

pytestmark = pytest.mark.usefixtures("reference_mode")


def made(dim: int = 64, layout: str = "NHD", page: int = PAGE) -> tuple[Any, Any, Any]:
    """A cache in NVFP4, its scales, and the same numbers in float16 without ``k_scale``."""
    generator = torch.Generator().manual_seed(dim)
    codes, scales, values = [], [], []
    for g in SCALES.values():
        x = torch.randn(PAGES, page, KV_HEADS, dim, generator=generator).to(BF16)
        q, s = precast.nvfp4_kv_quantize(x, torch.tensor([g]))
        back = precast.nvfp4_kv_dequantize(q, s, torch.ones(1), F16)
        turned = (t.transpose(1, 2).contiguous() if layout == "HND" else t for t in (q, s, back))
        for parts, part in zip((codes, scales, values), turned):
            parts.append(part)
    return codes, scales, values


def workspace() -> torch.Tensor:
    return torch.empty(1024, dtype=U8)


def planned(
    kind: str, layout: str, dim: int, kv: torch.dtype, q: torch.dtype, **options: Any
) -> Any:
    sizes = HEADS, KV_HEADS, dim, options.pop("page", PAGE)
    dtypes = {"q_data_type": q, "kv_data_type": kv}
    if kind == "decode":
        wrapper: Any = precast.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout)
        wrapper.plan(*TABLE, *sizes, **dtypes, **options)
    else:
        wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace(), layout)
        wrapper.plan(ROWS, *TABLE, *sizes, causal=True, **dtypes, **options)
    return wrapper


def queries(kind: str, dim: int, dtype: torch.dtype) -> torch.Tensor:
    rows = 3 if kind == "decode" else 11
    return torch.randn(rows, HEADS, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("form", ["pair", "packed", "mixed"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", ["decode", "paged"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_numbers_are_those_of_a_cache_of_16_bits(
    dim: int, kind: str, layout: str, form: str
) -> None:
    codes, scales, values = made(dim, layout)
    cache: Any = torch.stack(codes, 1) if form == "packed" else tuple(codes)
    factors: Any = tuple(scales) if form == "pair" else torch.stack(scales, 1)
    if form == "packed":
        factors = factors.view(torch.float8_e4m3fn)
    for options in ({}, {"window_left": 3}, {"logits_soft_cap": 8.0}):
        q = queries(kind, dim, F16)
        want, lse = planned(kind, layout, dim, F16, F16, **options).run(
            q, tuple(values), **SCALES, return_lse=True
        )
        got, sums = planned(kind, layout, dim, U8, F16, **options).run(
            q, cache, **SCALES, kv_cache_sf=factors, return_lse=True
        )
        assert torch.equal(got, want)
        assert torch.equal(sums, lse)


def test_queries_of_bfloat16_and_of_8_bits() -> None:
    codes, scales, values = made()
    q = queries("decode", 64, BF16)
    wrapper = planned("decode", "NHD", 64, U8, BF16)
    out = wrapper.run(q, tuple(codes), **SCALES, kv_cache_sf=tuple(scales))
    reference = precast.BatchDecodeWithPagedKVCacheWrapper.reference
    want, _ = reference(q.float(), tuple(v.float() for v in values), *TABLE, **SCALES)
    assert out.dtype == BF16
    torch.testing.assert_close(out.float(), want, rtol=2**-8, atol=2**-9)
    eights = q.to(torch.float8_e4m3fn)
    wrapper = planned("decode", "NHD", 64, U8, eights.dtype, o_data_type=BF16)
    got = wrapper.run(eights, tuple(codes), **SCALES, kv_cache_sf=tuple(scales))
    want, _ = reference(eights.float(), tuple(v.float() for v in values), *TABLE, **SCALES)
    torch.testing.assert_close(got.float(), want, rtol=2**-8, atol=2**-9)


def test_references_of_the_wrappers() -> None:
    codes, scales, values = made()
    for wrapper, kind, rows in (
        (precast.BatchDecodeWithPagedKVCacheWrapper, "decode", ()),
        (precast.BatchPrefillWithPagedKVCacheWrapper, "paged", (ROWS,)),
    ):
        q = queries(kind, 64, F16)
        got = wrapper.reference(q, tuple(codes), *rows, *TABLE, kv_cache_sf=tuple(scales))
        want = wrapper.reference(q, tuple(values), *rows, *TABLE)
        assert all(map(torch.equal, got, want))


def test_scales_of_what_no_request_has_are_harmless() -> None:
    codes, scales, _ = made()
    q, pair = queries("paged", 64, F16), tuple(codes)
    wrapper = planned("paged", "NHD", 64, U8, F16)
    want = wrapper.run(q, pair, kv_cache_sf=tuple(scales))
    for part in scales:
        bits = part.view(U8)
        bits[[4, 5, 6, 8]] = 0x7F  # Pages of no request, and the end of a last page.
        bits[1, 2:] = 0xFF
    assert torch.equal(wrapper.run(q, pair, kv_cache_sf=tuple(scales)), want)


def test_page_size_one_may_be_left_out() -> None:
    codes, scales, _ = made(page=1)
    q = queries("decode", 64, F16)
    wrapper = planned("decode", "NHD", 64, U8, F16, page=1)
    want = wrapper.run(q, tuple(codes), kv_cache_sf=tuple(scales))
    flat = [tuple(t.squeeze(1) for t in both) for both in (codes, scales)]
    assert torch.equal(wrapper.run(q, flat[0], kv_cache_sf=flat[1]), want)
    both = [torch.stack(pair, 1) for pair in flat]
    assert torch.equal(wrapper.run(q, both[0], kv_cache_sf=both[1]), want)


# -- errors ---------------------------------------------------------------------------------------


def refused(kind: type[Exception], words: str, **changes: Any) -> None:
    """The run raises and writes nothing."""
    codes, scales, _ = made()
    out = torch.full((3, HEADS, 64), 7.0, dtype=F16)
    call = {
        "q": queries("decode", 64, F16),
        "paged_kv_cache": tuple(codes),
        "kv_cache_sf": tuple(scales),
        "out": out,
        **changes,
    }
    with pytest.raises(kind, match=words):
        planned("decode", "NHD", 64, U8, F16).run(**call)
    assert (out == 7).all()


def test_scales_that_do_not_fit() -> None:
    codes, scales, values = made()
    k, v = scales
    refused(ValueError, "kv_cache_sf must be given for kv_data_type uint8", kv_cache_sf=None)
    for bad in ([k, v], (k,), (k, 1), 1.0):
        words = "kv_cache_sf must be a torch.Tensor or a tuple of two"
        refused(CacheLayoutError, words, kv_cache_sf=bad)
    refused(ValueError, r"kv_cache_sf\[1\] must have shape", kv_cache_sf=(k, v[..., :3]))
    refused(ValueError, r"kv_cache_sf\[0\] must have shape", kv_cache_sf=(k[:-1], v[:-1]))
    refused(ValueError, "k_sf must be float8_e4m3fn or uint8", kv_cache_sf=(k.float(), v))
    refused(ValueError, r"paged_kv_cache\[1\] must have", paged_kv_cache=(codes[0], codes[1][:-1]))
    refused(ValueError, "does not match the kv_data_type", paged_kv_cache=tuple(values))


def test_outputs_do_not_overlap_scales() -> None:
    _, scales, _ = made()
    memory = torch.zeros(1 << 16, dtype=U8)
    size = scales[0].numel()
    inside = memory[:size].view(scales[0].shape)
    out = memory[: 3 * HEADS * 64 * 2].view(F16).view(3, HEADS, 64)
    codes, scales, _ = made()
    with pytest.raises(ValueError, match=r"out must not overlap kv_cache_sf\[0\]'s memory"):
        planned("decode", "NHD", 64, U8, F16).run(
            queries("decode", 64, F16), tuple(codes), out=out, kv_cache_sf=(inside, scales[1])
        )


@pytest.mark.parametrize("dim", [80, 96, 512])
def test_head_dims_without_a_kernel(dim: int) -> None:
    words = f"head_dim_qk/head_dim_vo must be one of 64, 128, 256 with .* got {dim}/{dim}"
    for kind in ("decode", "paged"):
        with pytest.raises(UnsupportedConfigError, match=words):
            planned(kind, "NHD", dim, U8, F16)


def test_queries_without_a_kernel() -> None:
    with pytest.raises(UnsupportedConfigError, match="q_data_type must be float16 or bfloat16"):
        planned("decode", "NHD", 64, U8, torch.float32)


def test_wrappers_without_a_kernel() -> None:
    ragged = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    with pytest.raises(UnsupportedConfigError, match=r"must not be uint8 \(NVFP4\), which only"):
        ragged.plan(ROWS, ROWS, 4, 2, 64, q_data_type=F16, kv_data_type=U8)


def test_a_plan_of_16_bits_takes_no_scales() -> None:
    _, scales, values = made()
    wrapper = planned("decode", "NHD", 64, F16, F16)
    with pytest.raises(NotImplementedError, match="kv_cache_sf must be None"):
        wrapper.run(queries("decode", 64, F16), tuple(values), kv_cache_sf=tuple(scales))


def test_torch_compile_without_a_graph_break() -> None:
    codes, scales, _ = made()
    q = queries("decode", 64, F16)
    wrapper = planned("decode", "NHD", 64, U8, F16)

    def model(q: Any, k: Any, v: Any, k_sf: Any, v_sf: Any) -> Any:
        return wrapper.run(q, (k, v), **SCALES, kv_cache_sf=(k_sf, v_sf)) + 1

    want = model(q, *codes, *scales)
    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(q, *codes, *scales)
    assert torch.equal(got, want)
