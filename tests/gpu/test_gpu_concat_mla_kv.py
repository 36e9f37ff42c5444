# SPDX-License-Identifier: Apache-2.0
"""Keys and values of latent attention in e4m3 on the GPU: bit for bit what torch's cast gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_calls import Buffer

import precast
from precast.concat_ops import concat_mla_kv_quant_fp8_reference

DEVICE = "cuda"
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
#: Parts of a head: keys, rotary, values.
DIMS = [(128, 64, 128), (16, 16, 16), (1, 1, 1), (7, 33, 15), (192, 64, 128), (128, 0, 128)]

#: The ci profile has bf16 alone.
dtypes = pytest.mark.parametrize(
    "dtype", [BF16, pytest.param(torch.float16, marks=pytest.mark.jit)], ids=["bf16", "f16"]
)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same bytes, but for the sign of NaN."""
    got, want = got.float().cpu(), want.float().cpu()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


def draw(
    tokens: int,
    heads: int,
    dims: tuple[int, int, int],
    generator: torch.Generator,
    dtype: torch.dtype = BF16,
) -> tuple[torch.Tensor, torch.Tensor]:
    nope, rope, v = dims
    kv = torch.randn(tokens, heads, nope + v, device=DEVICE, generator=generator)
    kv *= torch.randint(-12, 12, kv.shape, device=DEVICE, generator=generator).float().exp2()
    special = torch.rand(kv.shape, device=DEVICE, generator=generator)
    kv = kv.where(special > 0.01, torch.inf).where(special < 0.99, -torch.inf)
    kv = kv.where((special < 0.5) | (special > 0.51), torch.nan)
    pe = torch.randn(tokens, rope, device=DEVICE, generator=generator)
    return kv.to(dtype), pe.to(dtype)


@dtypes
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 128])
def test_numbers(
    heads: int, dims: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    for tokens in (1, 37, 301):
        kv, pe = draw(tokens, heads, dims, generator, dtype)
        key = Buffer(tokens, heads, dims[0] + dims[1], dtype=E4M3)
        value = Buffer(tokens, heads, dims[2], dtype=E4M3)
        got = precast.concat_mla_kv_quant_fp8(kv, pe, key.view, value.view, nope_dim=dims[0])
        assert got[0] is key.view and got[1] is value.view
        want = concat_mla_kv_quant_fp8_reference(kv.cpu(), pe.cpu(), dims[0])
        for buffer, exactly in zip((key, value), want, strict=True):
            same(buffer.view, exactly)
            buffer.check()


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("form", ["latent", "heads first", "one head"])
def test_strides(form: str, offset: int, generator: torch.Generator) -> None:
    kv, pe = draw(45, 6, (128, 64, 128), generator)
    want = concat_mla_kv_quant_fp8_reference(kv.cpu(), pe.cpu())
    wide = torch.zeros(45, 6, 256 + 16, dtype=BF16, device=DEVICE)
    wide[..., offset : offset + 256] = kv
    kv = wide[..., offset : offset + 256]
    latent = torch.zeros(45, 576 + 16, dtype=BF16, device=DEVICE)
    latent[:, 512 + offset : 576 + offset] = pe
    pe = latent[:, 512 + offset : 576 + offset]
    if form == "heads first":
        kv = kv.transpose(0, 1).contiguous().transpose(0, 1)
    elif form == "one head":
        pe = pe[:, None]
    packed = torch.zeros(45, 6, 192 + 128, dtype=E4M3, device=DEVICE)
    got = precast.concat_mla_kv_quant_fp8(kv, pe, packed[..., :192], packed[..., 192:])
    for mine, exactly in zip(got, want, strict=True):
        same(mine, exactly)
    for mine, exactly in zip(precast.concat_mla_kv_quant_fp8(kv, pe), want, strict=True):
        same(mine, exactly)


def test_empty() -> None:
    kv, pe = (torch.empty(0, *shape, dtype=BF16, device=DEVICE) for shape in ((4, 256), (64,)))
    key, value = precast.concat_mla_kv_quant_fp8(kv, pe)
    assert (key.shape, value.shape) == ((0, 4, 192), (0, 4, 128))


def test_errors_leave_outputs_alone(generator: torch.Generator) -> None:
    kv, pe = draw(5, 4, (128, 64, 128), generator)
    key, value = Buffer(5, 4, 192, dtype=E4M3), Buffer(5, 4, 128, dtype=E4M3)
    function: Any = precast.concat_mla_kv_quant_fp8
    good = {"kv_nope": kv, "k_pe": pe, "key": key.view, "value": value.view}
    for change, words in (
        ({"kv_nope": kv.cpu()}, "kv_nope must be a CUDA tensor"),
        ({"kv_nope": kv[..., ::2]}, "kv_nope must have stride 1 in its last dimension"),
        ({"k_pe": pe.half()}, "k_pe must be bfloat16, got float16"),
        ({"k_pe": pe[1:]}, r"k_pe must have shape \[5, rope_dim\] or \[5, 1, rope_dim\], got"),
        ({"nope_dim": 256}, "nope_dim must be from 1 to below kv_nope's last dimension, 256"),
        ({"key": key.view[:, :3]}, r"key must have shape \[5, 4, 192\], got \[5, 3, 192\]"),
        ({"value": key.view[..., :128]}, "value must not overlap key's memory"),
        ({"backend": "torch"}, "backend must be one of auto, specialized, cake"),
    ):
        with pytest.raises(ValueError, match=f"concat_mla_kv_quant_fp8: {words}"):
            function(**{**good, **change})
    assert all((buffer.bytes == 0xA5).all() for buffer in (key, value))


def test_graph_compile_and_pdl(generator: torch.Generator) -> None:
    source, pe = draw(2049, 16, (128, 64, 128), generator)
    source = source.nan_to_num(0.0)
    kv = torch.empty_like(source)

    def run(pdl: bool = True) -> list[torch.Tensor]:
        precast.scale(source, 0.5, out=kv, enable_pdl=pdl)
        return [t.view(torch.uint8) for t in precast.concat_mla_kv_quant_fp8(kv, pe)]

    want = run(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for tensor in results:
        tensor.fill_(7)
    graph.replay()
    assert all(map(torch.equal, results, want))
    assert all(all(map(torch.equal, run(), want)) for _ in range(50))
    torch._dynamo.reset()
    assert all(map(torch.equal, torch.compile(run, fullgraph=True)(), want))
