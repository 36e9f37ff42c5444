# SPDX-License-Identifier: Apache-2.0
"""The same plans and runs of MLA through FlashInfer and FlashMLA: the same numbers.

FlashInfer has a module for each dtype and head dimension; a test whose module is neither prebuilt
nor can be compiled here is skipped.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from flashinfer_modules import compiled

import precast.mla
from precast.testing.tolerances import tolerance_of_attention

BF16, F16, E4M3, I32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32
SCALE = 1 / math.sqrt(192)
HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
HAS_FLASHMLA = importlib.util.find_spec("flash_mla") is not None
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


class Batch:
    """Requests over pages in any order; ckv and kpe are slices of one pool."""

    def __init__(
        self,
        kv_lens: list[int],
        q_len: int = 1,
        heads: int = 128,
        page: int = 64,
        dtype: torch.dtype = BF16,
        kv_dtype: torch.dtype | None = None,
        kpe: int = 64,
    ) -> None:
        g = torch.Generator("cuda").manual_seed(3)
        counts = [-(-n // page) for n in kv_lens]
        total, batch = sum(counts), len(kv_lens)
        self.q = (torch.randn(batch * q_len, heads, 512 + kpe, device="cuda", generator=g) / 2).to(
            dtype
        )
        cache = torch.randn(total, page, 512 + kpe, device="cuda", generator=g).to(dtype)
        self.cache = cache.to(kv_dtype or dtype)
        self.pages = torch.randperm(total, device="cuda", generator=g).to(I32)
        self.kv_indptr = torch.tensor([0, *counts], device="cuda").cumsum(0).to(I32)
        self.qo_indptr = torch.arange(batch + 1, device="cuda", dtype=I32) * q_len
        self.lens = torch.tensor(kv_lens, device="cuda", dtype=I32)
        width = max(counts)
        self.table = torch.zeros(batch, width, device="cuda", dtype=I32)
        for i, count in enumerate(counts):
            begin = int(self.kv_indptr[i])
            self.table[i, :count] = self.pages[begin : begin + count]
        self.heads, self.page, self.kpe, self.q_len = heads, page, kpe, q_len


def call(library: Any, batch: Batch, backend: str, causal: bool, **scales: Any) -> Any:
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    tables = batch.qo_indptr, batch.kv_indptr, batch.pages, batch.lens
    sizes = batch.heads, 512, batch.kpe, batch.page, causal, SCALE
    wrapper.plan(*tables, *sizes, batch.q.dtype, batch.cache.dtype)
    q, kv = (t.split([512, batch.kpe], -1) for t in (batch.q, batch.cache))
    return wrapper.run(*q, *kv, return_lse=True, **scales)


def close(mine: Any, theirs: Any, dtype: torch.dtype) -> None:
    row = tolerance_of_attention(dtype)
    # Twice, for both round.
    torch.testing.assert_close(mine[0], theirs[0], rtol=2 * row.rtol, atol=2 * row.atol)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-3, atol=4e-3)


@pytest.mark.skipif(not HAS_FLASHINFER, reason="flashinfer is not installed")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        {"kv_lens": [700, 64, 4000]},
        {"kv_lens": [700, 64, 4000], "page": 1, "heads": 16},
        {"kv_lens": [300, 1000], "q_len": 4, "heads": 32, "page": 16},
        {"kv_lens": [700, 64], "dtype": F16},
    ],
    ids=str,
)
def test_flashinfer(shape: dict[str, Any], causal: bool) -> None:
    import flashinfer.mla

    batch = Batch(**shape)
    with compiled():
        theirs = call(flashinfer.mla, batch, "fa2", causal)
    for backend in ("fa2", "auto"):
        close(call(precast.mla, batch, backend, causal), theirs, batch.q.dtype)


@pytest.mark.skipif(not (HAS_FLASHINFER and IS_HOPPER), reason="needs flashinfer on Hopper")
@pytest.mark.parametrize("by_token", [False, True])
def test_flashinfer_with_caches_of_8_bits(by_token: bool) -> None:
    import flashinfer.mla

    batch = Batch([700, 64, 4000], kv_dtype=E4M3)
    scales: dict[str, Any] = {"ckv_scale": 0.5, "kpe_scale": 0.25}
    if by_token:
        shape = (*batch.cache.shape[:2], 4)
        arr = torch.rand(shape, device="cuda") + 0.1
        scales = {"ckv_scale_arr": arr, "kpe_scale": 0.25}
    with compiled():
        theirs = call(flashinfer.mla, batch, "fa3", True, **scales)
    for backend in ("fa2", "auto"):
        close(call(precast.mla, batch, backend, True, **scales), theirs, BF16)


@pytest.mark.skipif(not (HAS_FLASHMLA and IS_HOPPER), reason="needs flash_mla on Hopper")
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2])
def test_flashmla(heads: int, q_len: int) -> None:
    import flash_mla

    batch = Batch([700, 64, 4000, 3000], q_len=q_len, heads=heads)
    metadata, splits = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        batch.q.view(4, q_len, heads, 576),
        batch.cache.unsqueeze(2),
        batch.table,
        batch.lens,
        512,
        metadata,
        splits,
        softmax_scale=SCALE,
        causal=True,
        use_legacy=True,  # Dense decodes are among its older kernels alone.
    )
    # Its log-sum-exp is natural, [batch, heads, queries].
    lse = lse.transpose(1, 2).reshape(-1, heads) / math.log(2.0)
    close(call(precast.mla, batch, "auto", True), (out.view(-1, heads, 512), lse), BF16)


@pytest.mark.skipif(not HAS_FLASHINFER, reason="flashinfer is not installed")
def test_names_and_defaults_are_theirs() -> None:
    import inspect

    import flashinfer.mla

    for name in ("__init__", "plan", "run"):
        mine, theirs = (
            inspect.signature(getattr(library.BatchMLAPagedAttentionWrapper, name)).parameters
            for library in (precast.mla, flashinfer.mla)
        )
        assert [*mine] == [*theirs], name
        for key, parameter in theirs.items():
            assert mine[key].kind is parameter.kind, f"{name}: {key}"
            assert mine[key].default == parameter.default, f"{name}: {key}"
