# SPDX-License-Identifier: Apache-2.0
"""The same plans and runs of MLA through FlashInfer and FlashMLA: the same numbers.

FlashInfer has a module for each dtype and head dimension; a test whose module is neither prebuilt
nor can be compiled here is skipped.
"""

from __future__ import annotations

import importlib.util
import math
import random
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
ON_HOPPER = pytest.mark.skipif(not IS_HOPPER, reason="a kernel for Hopper")


class Batch:
    """Requests over pages in any order; ckv and kpe are slices of one pool."""

    def __init__(
        self,
        kv_lens: list[int],
        q_len: int | list[int] = 1,
        heads: int = 128,
        page: int = 64,
        dtype: torch.dtype = BF16,
        kv_dtype: torch.dtype | None = None,
        kpe: int = 64,
    ) -> None:
        g = torch.Generator("cuda").manual_seed(3)
        counts = [-(-n // page) for n in kv_lens]
        total, batch = sum(counts), len(kv_lens)
        q_lens = q_len if isinstance(q_len, list) else [q_len] * batch
        shape = (sum(q_lens), heads, 512 + kpe)
        self.q = (torch.randn(shape, device="cuda", generator=g) / 2).to(dtype)
        cache = torch.randn(total, page, 512 + kpe, device="cuda", generator=g).to(dtype)
        self.cache = cache.to(kv_dtype or dtype)
        self.pages = torch.randperm(total, device="cuda", generator=g).to(I32)
        self.kv_indptr = torch.tensor([0, *counts], device="cuda").cumsum(0).to(I32)
        self.qo_indptr = torch.tensor([0, *q_lens], device="cuda").cumsum(0).to(I32)
        self.lens = torch.tensor(kv_lens, device="cuda", dtype=I32)
        width = max(counts)
        self.table = torch.zeros(batch, width, device="cuda", dtype=I32)
        for i, count in enumerate(counts):
            begin = int(self.kv_indptr[i])
            self.table[i, :count] = self.pages[begin : begin + count]
        self.heads, self.page, self.kpe, self.most_queries = heads, page, kpe, max(q_lens)

    @property
    def csr(self) -> tuple[torch.Tensor, ...]:
        return self.qo_indptr, self.kv_indptr, self.pages, self.lens

    @property
    def dense(self) -> dict[str, torch.Tensor]:
        return {"cum_seq_lens_q": self.qo_indptr, "block_tables": self.table, "seq_lens": self.lens}

    def options(self, causal: bool = True) -> dict[str, Any]:
        """What plan() takes besides the tables."""
        return {
            "num_heads": self.heads,
            "head_dim_ckv": 512,
            "head_dim_kpe": self.kpe,
            "page_size": self.page,
            "causal": causal,
            "sm_scale": SCALE,
            "q_data_type": self.q.dtype,
            "kv_data_type": self.cache.dtype,
        }

    def halves(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Queries and the cache as pairs."""
        widths = [512, self.kpe]
        return {"query": self.q.split(widths, -1), "kv_cache": self.cache.split(widths, -1)}

    def whole(self) -> dict[str, torch.Tensor]:
        return {"query": self.q, "kv_cache": self.cache}


def random_batch(seed: int, dtype: torch.dtype) -> Batch:
    """Requests of any lengths; none has more queries than tokens."""
    rng = random.Random(seed)
    count = rng.choice([1, 2, 3, 7, 20])
    kv_lens = [rng.choice([rng.randint(1, 70), rng.randint(1, 1500)]) for _ in range(count)]
    q_lens = [min(n, rng.choice([1, 1, 2, rng.randint(1, 9)])) for n in kv_lens]
    # Heads that divide 64: FlashInfer refuses others where a tile's edge is at a block's.
    heads = rng.choice([1, 2, 8, 16, 32, 64, 128])
    return Batch(kv_lens, q_lens, heads, rng.choice([1, 2, 16, 64, 128]), dtype)


def call(library: Any, batch: Batch, backend: str, causal: bool, **scales: Any) -> Any:
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    wrapper.plan(*batch.csr, **batch.options(causal))
    q, kv = (t.split([512, batch.kpe], -1) for t in (batch.q, batch.cache))
    return wrapper.run(*q, *kv, return_lse=True, **scales)


def close(mine: Any, theirs: Any, dtype: torch.dtype) -> None:
    row = tolerance_of_attention(dtype)
    # Twice, for both round.
    torch.testing.assert_close(mine[0], theirs[0], rtol=2 * row.rtol, atol=2 * row.atol)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-3, atol=4e-3)


@pytest.mark.skipif(not HAS_FLASHINFER, reason="flashinfer is not installed")
@pytest.mark.parametrize("theirs", ["fa2", pytest.param("fa3", marks=ON_HOPPER)])
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
def test_flashinfer(shape: dict[str, Any], causal: bool, theirs: str) -> None:
    import flashinfer.mla

    batch = Batch(**shape)
    with compiled():
        expected = call(flashinfer.mla, batch, theirs, causal)
    for backend in ("fa2", "auto"):
        close(call(precast.mla, batch, backend, causal), expected, batch.q.dtype)


@pytest.mark.skipif(not HAS_FLASHINFER, reason="flashinfer is not installed")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_flashinfer_with_random_batches(dtype: torch.dtype) -> None:
    import flashinfer.mla

    for seed in range(30):
        batch, causal = random_batch(seed, dtype), seed % 3 > 0
        with compiled():
            theirs = call(flashinfer.mla, batch, "fa2", causal)
        for backend in ("fa2", "auto"):
            close(call(precast.mla, batch, backend, causal), theirs, dtype)


#: How plan() is given a batch, and run() its tensors.
FORMS: dict[str, Any] = {
    "a list": lambda library, b: {"metadata": library.MLAPlanMetadata.csr(*b.csr)},
    "a table": lambda library, b: {"metadata": library.MLAPlanMetadata.dense(**b.dense)},
    "both": lambda library, b: {"metadata": library.MLAPlanMetadata.dual(*b.csr, **b.dense)},
    "a table's tensors": lambda library, b: b.dense,
    "a list on the host": lambda library, b: {
        "metadata": library.MLAPlanMetadata.csr(*(t.cpu() for t in b.csr))
    },
    "a table with max_q_len": lambda library, b: {
        "metadata": library.MLAPlanMetadata.dense(**b.dense, max_q_len=b.most_queries)
    },
}


@pytest.mark.skipif(not HAS_FLASHINFER, reason="flashinfer is not installed")
@pytest.mark.parametrize("layout", ["split", "packed", "both"])
@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_a_batch_and_of_its_tensors_are_theirs(form: str, layout: str) -> None:
    import flashinfer.mla

    batch = Batch([700, 64, 1000, 5], [1, 3, 2, 5], heads=16, page=16)
    tensors: dict[str, Any] = batch.halves() if layout == "split" else batch.whole()
    if layout == "both":
        tensors = {name: (whole, batch.halves()[name]) for name, whole in batch.whole().items()}
    planned = "split" if layout == "split" else "packed"
    results = []
    for library, backend in ((flashinfer.mla, "fa2"), (precast.mla, "fa2"), (precast.mla, "auto")):
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        for lse_mode in ("base2", "basee"):
            layouts = {"query_layout": planned, "kv_cache_layout": planned, "lse_mode": lse_mode}
            with compiled():
                wrapper.plan(**FORMS[form](library, batch), **batch.options(), **layouts)
            is_natural = lse_mode == "basee"
            found = wrapper.run(**tensors, return_lse=True, return_lse_base_on_e=is_natural)
            results.append((library, found))
    for i, (library, mine) in enumerate(results):
        if library is precast.mla:
            close(mine, results[i % 2][1], BF16)


#: Changes of a sound plan that no backend of either library takes, whatever it computes.
WRONG_PLANS: dict[str, dict[str, Any]] = {
    "a list without pages": {"kv_indices": None},
    "no batch": dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")),
    "max_q_len with a list": {"max_q_len": 5},
    "two forms": {"seq_lens": torch.ones(2, dtype=I32)},
    "metadata of another type": {
        **dict.fromkeys(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")),
        "metadata": (1, 2),
    },
    "no heads": {"num_heads": None},
    "no causal": {"causal": None},
    "no scale": {"sm_scale": None},
    "heads of 0": {"num_heads": 0},
    "heads as a float": {"num_heads": 16.0},
    "pages of 0": {"page_size": 0},
    "an infinite scale": {"sm_scale": math.inf},
    "columns of no kernel": {"head_dim_ckv": 500},
    "a word of lse_mode": {"lse_mode": "ln"},
    "a word of query_layout": {"query_layout": "both"},
    "a word of output_scale": {"output_scale": "per-token"},
    "a word of scale_mode": {"scale_mode": "none"},
    "scales of a cache of 16 bits": {"scale_mode": "kv-per-tensor"},
    "queries of 8 bits": {"q_data_type": E4M3},
    "a cache of another type": {"kv_data_type": F16},
    "outputs of another type": {"output_dtype": F16},
}


@pytest.mark.skipif(not HAS_FLASHINFER, reason="flashinfer is not installed")
@pytest.mark.parametrize("what", WRONG_PLANS)
def test_plans_that_they_refuse_are_refused_by_an_error_of_their_class(what: str) -> None:
    import flashinfer.mla

    batch = Batch([70, 64], heads=16)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    given = {**dict(zip(names, batch.csr)), **batch.options(), **WRONG_PLANS[what]}
    raised = []
    for library in (flashinfer.mla, precast.mla):
        workspace = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend="fa2")
        with pytest.raises((TypeError, ValueError)) as caught:
            wrapper.plan(**given)
        raised.append(caught.value)
    theirs, mine = raised
    assert isinstance(mine, TypeError if isinstance(theirs, TypeError) else ValueError), theirs


def wrong_runs(batch: Batch) -> dict[str, dict[str, Any]]:
    """Changes of a sound run that neither library takes."""
    (q_nope, q_pe), whole = batch.halves()["query"], batch.whole()
    sums = torch.zeros(batch.q.shape[:2], device="cuda")
    return {
        "a log-sum-exp that was not planned": {"return_lse": True},
        "its memory alone": {"lse": sums},
        "no queries": {"query": None},
        "queries in two forms": {"q_nope": q_nope, "q_pe": q_pe},
        "queries without a rotary part": {"query": None, "q_nope": q_nope},
        "three parts": {"query": (q_nope, q_pe, q_pe)},
        "a list of parts": {"query": [q_nope, q_pe]},
        "a pair of pairs": {"query": ((q_nope, q_pe), (q_nope, q_pe))},
        "no cache": {"kv_cache": None},
        "queries of another type": {"query": whole["query"].half()},
        "a cache of another type": {"kv_cache": whole["kv_cache"].half()},
        "queries of fewer columns": {"query": whole["query"][..., 1:]},
        "outputs of another type": {"out": torch.empty_like(q_nope, dtype=F16)},
        "a scale of outputs": {"o_scale": 1.0},
        "sinks that were not planned": {"sinks": torch.zeros(batch.heads, device="cuda")},
        "scales of a cache of 16 bits": {"ckv_scale": 1.0, "kpe_scale": 1.0},
        "one factor of products": {"bmm1_scale": 1.0},
        "factors that were not planned": {"bmm1_scale": 1.0, "bmm2_scale": 1.0},
    }


@pytest.mark.skipif(not HAS_FLASHINFER, reason="flashinfer is not installed")
def test_runs_that_they_refuse_are_refused_by_an_error_of_their_class() -> None:
    import flashinfer.mla

    batch = Batch([70, 64], heads=16)
    wrappers = []
    for library in (flashinfer.mla, precast.mla):
        workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend="fa2")
        with compiled():
            wrapper.plan(metadata=library.MLAPlanMetadata.csr(*batch.csr), **batch.options())
        wrappers.append(wrapper)
    for what, changes in wrong_runs(batch).items():
        given = {**batch.whole(), **changes}
        raised = []
        for wrapper in wrappers:
            try:
                wrapper.run(**given)
            except (TypeError, ValueError) as error:
                raised.append(error)
        assert len(raised) == 2, f"{what}: {raised}"
        kind = TypeError if isinstance(raised[0], TypeError) else ValueError
        assert isinstance(raised[1], kind), f"{what}: {raised}"
    close_outputs = [wrapper.run(**batch.whole()) for wrapper in wrappers]
    row = tolerance_of_attention(BF16)
    torch.testing.assert_close(*close_outputs, rtol=2 * row.rtol, atol=2 * row.atol)


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


def flashmla(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of FlashMLA, whose requests have equally many queries."""
    import flash_mla

    count, queries = len(batch.lens), batch.most_queries
    metadata, splits = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        batch.q.view(count, queries, batch.heads, 576),
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
    lse = lse.transpose(1, 2).reshape(-1, batch.heads) / math.log(2.0)
    return out.view(-1, batch.heads, 512), lse


@pytest.mark.skipif(not (HAS_FLASHMLA and IS_HOPPER), reason="needs flash_mla on Hopper")
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2])
def test_flashmla(heads: int, q_len: int) -> None:
    batch = Batch([700, 64, 4000, 3000], q_len=q_len, heads=heads)
    close(call(precast.mla, batch, "auto", True), flashmla(batch), BF16)


@pytest.mark.skipif(not (HAS_FLASHMLA and IS_HOPPER), reason="needs flash_mla on Hopper")
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_flashmla_with_random_batches(dtype: torch.dtype) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        queries = rng.choice([1, 1, 2, 5])
        kv_lens = [rng.randint(queries, 1500) for _ in range(rng.choice([1, 3, 20]))]
        batch = Batch(kv_lens, queries, rng.choice([16, 32, 64, 128]), 64, dtype)
        close(call(precast.mla, batch, "auto", True), flashmla(batch), dtype)


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
