# SPDX-License-Identifier: Apache-2.0
"""Calls on a GPU that is not the current one: the same bits, and the current one stays.

Plans count multiprocessors and kernels are loaded for each GPU, so that what is kept of the first
must not serve the second.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import precast
from precast.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device"),
]
BF16, E4M3, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.int32
#: New tokens and all tokens of each request.
NEW, LENGTHS, PAGE = (70, 1, 300), (1000, 4097, 300), 16


def random(seed: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """The same numbers at each call, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bounds(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(I32)


def pages() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where the pages of each request start, the pages, and the tokens on the last ones."""
    counts = tuple(-(-n // PAGE) for n in LENGTHS)
    last = torch.tensor([(n - 1) % PAGE + 1 for n in LENGTHS], dtype=I32)
    return bounds(counts), torch.arange(sum(counts)).flip(0).to(I32), last


def workspace(device: str) -> torch.Tensor:
    return torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device=device)


def ragged_prefill(device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    wrapper = precast.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    types = {"q_data_type": dtype, "kv_data_type": dtype, "o_data_type": BF16}
    starts = bounds(NEW).to(device), bounds(LENGTHS).to(device)
    wrapper.plan(*starts, 8, 2, 128, causal=True, **types)
    q = random(1, sum(NEW), 8, 128, dtype=dtype).to(device)
    return wrapper.run(
        q, *(random(i, sum(LENGTHS), 2, 128, dtype=dtype).to(device) for i in (2, 3))
    )


def ragged_prefill_in_e4m3(device: str) -> torch.Tensor:
    return ragged_prefill(device, E4M3)


def paged_prefill(device: str) -> torch.Tensor:
    table = [t.to(device) for t in pages()]
    wrapper = precast.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    types = {"q_data_type": BF16, "kv_data_type": BF16}
    wrapper.plan(bounds(NEW).to(device), *table, 8, 2, 128, PAGE, causal=True, **types)
    cache = random(2, len(table[1]), 2, PAGE, 2, 128).to(device)
    return wrapper.run(random(1, sum(NEW), 8, 128).to(device), cache)


def paged_decode(device: str) -> torch.Tensor:
    table = [t.to(device) for t in pages()]
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*table, 8, 2, 128, PAGE, q_data_type=BF16, kv_data_type=BF16)
    cache = random(2, len(table[1]), 2, PAGE, 2, 128).to(device)
    return wrapper.run(random(1, len(LENGTHS), 8, 128).to(device), cache)


def mla(device: str, heads: int = 128) -> torch.Tensor:
    starts, table, _ = (t.to(device) for t in pages())
    wrapper = BatchMLAPagedAttentionWrapper(workspace(device))
    metadata = MLAPlanMetadata.csr(
        qo_indptr=bounds(NEW).to(device),
        kv_indptr=starts,
        kv_indices=table,
        kv_len_arr=torch.tensor(LENGTHS, dtype=I32, device=device),
    )
    wrapper.plan(
        metadata=metadata,
        num_heads=heads,
        head_dim_ckv=512,
        head_dim_kpe=64,
        page_size=PAGE,
        causal=True,
        sm_scale=0.07,
        q_data_type=BF16,
        kv_data_type=BF16,
    )
    q = [random(i, sum(NEW), heads, d).to(device) for i, d in ((1, 512), (2, 64))]
    caches = [random(i, len(table), PAGE, d).to(device) for i, d in ((3, 512), (4, 64))]
    return wrapper.run(*q, *caches)


def block_scaled_product(device: str) -> torch.Tensor:
    a, b = (random(i, n, 512, dtype=E4M3).to(device) for i, n in ((1, 300), (2, 768)))
    a_scale, b_scale = (
        torch.rand(n, 4, generator=torch.Generator().manual_seed(n)).to(device) for n in (300, 6)
    )
    return precast.gemm.gemm_fp8_nt_groupwise(a, b, a_scale, b_scale, "K")


def product_of_16_bits(device: str) -> torch.Tensor:
    a, b = random(1, 300, 512).to(device), random(2, 768, 512).to(device)
    return precast.gemm.mm_bf16(a, b.T)


@pytest.mark.parametrize(
    "call",
    [
        *(ragged_prefill, ragged_prefill_in_e4m3, paged_prefill, paged_decode, mla),
        *(block_scaled_product, product_of_16_bits),
    ],
)
def test_another_gpu_gives_the_same_bits(call: Callable[[str], torch.Tensor]) -> None:
    want = call("cuda:0").cpu()
    got = call("cuda:1").cpu()
    assert torch.cuda.current_device() == 0
    assert want.isfinite().all()
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
