# SPDX-License-Identifier: Apache-2.0
"""The same cascades, mixed batches, PODs and block-sparse matrices through FlashInfer."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from flashinfer_modules import compiled
from test_peer_attention import BF16, F16, I32, Batch, close, starts, workspaces

import precast

__all__ = ["workspaces"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)

LENS, Q_LENS = [700, 16, 3001, 255], [130, 16, 1, 77]


def both(call: Any, workspaces: list[torch.Tensor]) -> tuple[Any, Any]:
    """Results of ours and of theirs."""
    import flashinfer

    with compiled():
        theirs = call(flashinfer, workspaces[1])
    return call(precast, workspaces[0]), theirs


def same(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    lse = torch.zeros(mine.shape[:-1], device="cuda")
    close((mine, lse), (theirs, lse))


def test_levels(workspaces: list[torch.Tensor], generator: torch.Generator) -> None:
    """A prefix of four requests, and their own tokens, in one cache."""
    own = Batch(generator, [*LENS, 900])
    tables = [starts([4]), own.qo_indptr[:5]], [own.indptr[4:] - own.indptr[4], own.indptr[:5]]
    split = int(own.indptr[4])
    indices = [own.indices[split:], own.indices[:split]]
    last = [own.last[4:], own.last[:4]]

    def call(library: Any, workspace: torch.Tensor) -> torch.Tensor:
        wrapper = library.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
        wrapper.plan(*tables, indices, last, *own.sizes, **own.dtypes)
        out: torch.Tensor = wrapper.run(own.q[:4], own.cache)
        return out

    same(*both(call, workspaces))


@pytest.mark.parametrize("prefill", [False, True])
def test_one_prefix(
    prefill: bool, workspaces: list[torch.Tensor], generator: torch.Generator
) -> None:
    batch = Batch(generator, LENS, Q_LENS if prefill else None, dtype=F16)
    k, v = torch.randn(2, 900, 8, 128, device="cuda", generator=generator).half()

    def call(library: Any, workspace: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        if prefill:
            wrapper = library.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace)
            wrapper.begin_forward(batch.qo_indptr, *batch.table, *batch.sizes)
            out = wrapper.forward(batch.q, k, v, batch.cache, causal=True)
            return out
        wrapper = library.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace)
        wrapper.begin_forward(*batch.table, *batch.sizes)
        out = wrapper.forward(batch.q, k, v, batch.cache)
        return out

    same(*both(call, workspaces))


@pytest.mark.parametrize("causal", [False, True])
def test_mixed_batches(
    causal: bool, workspaces: list[torch.Tensor], generator: torch.Generator
) -> None:
    batch = Batch(generator, LENS, Q_LENS)
    lengths = torch.tensor(LENS, dtype=I32, device="cuda")

    def call(library: Any, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wrapper = library.BatchAttention("NHD", "cuda")
        heads = *batch.sizes[:2], 128, 128, batch.sizes[3]
        wrapper.plan(
            batch.qo_indptr, *batch.table[:2], lengths, *heads, causal=causal, **batch.dtypes
        )
        result: tuple[torch.Tensor, torch.Tensor] = wrapper.run(batch.q, batch.cache)
        return result

    close(*both(call, workspaces))


@pytest.mark.parametrize("causal", [False, True])
def test_a_prefill_beside_a_decode(
    causal: bool, workspaces: list[torch.Tensor], generator: torch.Generator
) -> None:
    batch, one = Batch(generator, LENS), Batch(generator, [777], [200])

    def call(library: Any, workspace: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wrapper = library.PODWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(*batch.table, *batch.sizes, **batch.dtypes)
        result: tuple[torch.Tensor, torch.Tensor]
        result = wrapper.run(one.q, one.k, one.v, batch.q, batch.cache, causal_p=causal)
        return result

    for mine, theirs in zip(*both(call, workspaces), strict=True):
        same(mine, theirs)


def test_two_batches_beside_each_other(
    workspaces: list[torch.Tensor], generator: torch.Generator
) -> None:
    prefill, decode = Batch(generator, LENS, Q_LENS), Batch(generator, LENS)

    def call(library: Any, workspace: torch.Tensor) -> Any:
        wrapper = library.BatchPODWithPagedKVCacheWrapper(workspace, "NHD")
        tables = prefill.qo_indptr, *prefill.table, decode.qo_indptr, *decode.table
        wrapper.plan(*tables, *prefill.sizes, **prefill.dtypes)
        caches = prefill.q, prefill.cache, decode.q, decode.cache
        return wrapper.run(*caches, causal_p=True, return_lse=True)

    (mine, my_lse), (theirs, their_lse) = both(call, workspaces)
    for at in range(2):
        close((mine[at], my_lse[at]), (theirs[at], their_lse[at]))


# -- block-sparse matrices ------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(64, 64), (16, 4), (1, 16)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_a_matrix_of_blocks(
    sizes: tuple[int, int],
    masked: bool,
    workspaces: list[torch.Tensor],
    generator: torch.Generator,
) -> None:
    r, c = sizes
    blocks = torch.rand(8, 12, device="cuda", generator=generator) < 0.5
    blocks[:, 0] = True  # FlashInfer's outputs of rows that see nothing are not defined.
    bounds, columns = starts(blocks.sum(1).tolist()), blocks.nonzero()[:, 1].to(I32)
    mask = torch.rand(len(columns), r, c, device="cuda", generator=generator) < 0.9
    mask[:, :, 0] = True
    shape = (8 * r, 32, 128), (12 * c, 8, 128), (12 * c, 8, 128)
    q, k, v = (torch.randn(s, device="cuda", generator=generator).half() for s in shape)

    def call(library: Any, workspace: torch.Tensor) -> Any:
        wrapper = library.BlockSparseAttentionWrapper(workspace, backend="fa2")
        more = {"mask": mask} if masked else {}
        wrapper.plan(bounds, columns, 8 * r, 12 * c, r, c, 32, 8, 128, **more)
        return wrapper.run(q, k, v, return_lse=True)

    close(*both(call, workspaces))
    assert torch.equal(
        precast.sparse.convert_bsr_mask_layout(mask, bounds),
        importlib.import_module("flashinfer.sparse").convert_bsr_mask_layout(mask, bounds),
    )


def test_blocks_of_any_sizes(workspaces: list[torch.Tensor], generator: torch.Generator) -> None:
    pytest.importorskip("einops")
    rows = torch.tensor([[40, 24, 100], [70, 71, 23]], dtype=I32, device="cuda")
    columns = torch.tensor([[64, 16, 80], [90, 6, 64]], dtype=I32, device="cuda")
    mask = torch.rand(2, 3, 3, device="cuda", generator=generator) < 0.5
    mask[..., 0] = True
    q = torch.randn(8, 164, 128, device="cuda", generator=generator).to(BF16)
    k, v = torch.randn(2, 2, 160, 128, device="cuda", generator=generator).to(BF16)

    def call(library: Any, workspace: torch.Tensor) -> Any:
        wrapper = library.VariableBlockSparseAttentionWrapper(workspace, backend="fa2")
        wrapper.plan(mask, rows, columns, 8, 2, 128, q_data_type=BF16)
        return wrapper.run(q, k, v, return_lse=True)

    close(*both(call, workspaces))


# -- variants -------------------------------------------------------------------------------------


def test_the_variant_with_sinks(workspaces: list[torch.Tensor], generator: torch.Generator) -> None:
    """With the arguments that FlashInfer's own wrapper makes."""
    batch = Batch(generator, LENS, Q_LENS)
    sink = torch.randn(32, device="cuda", generator=generator)

    def call(library: Any, workspace: torch.Tensor) -> torch.Tensor:
        variants = importlib.import_module("flashinfer.jit.attention.variants")
        kinds = ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink"
        jit_args = ["precast_peer_sink", BF16, BF16, BF16, I32, 128, 128, *kinds]
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            backend="fa2",
            jit_args=[*jit_args, variants.attention_sink_decl["fa2"]],
            jit_kwargs={"use_sliding_window": False},
        )
        plan = batch.qo_indptr, *batch.table, *batch.sizes
        wrapper.plan(*plan, causal=True, **batch.dtypes)
        out: torch.Tensor = wrapper.run(batch.q, batch.cache, sink, 128**-0.5)
        return out

    same(*both(call, workspaces))
