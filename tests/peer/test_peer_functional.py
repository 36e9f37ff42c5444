# SPDX-License-Identifier: Apache-2.0
"""Attention without a plan, and FlashInfer's XQA: the same calls, the same numbers.

FlashInfer has a module for each dtype, page size, head dimension and group of heads. A test whose
module can neither be found nor compiled here is skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from typing import Any

import pytest
import torch
from flashinfer_modules import compiled

from precast.testing import assert_close
from precast.testing.tolerances import tolerance_of_attention

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)

F16, BF16, E4M3, I32 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32
DECODES = ("xqa_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache")
MODULES = {
    **dict.fromkeys(DECODES, "decode"),
    "trtllm_batch_context_with_kv_cache": "prefill",
    "trtllm_fmha_v2_prefill": "prefill",
    "xqa": "xqa",
}
LENS = [1, 16, 17, 700, 64, 3001, 255, 128]


@pytest.mark.without_gpu
@pytest.mark.parametrize("name", MODULES)
def test_names_and_defaults(name: str) -> None:
    mine, theirs = (
        inspect.signature(getattr(importlib.import_module(f"{package}.{MODULES[name]}"), name))
        for package in ("precast", "flashinfer")
    )
    assert [*mine.parameters] == [*theirs.parameters]
    for key, parameter in theirs.parameters.items():
        assert mine.parameters[key].default == parameter.default, key
        assert mine.parameters[key].kind == parameter.kind, key


@pytest.fixture
def needs_xqa() -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 10, 12):
        pytest.skip("FlashInfer has no XQA for this GPU")


class Batch:
    """Requests over pages in any order."""

    def __init__(
        self,
        generator: torch.Generator,
        q_len: int = 1,
        heads: tuple[int, int] = (32, 8),
        dim: int = 128,
        page: int = 16,
        layout: str = "NHD",
        dtype: torch.dtype = BF16,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=generator).to(dtype)

        lens = [n + q_len - 1 for n in LENS]
        counts = [-(-n // page) for n in lens]
        order = torch.randperm(sum(counts) + 3, device="cuda", generator=generator).to(I32)
        self.table = torch.zeros(len(lens), max(counts), dtype=I32, device="cuda")
        for row, count, end in zip(self.table, counts, torch.tensor(counts).cumsum(0).tolist()):
            row[:count] = order[end - count : end]
        self.lens = torch.tensor(lens, dtype=I32, device="cuda")
        self.layout, self.q_len, self.page, self.heads = layout, q_len, page, heads
        self.q = made(len(lens) * q_len, heads[0], dim)
        rows = (page, heads[1]) if layout == "NHD" else (heads[1], page)
        self.cache = made(len(order), 2, *rows, dim).to(kv_dtype or dtype)

    def causal_mask(self) -> torch.Tensor | None:
        """As engines pass it; FlashInfer wants one wherever there are drafts."""
        return self.mask(torch.ones(self.q_len, self.q_len).tril().bool())

    def mask(self, sees: torch.Tensor) -> torch.Tensor | None:
        if self.q_len == 1:
            return None
        weights = 1 << torch.arange(self.q_len)
        low = (sees * weights).sum(-1)
        rows = torch.stack((low & 0xFFFF, low >> 16), -1).to(torch.uint16)
        return rows.expand(len(LENS), -1, -1).contiguous().cuda()


def workspaces() -> dict[str, torch.Tensor]:
    """FlashInfer's is cleared, ours may hold anything."""
    size = 128 << 20
    theirs = torch.zeros(size, dtype=torch.uint8, device="cuda")
    return {"precast": torch.full_like(theirs, 0xFF), "flashinfer": theirs}


def compare(name: str, batch: Batch, scale: float = 1.0, **options: Any) -> None:
    results = {}
    for package, workspace in workspaces().items():
        function = getattr(importlib.import_module(f"{package}.{MODULES[name]}"), name)
        given = {
            "query": batch.q.clone(),
            "kv_cache": batch.cache,
            "workspace_buffer": workspace,
            "block_tables": batch.table,
            "seq_lens": batch.lens,
            "max_seq_len": max(LENS) + batch.q_len,
            "bmm1_scale": 1 / math.sqrt(batch.q.shape[-1]),
            "kv_layout": batch.layout,
            "q_len_per_req": batch.q_len,
            "mask": batch.causal_mask(),
            **options,
        }
        if package == "flashinfer":
            with compiled():
                results[package] = function(**given)
        else:
            results[package] = function(**given)
    mine, theirs = results["precast"], results["flashinfer"].view_as(results["precast"])
    assert mine.dtype == theirs.dtype
    # Twice, for both round.
    rtol, atol = (2 * x for x in tolerance_of_attention(batch.q.dtype))
    if batch.cache.dtype.itemsize == 1:
        rtol, atol = of_8_bits(mine, theirs, scale)
    assert_close(mine, theirs, rtol=rtol, atol=atol * scale)


def of_8_bits(mine: torch.Tensor, theirs: torch.Tensor, scale: float = 1.0) -> tuple[float, float]:
    """What may be between outputs of caches in fp8 whose values were multiplied by ``scale``.

    Theirs rounds probabilities to the dtype of the cache: a few outputs of 100,000 are 0.12 apart.
    The root of the mean square shows that they are few.
    """
    off = (mine.float() - theirs.float()).square().mean().sqrt().item()
    assert off <= 0.02 * scale
    return 0.06, 0.15


@pytest.mark.parametrize("name", DECODES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_decode(
    kv_dtype: torch.dtype,
    page: int,
    layout: str,
    name: str,
    generator: torch.Generator,
    needs_xqa: None,
) -> None:
    compare(name, Batch(generator, page=page, layout=layout, kv_dtype=kv_dtype))


@pytest.mark.parametrize(
    "sizes", [{"heads": (8, 8)}, {"heads": (32, 4)}, {"dim": 64}, {"dim": 256}, {"dtype": F16}]
)
def test_heads(sizes: dict[str, Any], generator: torch.Generator, needs_xqa: None) -> None:
    compare(DECODES[0], Batch(generator, **sizes))


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("window", [0, 100])
def test_windows(
    window: int, kv_dtype: torch.dtype, generator: torch.Generator, needs_xqa: None
) -> None:
    compare(DECODES[0], Batch(generator, kv_dtype=kv_dtype), window_left=window)


def test_sinks(generator: torch.Generator, needs_xqa: None) -> None:
    batch = Batch(generator)
    sinks = torch.randn(batch.heads[0], device="cuda", generator=generator)
    compare(DECODES[0], batch, sinks=sinks)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_scales_of_a_cache_of_8_bits(
    as_tensor: bool, generator: torch.Generator, needs_xqa: None
) -> None:
    scales = 0.02, 1.5
    given = [torch.tensor([x], device="cuda") if as_tensor else x for x in scales]
    batch = Batch(generator, kv_dtype=E4M3)
    compare(DECODES[0], batch, 1.5, bmm1_scale=given[0], bmm2_scale=given[1])


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("q_len", [2, 4, 9])
def test_drafts(
    q_len: int, kv_dtype: torch.dtype, generator: torch.Generator, needs_xqa: None
) -> None:
    batch = Batch(generator, q_len, kv_dtype=kv_dtype)
    compare(DECODES[0], batch)
    tree = torch.rand(q_len, q_len).lt(0.5).tril() | torch.eye(q_len).bool()
    compare(DECODES[0], batch, mask=batch.mask(tree))


def test_drafts_of_different_lengths(generator: torch.Generator, needs_xqa: None) -> None:
    batch = Batch(generator, 4)
    counts = torch.tensor([4, 1, 2, 0, 3, 4, 4, 1])
    bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().cuda()
    mask = batch.causal_mask()
    assert mask is not None
    rows = torch.cat([own[:n] for own, n in zip(mask.cpu().view(torch.int16), counts.tolist())])
    batch.q = batch.q[: int(counts.sum())]
    compare(
        DECODES[0], batch, q_cu_seq_lens=bounds, mask=rows.view(torch.uint16).contiguous().cuda()
    )


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_xqa(
    layout: str, kv_dtype: torch.dtype, generator: torch.Generator, needs_xqa: None
) -> None:
    batch = Batch(generator, layout=layout, kv_dtype=kv_dtype)
    heads, kv_heads = batch.heads
    sinks = torch.randn(kv_heads, heads // kv_heads, device="cuda", generator=generator)
    outputs = []
    for package, workspace in workspaces().items():
        function = importlib.import_module(f"{package}.xqa").xqa
        output = torch.full_like(batch.q, torch.nan).unsqueeze(1)
        tensors = (batch.q.unsqueeze(1), *batch.cache.unbind(1), batch.table)
        buffers = workspace, torch.zeros(1 << 23, dtype=torch.uint8, device="cuda")
        given = {"sinks": sinks, "q_scale": 0.7, "kv_layout": layout, "sliding_win_size": 100}
        if kv_dtype == E4M3:
            given["kv_scale"] = 1.3
        rest = (batch.lens.unsqueeze(1), output, *buffers, kv_heads, batch.page)
        if package == "flashinfer":
            with compiled():
                function(*tensors, *rest, **given)
        else:
            function(*tensors, *rest, **given)
        outputs.append(output)
    scale = given.get("kv_scale", 1.0)
    rtol, atol = of_8_bits(*outputs, scale) if kv_dtype == E4M3 else (0.06, 0.06)
    assert_close(*outputs, rtol=rtol, atol=atol * scale)


# -- prefill --------------------------------------------------------------------------------------


@pytest.fixture
def needs_fmha_v2() -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 12):
        pytest.skip("FlashInfer has no FMHA v2 for this GPU")


Q_LENS, KV_LENS = [1, 130, 17, 700, 64], [300, 130, 901, 700, 64]


def starts(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], device="cuda").cumsum(0).to(I32)


def for_theirs(qkv: Any, layout: str, tokens: int) -> Any:
    """The tensors as FlashInfer's kernel reads all of them: as many rows of queries as of keys.

    Its descriptors of keys without pages have the rows of ``q`` (``init_params`` of
    ``fmha_v2/fmha/warpspec/dma.h``: ``total_q_seqlen`` for K and V, too), so a key in a row that is
    behind those counts as zeros. Rows behind the last request are read by no one.
    """
    if layout not in ("CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V"):
        return qkv
    q, *rest = qkv
    return torch.cat([q, q.new_zeros(max(0, tokens - len(q)), *q.shape[1:])]), *rest


def _prefill(layout: str, generator: torch.Generator, **options: Any) -> None:
    heads, kv_heads, dim, page = 16, 4, 128, 16

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(BF16)

    kv_lens = Q_LENS if layout == "PACKED_QKV" else KV_LENS
    tokens, table = sum(kv_lens), None
    q = made(sum(Q_LENS), heads, dim)
    if layout == "PACKED_QKV":
        qkv: Any = made(sum(Q_LENS), 3, heads, dim)
    elif layout == "CONTIGUOUS_Q_KV":
        qkv = q, made(tokens, 2, kv_heads, dim)
    elif layout == "SEPARATE_Q_K_V":
        qkv = q, made(tokens, kv_heads, dim), made(tokens, kv_heads, dim)
    else:
        counts = [-(-n // page) for n in kv_lens]
        entries = (page, kv_heads) if layout.endswith("NHD") else (kv_heads, page)
        qkv = q, made(sum(counts), 2, *entries, dim)
        order = torch.randperm(sum(counts), device="cuda", generator=generator).to(I32)
        table = torch.zeros(len(counts), max(counts), dtype=I32, device="cuda")
        for row, count, end in zip(table, counts, torch.tensor(counts).cumsum(0).tolist()):
            row[:count] = order[end - count : end]
    lens = torch.tensor(kv_lens, dtype=I32, device="cuda")
    sizes = (lens, max(Q_LENS), max(kv_lens), dim**-0.5, 1.0, len(Q_LENS))
    outputs = []
    for package, workspace in workspaces().items():
        function = importlib.import_module(f"{package}.prefill").trtllm_fmha_v2_prefill
        bounds = starts(Q_LENS), starts(kv_lens)
        given = {"block_tables": table, **options}
        if package == "flashinfer":
            theirs = for_theirs(qkv, layout, tokens)
            with compiled():
                result = function(theirs, layout, workspace, *sizes, *bounds, **given)
            both = result if isinstance(result, tuple) else (result,)
            found = tuple(part[: len(q)] for part in both)
            outputs.append(found if isinstance(result, tuple) else found[0])
        else:
            outputs.append(function(qkv, layout, workspace, *sizes, *bounds, **given))
    if options.get("save_softmax_stats"):
        sums = [part[1][..., 0] + part[1][..., 1].log() for part in outputs]
        assert_close(*sums, rtol=1e-3, atol=1e-2)
        outputs = [part[0] for part in outputs]
    rtol, atol = (2 * x for x in tolerance_of_attention(BF16))
    assert_close(*outputs, rtol=rtol, atol=atol)


LAYOUTS = (
    *("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V"),
    *("Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"),
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"mask_mode": "padding"}, {"window_left": 100}], ids=str)
def test_layouts(
    options: dict[str, Any], layout: str, generator: torch.Generator, needs_fmha_v2: None
) -> None:
    _prefill(layout, generator, **options)


@pytest.mark.parametrize(
    "options",
    [{"logits_soft_cap_scale": 5.0}, {"save_softmax_stats": True}, {"out_dtype": BF16}],
    ids=str,
)
def test_options_of_prefill(
    options: dict[str, Any], generator: torch.Generator, needs_fmha_v2: None
) -> None:
    _prefill("CONTIGUOUS_Q_KV", generator, **options)
