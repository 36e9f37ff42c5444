# SPDX-License-Identifier: Apache-2.0
"""The wrapper of MLA in reference mode: forms of a batch, contracts, graphs, what engines touch."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_arguments import assert_wrong_arguments_are_named
from mla_calls import FP8_CALLS

from precast._ops.attention.plan import PlanShape
from precast._ops.mla import tiles
from precast._ops.mla import wrapper as mla_wrapper
from precast.errors import (
    BackendSupportedError,
    PlanMismatchError,
    UnsupportedConfigError,
)
from precast.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

I32 = torch.int32
E4M3 = torch.float8_e4m3fn
BATCH: dict[str, torch.Tensor] = {
    "qo_indptr": torch.tensor([0, 2, 3], dtype=I32),
    "kv_indptr": torch.tensor([0, 2, 3], dtype=I32),
    "kv_indices": torch.tensor([3, 0, 2], dtype=I32),
    "kv_len_arr": torch.tensor([6, 3], dtype=I32),
}
TABLE = {
    "cum_seq_lens_q": BATCH["qo_indptr"],
    "block_tables": torch.tensor([[3, 0, 99], [2, 99, 99]], dtype=I32),
    "seq_lens": BATCH["kv_len_arr"],
}
OPTIONS: dict[str, Any] = {
    "num_heads": 4,
    "head_dim_ckv": 512,
    "head_dim_kpe": 64,
    "page_size": 4,
    "causal": True,
    "sm_scale": 0.07,
    "q_data_type": torch.bfloat16,
    "kv_data_type": torch.bfloat16,
}

pytestmark = pytest.mark.usefixtures("reference_mode")


def workspace() -> torch.Tensor:
    return torch.empty(64, dtype=torch.uint8)


def planned(**changes: Any) -> BatchMLAPagedAttentionWrapper:
    wrapper = BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(**{**BATCH, **OPTIONS, **changes})
    return wrapper


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    q = torch.randn(3, 4, 576, generator=g).bfloat16()
    kv = torch.randn(5, 4, 576, generator=g).bfloat16().to(dtype)
    return {
        "q_nope": q[..., :512],
        "q_pe": q[..., 512:],
        "ckv_cache": kv[..., :512],
        "kpe_cache": kv[..., 512:],
    }


def test_signatures_are_those_of_engines() -> None:
    parameters = inspect.signature(BatchMLAPagedAttentionWrapper.plan).parameters
    assert [*parameters][1:14] == [
        *("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv"),
        *("head_dim_kpe", "page_size", "causal", "sm_scale", "q_data_type", "kv_data_type"),
        "use_profiler",
    ]
    keyword = {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keyword == {
        *("metadata", "cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len", "query_layout"),
        *("kv_cache_layout", "lse_mode", "output_dtype", "output_scale", "scale_mode"),
        *("skip_softmax", "enable_pdl", "use_sinks"),
    }
    parameters = inspect.signature(BatchMLAPagedAttentionWrapper.run).parameters
    assert parameters["ckv_scale_arr"].kind is inspect.Parameter.KEYWORD_ONLY


def test_the_forms_of_a_batch_are_one() -> None:
    given = tensors()
    want = planned().run(**given)
    metadata = MLAPlanMetadata.dense(*TABLE.values(), max_q_len=2)
    both = MLAPlanMetadata.dual(*BATCH.values(), **TABLE)
    none = dict.fromkeys(BATCH)
    for form in ({**none, **TABLE}, {**none, "metadata": metadata}, {**none, "metadata": both}):
        assert torch.equal(planned(**form).run(**given), want)
    q, kv = (torch.cat([given[a], given[b]], -1) for a, b in (("q_nope", "q_pe"), [*given][2:]))
    halves = (given["q_nope"], given["q_pe"])
    caches = (given["ckv_cache"], given["kpe_cache"])
    for query in (q, halves, (q, halves), (halves, q)):
        for cache in (kv, caches, (kv, caches)):
            assert torch.equal(planned().run(query=query, kv_cache=cache), want)
    for wrong in ((*halves, q), (halves, halves), (halves,)):
        with pytest.raises(ValueError, match=r"query must be a torch\.Tensor or a tuple of two"):
            planned().run(query=wrong, kv_cache=kv)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"kv_indices": None}, ValueError, "a list of pages also needs kv_indices"),
        ({"seq_lens": BATCH["kv_len_arr"]}, ValueError, "of two forms of a batch"),
        ({"metadata": MLAPlanMetadata()}, ValueError, "metadata and qo_indptr were both given"),
        (dict.fromkeys(BATCH), TypeError, "the batch is missing"),
        ({"page_size": None}, TypeError, "missing required arguments: page_size"),
        ({"kv_len_arr": BATCH["kv_len_arr"][:1]}, ValueError, "qo_indptr must have shape"),
        ({"head_dim_ckv": 128}, UnsupportedConfigError, "must be one of 512/64, 512/0, 256/64"),
        ({"kv_data_type": torch.float16}, UnsupportedConfigError, "kv_data_type must be bfloat16"),
        ({"q_data_type": E4M3}, UnsupportedConfigError, "q_data_type must be float16"),
        ({"page_size": 0}, ValueError, "page_size must be >= 1"),
        ({"scale_mode": "bmm-tensor"}, NotImplementedError, "scale_mode must not be 'bmm-tensor'"),
        ({"scale_mode": "kv-per-tensor"}, UnsupportedConfigError, "scale_mode must be 'default'"),
        ({"scale_mode": "none"}, ValueError, "scale_mode must be 'default' or"),
        ({"skip_softmax": True}, NotImplementedError, "skip_softmax must be False"),
        ({"output_dtype": torch.float16}, UnsupportedConfigError, "output_dtype must be bfloat16"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    wrapper, given = planned(), tensors()
    before = wrapper.run(**given)
    with pytest.raises(error, match=words):
        wrapper.plan(**{**BATCH, **OPTIONS, **changes})
    assert torch.equal(wrapper.run(**given), before)  # The plan before is still there.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_indices": torch.zeros(3, 1, dtype=I32)}, "kv_indices must have one dimension, got"),
        ({"kv_indptr": BATCH["kv_indptr"][:2]}, r"kv_indptr must have shape \[3\], got \[2\]"),
        ({"kv_len_arr": torch.zeros(2, 1, dtype=I32)}, r"kv_len_arr must have shape \[2\], got"),
        ({"kv_len_arr": torch.zeros(2, dtype=I32, device="meta")}, "must be on cpu or on the host"),
    ],
)
def test_tables_that_are_not_of_one_batch_leave_the_buffers_of_graphs(
    changes: dict[str, Any], words: str
) -> None:
    wrapper, given = graph_wrapper(), tensors()
    wrapper.plan(**BATCH, **OPTIONS)
    before = wrapper.run(**given)
    with pytest.raises(ValueError, match=words):
        wrapper.plan(**{**BATCH, **changes}, **OPTIONS)
    assert torch.equal(wrapper.run(**given), before)


def test_options_that_were_checked_once_are_not_those_of_another_plan() -> None:
    """What follows from options is kept by their values, and a wrong one is refused each time."""
    for _ in range(2):
        assert planned(enable_pdl=False)._contract.enable_pdl is False
        assert planned(enable_pdl=0)._contract.enable_pdl is False
        assert planned()._contract.enable_pdl is True
        assert planned(use_sinks=True)._contract.use_sinks is True
        assert planned(q_data_type="bfloat16")._contract == planned()._contract
        assert planned()._contract.is_flat_csr
        assert not planned(**dict.fromkeys(BATCH), **TABLE)._contract.is_flat_csr
        with pytest.raises(UnsupportedConfigError, match="kv_data_type must be bfloat16"):
            planned(kv_data_type=torch.float16)
        with pytest.raises(TypeError, match="missing required arguments: num_heads, sm_scale"):
            planned(sm_scale=None, num_heads=None)
        with pytest.raises(TypeError, match="missing required arguments: num_heads"):
            planned(num_heads=None)
        with pytest.raises((TypeError, ValueError), match="head_dim_ckv"):
            planned(head_dim_ckv=[512])


def test_a_shape_with_a_tile_is_the_shape_with_both_fields_replaced() -> None:
    shape = PlanShape(*range(2, 2 + len(PlanShape._fields)))
    assert shape.with_tile(77, True) == shape._replace(block_m=77, sm90=True)


def test_other_backends_are_refused() -> None:
    for backend in ("cutlass", "xqa", "trtllm-gen", "cute-dsl", "x"):
        with pytest.raises(BackendSupportedError, match="backend="):
            BatchMLAPagedAttentionWrapper(workspace(), backend=backend)


def test_a_run_without_a_plan_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="there is no plan"):
        BatchMLAPagedAttentionWrapper(workspace()).run(**tensors())


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "ckv_cache", "kpe_cache"])
@pytest.mark.parametrize("out", [None, torch.full((3, 4, 512), 7.0, dtype=torch.bfloat16)])
def test_a_tensor_on_another_device_is_named(name: str, out: torch.Tensor | None) -> None:
    given = tensors()
    wrong = {**given, name: given[name].to("meta")}
    with pytest.raises(ValueError, match=f"{name} must be on cpu as the wrapper, got meta"):
        planned().run(**wrong, out=out)
    assert out is None or (out == 7).all()


def test_a_run_has_the_options_of_its_plan() -> None:
    given, sinks = tensors(), torch.zeros(4)
    wrapper = planned(lse_mode="basee")
    out, natural = wrapper.run(**given, return_lse=True, return_lse_base_on_e=True)
    for wrong in ({}, {"return_lse": True}):
        with pytest.raises(ValueError, match="the plan has lse_mode='basee', got a run with"):
            wrapper.run(**given, **wrong)
    _, base2 = planned().run(**given, return_lse=True)
    torch.testing.assert_close(base2 * torch.tensor(2.0).log(), natural)
    assert torch.equal(planned().run(**given), out)
    none = dict.fromkeys(BATCH)
    with pytest.raises(ValueError, match="the plan has lse_mode='none', got a run with 'base2'"):
        planned(**none, **TABLE).run(**given, return_lse=True)
    with pytest.raises(ValueError, match="the plan has use_sinks=False, got sinks"):
        planned().run(**given, sinks=sinks)
    with pytest.raises(ValueError, match="the plan has use_sinks=True, got no sinks"):
        planned(use_sinks=True).run(**given)
    with pytest.raises(ValueError, match="the plan has scale_mode='default', got a run with ckv"):
        planned().run(**given, ckv_scale=1.0, kpe_scale=1.0)
    with pytest.raises(NotImplementedError, match="profiler_buffer must be None"):
        planned().run(**given, profiler_buffer=sinks)


def test_caches_of_8_bits_need_their_scales() -> None:
    wrapper, given = planned(kv_data_type=E4M3), tensors(E4M3)
    arr = torch.full((5, 4, 4), 0.5)
    same = wrapper.run(**given, ckv_scale=0.5, kpe_scale=0.25)
    assert torch.equal(wrapper.run(**given, ckv_scale_arr=arr, kpe_scale=0.25), same)
    by_tensor = wrapper.run(**given, ckv_scale=torch.tensor(0.5), kpe_scale=torch.tensor([0.25]))
    assert torch.equal(by_tensor, same)
    for wrong in ({}, {"ckv_scale": 0.5}, {"kpe_scale": 1.0}):
        with pytest.raises(ValueError, match="kpe_scale and one of ckv_scale and ckv_scale_arr"):
            wrapper.run(**given, **wrong)
    with pytest.raises(ValueError, match="one of ckv_scale and ckv_scale_arr must be given"):
        wrapper.run(**given, ckv_scale=0.5, ckv_scale_arr=arr, kpe_scale=1.0)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="ckv_scale must be"):
            wrapper.run(**given, ckv_scale=scale, kpe_scale=1.0)
    with pytest.raises(ValueError, match="ckv_scale_arr must have shape"):
        wrapper.run(**given, ckv_scale_arr=arr[:, :2], kpe_scale=1.0)


def test_factors_of_products_take_the_place_of_the_plans() -> None:
    given = tensors()
    wrapper = planned(scale_mode="bmm-scalar", sm_scale=9.0)
    got = wrapper.run(**given, bmm1_scale=0.07, bmm2_scale=2.0)
    torch.testing.assert_close(got, planned().run(**given) * 2)
    with pytest.raises(ValueError, match="the plan has scale_mode='bmm-scalar'"):
        wrapper.run(**given)
    with pytest.raises(ValueError, match="the plan has scale_mode='bmm-scalar'"):
        wrapper.run(**given, bmm1_scale=1.0)


def test_outputs_of_8_bits() -> None:
    given = tensors()
    wrapper = planned(output_scale="per-tensor", output_dtype=E4M3)
    out = torch.zeros(3, 4, 512, dtype=E4M3)
    assert wrapper.run(**given, out=out, o_scale=0.001) is out
    want = (planned().run(**given).float() / 0.001).clamp(-448, 448)
    assert want.abs().max() == 448  # Some are saturated.
    torch.testing.assert_close(out.float(), want, rtol=2**-3, atol=2**-5)
    with pytest.raises(ValueError, match="the plan has output_scale='per-tensor', got o_scale"):
        wrapper.run(**given)
    with pytest.raises(ValueError, match="o_scale must be"):
        wrapper.run(**given, out=out, o_scale=-1.0)


def test_wrong_arguments_with_caches_of_8_bits() -> None:
    for make_call in FP8_CALLS.values():
        assert_wrong_arguments_are_named(make_call)


# -- CUDA graphs ----------------------------------------------------------------------------------


def graph_wrapper(pages: int = 4) -> BatchMLAPagedAttentionWrapper:
    sizes = {"qo_indptr": 3, "kv_indptr": 3, "kv_indices": pages, "kv_len_arr": 2}
    buffers = {name: torch.zeros(size, dtype=I32) for name, size in sizes.items()}
    return BatchMLAPagedAttentionWrapper(workspace(), use_cuda_graph=True, **buffers)


def test_plans_of_graphs_fill_the_buffers() -> None:
    wrapper, given = graph_wrapper(), tensors()
    buffers = [wrapper._qo_indptr_buf, wrapper._kv_indptr_buf, wrapper._kv_len_arr_buf]
    wrapper.plan(**BATCH, **OPTIONS)
    assert torch.equal(wrapper.run(**given), planned().run(**given))
    assert wrapper._kv_indices_buf.tolist() == [3, 0, 2, 0]
    other = {**BATCH, "kv_len_arr": torch.tensor([5, 1], dtype=I32)}
    wrapper.plan(**other, **OPTIONS)
    assert wrapper._kv_len_arr_buf.tolist() == [5, 1]
    now = [wrapper._qo_indptr_buf, wrapper._kv_indptr_buf, wrapper._kv_len_arr_buf]
    assert all(a is b for a, b in zip(buffers, now))
    assert torch.equal(wrapper.run(**given), planned(**other).run(**given))


def test_a_plan_of_the_same_memory_is_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is with lists on the device, which the host does not read."""
    monkeypatch.setattr(mla_wrapper, "total_and_longest", lambda bounds, q_len: (-1, q_len))
    batch = {name: tensor.clone() for name, tensor in BATCH.items()}
    kept = {**batch, **OPTIONS}
    wrapper = planned(**batch)
    first = wrapper._plan.block
    q, cache = torch.randn(3, 4, 576).bfloat16(), torch.randn(5, 4, 576).bfloat16()
    long = wrapper.run(query=q, kv_cache=cache)
    batch["kv_len_arr"][0] = 5
    wrapper.plan(**{**kept, **{name: tensor.view(-1) for name, tensor in batch.items()}})
    assert wrapper._plan.block is first
    short = planned(**{**batch, "kv_len_arr": torch.tensor([5, 3], dtype=I32)})
    assert torch.equal(wrapper.run(query=q, kv_cache=cache), short.run(query=q, kv_cache=cache))
    assert not torch.equal(long, wrapper.run(query=q, kv_cache=cache))

    # Other lists: of the same sizes, of more pages, of another number of requests.
    lens, one = torch.tensor([3, 2], dtype=I32), {name: t[:-1] for name, t in BATCH.items()}
    for lists in ({"kv_len_arr": lens}, {"kv_indices": torch.tensor([3, 0, 2, 1], dtype=I32)}, one):
        wrapper.plan(**{**kept, **lists})
        fresh = planned(**{**batch, **lists})
        tensors = {"query": q[: int(fresh._qo_indptr_buf[-1])], "kv_cache": cache}
        assert torch.equal(wrapper.run(**tensors), fresh.run(**tensors))
    for wrong, error, text in (
        ({"kv_indices": torch.zeros(3, 1, dtype=I32)}, ValueError, "kv_indices must have one dim"),
        ({"kv_indptr": BATCH["kv_indptr"][:2]}, ValueError, r"kv_indptr must have shape \[3\]"),
        ({"qo_indptr": None}, ValueError, "a list of pages also needs qo_indptr"),
        ({"kv_len_arr": [6, 3]}, TypeError, "kv_len_arr must be a torch.Tensor"),
    ):
        wrapper.plan(**kept)
        with pytest.raises(error, match=text):
            wrapper.plan(**{**kept, **wrong})

    gaps = torch.stack([batch["kv_indices"]] * 2, 1).flatten()
    wrapper.plan(**{**kept, "kv_indices": gaps[:3]})
    for name, tensor in batch.items():  # Its block is packed once more.
        first, other = wrapper._plan, tensor.clone()
        wrapper.plan(**{**kept, name: other})
        assert wrapper._plan.block is first.block
        assert any(table is other for table in wrapper._plan.tables)
        wrapper.plan(**kept)
    others: list[dict[str, Any]]
    others = [{"sm_scale": 0.1}, {"causal": False}, {"lse_mode": "base2"}, {"num_heads": 8}]
    others += [{"page_size": 8}, {"q_data_type": torch.float16}]
    for changes in others:
        first = wrapper._plan.block
        wrapper.plan(
            **{**kept, "kv_data_type": changes.get("q_data_type", torch.bfloat16), **changes}
        )
        assert wrapper._plan.block is not first, changes
        wrapper.plan(**kept)

    wrapper._sm_scale = 1.0
    wrapper.plan(**kept)
    assert wrapper._sm_scale == 0.07
    for name in ("_int_workspace_buffer", "_float_workspace_buffer"):
        setattr(wrapper, name, getattr(wrapper, name).clone())
        wrapper.plan(**kept)
        assert getattr(wrapper._plan, name[1:-7]) is getattr(wrapper, name)


def test_no_plan_is_left_where_the_launch_of_one_like_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mla_wrapper, "total_and_longest", lambda bounds, q_len: (-1, q_len))
    wrapper = planned(**BATCH)

    def fail(*args: object) -> None:
        raise RuntimeError("launch")

    with monkeypatch.context() as patch:
        patch.setattr(mla_wrapper.kernels, "launch", fail)
        with pytest.raises(RuntimeError, match="launch"):
            wrapper.plan(**BATCH, **OPTIONS)
    given = {
        "query": torch.zeros(3, 4, 576).bfloat16(),
        "kv_cache": torch.zeros(5, 4, 576).bfloat16(),
    }
    with pytest.raises(PlanMismatchError, match="there is no plan"):
        wrapper.run(**given)
    wrapper.plan(**BATCH, **OPTIONS)
    wrapper.run(**given)


def test_what_graphs_cannot_change_is_refused() -> None:
    wrapper = graph_wrapper(pages=2)
    with pytest.raises(ValueError, match="at most 2 pages, as many as the buffer"):
        wrapper.plan(**BATCH, **OPTIONS)
    one = {"qo_indptr": BATCH["qo_indptr"][:2], "kv_indptr": BATCH["kv_indptr"][:2]}
    with pytest.raises(ValueError, match="the batch size must be 2"):
        wrapper.plan(**{**BATCH, **one, "kv_len_arr": BATCH["kv_len_arr"][:1]}, **OPTIONS)
    with pytest.raises(ValueError, match=r"should be a torch\.Tensor in CUDA graph"):
        BatchMLAPagedAttentionWrapper(workspace(), use_cuda_graph=True)
    sizes = {"qo_indptr": 3, "kv_indptr": 4, "kv_indices": 9, "kv_len_arr": 2}
    with pytest.raises(ValueError, match="kv_indptr must have 3 elements"):
        buffers = {name: torch.zeros(size, dtype=I32) for name, size in sizes.items()}
        BatchMLAPagedAttentionWrapper(workspace(), use_cuda_graph=True, **buffers)


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_run_takes_other_lengths_and_pages(in_graph: bool) -> None:
    given = tensors()
    wrapper = graph_wrapper(6) if in_graph else BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(**BATCH, **OPTIONS)
    lens, table = torch.tensor([2, 4], dtype=I32), torch.tensor([[4, 1], [0, 3]], dtype=I32)
    got = wrapper.run(**given, kv_len=lens, page_table=table)
    csr = {
        "kv_indptr": torch.tensor([0, 2, 4], dtype=I32),
        "kv_indices": table.flatten(),
        "kv_len_arr": lens,
    }
    assert torch.equal(got, planned(**csr).run(**given))
    assert torch.equal(wrapper.run(**given), got)  # They have taken the plan's place.
    with pytest.raises(ValueError, match=r"kv_len must have shape \[2\]"):
        wrapper.run(**given, kv_len=lens[:1])
    with pytest.raises(ValueError, match="page_table must have shape"):
        wrapper.run(**given, page_table=table[0])


# -- engines --------------------------------------------------------------------------------------


def fast_plan(self: Any, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, *more: Any) -> None:
    """Plan as SGLang does where it has filled the buffers already."""
    kv_indices, kv_len, heads, ckv, _, page_size, causal, sm_scale = more
    self._causal, self._page_size, self._sm_scale = causal, page_size, sm_scale
    self._kv_indices_buf[: kv_indices.numel()] = kv_indices
    self._plan_info = self._cached_module.plan(
        self._float_workspace_buffer,
        self._int_workspace_buffer,
        self._pin_memory_int_workspace_buffer,
        qo_indptr,
        kv_indptr,
        kv_len,
        heads,
        ckv,
        causal,
    )


def test_engines_plan_with_nine_arguments() -> None:
    wrapper, given = graph_wrapper(), tensors()
    wrapper.plan(**BATCH, **OPTIONS)
    wrapper.plan = functools.partial(fast_plan, wrapper)  # type: ignore[method-assign]
    lens = torch.tensor([8, 2], dtype=I32)
    pages = torch.tensor([1, 4, 0], dtype=I32)
    wrapper.plan(BATCH["qo_indptr"], BATCH["kv_indptr"], pages, lens, 4, 512, 64, 4, False, 0.5)  # type: ignore[call-arg]
    wrapper._qo_indptr_buf.copy_(BATCH["qo_indptr"])
    wrapper._kv_indptr_buf.copy_(BATCH["kv_indptr"])
    wrapper._kv_len_arr_buf.copy_(lens)
    other = {"kv_len_arr": lens, "kv_indices": pages, "causal": False, "sm_scale": 0.5}
    assert torch.equal(wrapper.run(**given), planned(**other).run(**given))
    with pytest.raises(TypeError, match="takes 9 arguments, got 2"):
        wrapper._cached_module.plan(1, 2)
    with pytest.raises(PlanMismatchError, match="heads and head_dim_ckv must be"):
        fast_plan(wrapper, *[*BATCH.values()][:2], pages, lens, 8, 512, 64, 4, False, 0.5)


def test_engines_find_their_attributes() -> None:
    wrapper = planned()
    assert wrapper._backend == "fa2"
    assert wrapper._plan_info is not None
    assert (wrapper._page_size, wrapper._causal, wrapper._sm_scale) == (4, True, 0.07)
    assert wrapper._head_dim_ckv == 512
    assert wrapper._q_data_type is wrapper._kv_data_type is torch.bfloat16
    assert wrapper._kv_indices_buf is BATCH["kv_indices"]
    for name in ("float_workspace", "int_workspace", "pin_memory_int_workspace"):
        assert getattr(wrapper, f"_{name}_buffer").dtype is torch.uint8


# -- tiles ----------------------------------------------------------------------------------------


def test_scales_that_hopper_kernels_lack_keep_the_portable_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the first run chooses the tile again, since plan() did not know the queries."""
    monkeypatch.setattr(tiles, "runs_on_sm90", lambda *args: True)
    wrapper = planned(sm_scale=-0.1)
    assert not wrapper._plan.shape.sm90
    wrapper._settle_tile(3)
    shape = wrapper._plan.shape
    again = wrapper._with_tile(wrapper._plan.model, shape._replace(block_m=0), None, 3)
    assert not again.sm90
    assert planned()._plan.shape.sm90


def test_tiles_are_those_of_the_header() -> None:
    header = (Path(__file__).parents[3] / "include/precast/mla/tile.cuh").read_text()
    assert f"kMlaWideSharedKib = {tiles.MLA_WIDE_SHARED_KIB};" in header
    assert f"kMlaNarrowBlockM = {tiles._NARROW}, kMlaWideBlockM = {tiles._WIDE};" in header
    params = (Path(__file__).parents[3] / "include/precast/mla/params.cuh").read_text()
    assert f"kMlaSm90BlockM = {tiles.SM90_BLOCK_M};" in params


@pytest.mark.parametrize(
    ("heads", "q_len", "tokens", "want"),
    [(16, 1, 5, 16), (16, 2, 5, 16), (16, 3, 5, 64), (128, 1, 1, 64), (8, None, None, 16)],
)
def test_tiles_follow_from_rows(
    heads: int, q_len: int | None, tokens: int | None, want: int
) -> None:
    shape = PlanShape(batch_size=5, num_qo_heads=heads, num_kv_heads=1)
    assert tiles.block_m(shape, q_len, tokens, torch.device("cpu")) == want


@pytest.mark.parametrize(
    ("heads", "q_len", "tokens", "kv_dtype", "want"),
    [
        (16, 1, None, torch.float8_e4m3fn, False),
        (16, None, None, torch.float8_e4m3fn, False),
        (16, 2, None, torch.float8_e4m3fn, True),
        (16, None, 8, torch.float8_e4m3fn, True),
        (17, 1, None, torch.float8_e4m3fn, True),
        (16, 1, None, torch.bfloat16, True),
    ],
)
def test_few_rows_of_e4m3_take_the_kernels_of_every_gpu(
    heads: int,
    q_len: int | None,
    tokens: int | None,
    kv_dtype: torch.dtype,
    want: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiles, "is_hopper", lambda device: True)
    shape = PlanShape(
        batch_size=2,
        num_qo_heads=heads,
        head_dim_qk=576,
        head_dim_vo=512,
        kv_bytes=kv_dtype.itemsize,
        mla=True,
    )
    given = (torch.bfloat16, kv_dtype), shape, q_len, tokens, torch.device("cpu")
    assert tiles.suits_sm90(*given) is want
