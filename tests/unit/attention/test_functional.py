# SPDX-License-Identifier: Apache-2.0
"""Functions without a plan beyond numbers: dtypes, caches, workspaces, blocks, torch.compile."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from functional_calls import FUNCTIONS

import precast
from precast._op.dispatch import kernels
from precast._ops.attention import buffers
from precast._ops.attention import kernels as plan_kernels
from precast._ops.attention.functional import launch
from precast._ops.attention.functional.calls import Words

BF16, F16, E4M3, I32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 8
LENS = (5, 11)
XQA, TRTLLM = precast.xqa_batch_decode_with_kv_cache, precast.trtllm_batch_decode_with_kv_cache
CONTEXT = precast.trtllm_batch_context_with_kv_cache


def arguments(q_len: int = 1, dtype: torch.dtype = BF16, **options: Any) -> dict[str, Any]:
    """Of a decode over a block table, layout NHD."""
    g = torch.Generator().manual_seed(7)
    cache = torch.randn(4, 2, PAGE, KV_HEADS, DIM, generator=g)
    return {
        "query": torch.randn(2 * q_len, HEADS, DIM, generator=g).to(dtype),
        "kv_cache": cache.to(dtype),
        "workspace_buffer": torch.full((1 << 18,), 0xA5, dtype=torch.uint8),
        "block_tables": torch.tensor([[3, 0], [1, 2]], dtype=I32),
        "seq_lens": torch.tensor(LENS, dtype=I32),
        "max_seq_len": 16,
        "bmm1_scale": 0.125,
        "kv_layout": "NHD",
        "q_len_per_req": q_len,
        **options,
    }


# -- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", [BF16, F16, E4M3, torch.float8_e5m2, "bfloat16"])
@pytest.mark.parametrize("q_dtype", [BF16, E4M3])
def test_dtypes_that_no_kernel_has_are_converted(q_dtype, out_dtype, reference_mode):
    given = arguments(out_dtype=out_dtype)
    given["query"] = given["query"].to(q_dtype)
    exact = TRTLLM(**{**given, "query": given["query"].to(BF16), "out_dtype": BF16})
    got = TRTLLM(**given)
    wanted = getattr(torch, out_dtype) if isinstance(out_dtype, str) else out_dtype
    assert got.dtype == wanted
    assert torch.equal(got.float(), exact.to(wanted).float())


def test_outputs_have_the_dtype_of_queries_or_of_out(reference_mode):
    given = arguments()
    given["query"] = given["query"].to(E4M3)
    assert XQA(**given).dtype == TRTLLM(**given).dtype == E4M3
    out = torch.empty(2, HEADS, DIM, dtype=BF16)
    assert XQA(**given, out=out) is out
    with pytest.raises(ValueError, match=r"out_dtype must be that of out, bfloat16, got float16"):
        TRTLLM(**given, out=out, out_dtype=F16)


def test_outputs_of_8_bits_saturate(reference_mode):
    given = arguments(bmm2_scale=1e4)
    got = TRTLLM(**given, out_dtype=E4M3)
    assert got.float().abs().max() == 448


def test_the_scale_of_an_output_of_8_bits_multiplies_one_of_16(reference_mode):
    given = arguments(bmm2_scale=0.25)
    whole = XQA(**{**given, "bmm2_scale": 1.0})
    assert torch.equal(XQA(**given, o_scale=4.0), whole)
    eighth = TRTLLM(**given, o_scale=4.0, out_dtype=E4M3)
    assert torch.equal(eighth.float(), TRTLLM(**given).to(E4M3).float())


def test_converted_tensors_need_room(reference_mode):
    given = arguments(bmm2_scale=1.0, workspace_buffer=torch.zeros(600, dtype=torch.uint8))
    given["query"] = given["query"].to(E4M3)
    words = r"workspace_buffer must have 1024 bytes more to convert query or out"
    with pytest.raises(ValueError, match=words):
        XQA(**given, out=torch.empty(2, HEADS, DIM, dtype=BF16))


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_scales_of_xqa(kv_dtype, reference_mode):
    given = arguments()
    k, v = (part.to(kv_dtype) for part in given["kv_cache"].unbind(1))
    q = given["query"].unsqueeze(1)
    output, scale = torch.empty_like(q), 0.5 if kv_dtype == E4M3 else 1.0
    sizes = {"num_kv_heads": KV_HEADS, "page_size": PAGE}
    table = given["block_tables"], given["seq_lens"].unsqueeze(1)
    more = {"workspace_buffer": given["workspace_buffer"], "semaphores": output}
    precast.xqa(q, k, v, *table, output, **more, **sizes, q_scale=2.0, kv_scale=0.5)
    want = XQA(**{**given, "kv_cache": (k, v), "bmm1_scale": 0.25 * scale, "bmm2_scale": scale})
    torch.testing.assert_close(output.squeeze(1), want)


# -- caches, tables, workspaces -------------------------------------------------------------------


def test_keys_that_are_values(reference_mode):
    given = arguments()
    keys = given["kv_cache"][:, 0]
    one = XQA(**{**given, "kv_cache": keys.unsqueeze(1)})
    assert torch.equal(one, XQA(**{**given, "kv_cache": (keys, keys)}))


def test_keys_and_values_that_lie_behind_each_other(reference_mode):
    """As vLLM has them: one row of a head holds its key and its value."""
    given = arguments()
    both = torch.cat(given["kv_cache"].unbind(1), dim=-1)
    assert torch.equal(XQA(**{**given, "kv_cache": both.split(DIM, dim=-1)}), XQA(**given))


def test_rows_of_a_table_may_be_further_apart(reference_mode):
    given = arguments()
    wide = torch.full((3, 5), 99, dtype=I32)
    wide[:2, :2] = given["block_tables"]
    assert torch.equal(XQA(**{**given, "block_tables": wide[:, :2]}), XQA(**given))
    for table in (wide.t()[:2], wide[:1, :2].expand(2, 2)):
        with pytest.raises(ValueError, match=r"block_tables must have stride 1 .* do not overlap"):
            XQA(**{**given, "block_tables": table})
    with pytest.raises(ValueError, match="block_tables must have a row for each of 2 requests"):
        XQA(**{**given, "block_tables": wide[:1]})


def test_lengths_end_with_the_table(reference_mode):
    given = arguments()
    full = torch.full((2,), 2 * PAGE, dtype=I32)
    want = XQA(**{**given, "seq_lens": full})
    assert torch.equal(XQA(**{**given, "seq_lens": full + 1000}), want)
    empty = XQA(**{**given, "seq_lens": full * 0 - 3})
    assert not empty.any()


def test_a_workspace_that_is_too_small_says_how_much_it_needs(reference_mode):
    given = arguments()
    with pytest.raises(ValueError, match="workspace_buffer must have at least") as error:
        XQA(**{**given, "workspace_buffer": torch.zeros(1024, dtype=torch.uint8)})
    least = int(str(error.value).partition("at least ")[2].partition(" ")[0])
    enough = torch.zeros(least, dtype=torch.uint8)
    assert torch.equal(XQA(**{**given, "workspace_buffer": enough}), XQA(**given))
    with pytest.raises(ValueError, match=f"at least {least} bytes for 2 queries of 2 requests"):
        XQA(**{**given, "workspace_buffer": enough[:-1]})
    with pytest.raises(ValueError, match="workspace_buffer must be 16-byte aligned"):
        XQA(**{**given, "workspace_buffer": torch.zeros(1 << 18, dtype=torch.uint8)[1:]})


def test_a_mask_of_one_query_is_not_read(reference_mode):
    given = arguments()
    assert torch.equal(XQA(**given, mask=torch.zeros(1)), XQA(**given))


def test_a_causal_mask_is_the_default(reference_mode):
    given = arguments(q_len=3)
    rows = torch.tensor([[1, 0], [3, 0], [7, 0]], dtype=torch.uint16)
    causal = torch.stack((rows, rows))
    assert torch.equal(XQA(**given, mask=causal), XQA(**given))
    assert torch.equal(XQA(**given, mask=causal.view(6, 2)), XQA(**given))
    whole = torch.full_like(causal, 7) * torch.tensor([1, 0], dtype=torch.uint16)
    bounds = torch.tensor([0, 3, 6], dtype=I32)
    plain = {k: v for k, v in given.items() if k not in ("max_seq_len", "q_len_per_req")}
    want = CONTEXT(
        **plain, max_q_len=3, max_kv_len=16, bmm2_scale=1.0, batch_size=2,
        cum_seq_lens_q=bounds, cum_seq_lens_kv=bounds, causal=False,
    )  # fmt: skip
    assert torch.equal(XQA(**given, mask=whole), want)


# -- what no kernel has ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "function"),
    [
        ("kv_cache_sf", torch.ones(1), XQA),
        ("kv_cache_sf", torch.ones(1), TRTLLM),
        ("skip_softmax_threshold_scale_factor", 0.1, TRTLLM),
        ("uses_shared_paged_kv_idx", False, TRTLLM),
        ("o_sf_scale", 1.0, TRTLLM),
        ("o_sf_vec_size", 16, TRTLLM),
        ("out_dtype", "nvfp4", TRTLLM),
        ("enable_block_sparse_attention", True, TRTLLM),
        ("cp_world", 2, TRTLLM),
        ("cp_rank", 1, TRTLLM),
        ("causal_seqlens_kv_global", torch.ones(2, dtype=I32), TRTLLM),
        ("bmm1_scale_log2", torch.ones(1), TRTLLM),
        ("bf16q_fp8kv_transform_mode", "k_only", TRTLLM),
        ("request_order", torch.ones(2, dtype=I32), TRTLLM),
        ("request_order_plan", object(), TRTLLM),
    ],
)
def test_options_of_other_kernels_are_refused(option, value, function, reference_mode):
    out = torch.full((2, HEADS, DIM), 7.0, dtype=BF16)
    with pytest.raises(NotImplementedError, match=rf"{function.__name__}: {option} must"):
        function(**arguments(out=out, **{option: value}))
    assert out.eq(7).all()


def test_options_that_are_off_are_taken(reference_mode):
    given = arguments()
    for options in (
        {"skip_softmax_threshold_scale_factor": 0.0},
        {"backend": "xqa"},
        {"backend": "trtllm-gen"},
        {"multi_ctas_kv_counter_buffer": torch.zeros(1)},
    ):
        assert torch.equal(TRTLLM(**given, **options), TRTLLM(**given))
    with pytest.raises(precast.errors.BackendSupportedError, match="backend must be auto, xqa"):
        TRTLLM(**given, backend="cake")


#: FlashInfer 0.7.2's, in its order: vLLM and SGLang pass them by position and by name.
PARAMETERS = {
    "xqa_batch_decode_with_kv_cache": """
        query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale
        window_left out sinks kv_layout enable_pdl q_len_per_req o_scale mask kv_cache_sf
        q_cu_seq_lens
    """,
    "trtllm_batch_decode_with_kv_cache": """
        query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale
        window_left out out_dtype o_sf_scale o_sf_vec_size sinks kv_layout enable_pdl backend
        q_len_per_req o_scale mask max_q_len cum_seq_lens_q skip_softmax_threshold_scale_factor
        kv_cache_sf uses_shared_paged_kv_idx lse return_lse bmm1_scale_log2
        multi_ctas_kv_counter_buffer enable_block_sparse_attention cp_world cp_rank
        causal_seqlens_kv_global bf16q_fp8kv_transform_mode request_order request_order_plan
    """,
    "trtllm_batch_context_with_kv_cache": """
        query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale
        bmm2_scale batch_size cum_seq_lens_q cum_seq_lens_kv window_left out out_dtype o_sf_scale
        o_sf_vec_size kv_layout enable_pdl sinks kv_cache_sf skip_softmax_threshold_scale_factor
        uses_shared_paged_kv_idx causal lse return_lse multi_ctas_kv_counter_buffer
        use_fp16_softmax uses_spcompress backend
    """,
    "xqa": """
        q k_cache v_cache page_table seq_lens output workspace_buffer semaphores num_kv_heads
        page_size sinks q_scale kv_scale sliding_win_size kv_layout sm_count enable_pdl
        rcp_out_scale q_seq_len mask q_cu_seq_lens k_sf_cache v_sf_cache
    """,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_those_that_engines_pass(name):
    parameters = inspect.signature(getattr(precast, name)).parameters
    assert [*parameters] == PARAMETERS[name].split()


# -- params blocks --------------------------------------------------------------------------------


class Launched:
    """Exports that write down what they get, in the place of those of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packed: list[tuple[Any, ...]] = []
        self.blocks: list[torch.Tensor] = []
        self.runs: list[tuple[Any, ...]] = []
        monkeypatch.setattr(launch, "_blocks", {})
        monkeypatch.setattr(buffers, "_ranges", {})
        exports = {
            "pack_plan": lambda *args: self.packed.append(args),
            "plan": lambda workspace, block, *args: self.blocks.append(block),
        }
        for name, export in exports.items():
            monkeypatch.setitem(getattr(plan_kernels, name), (-1,), export)
        for name in FUNCTIONS:
            kernel = kernels()[name]
            run = functools.partial(kernel.around, lambda *args: self.runs.append(args))
            monkeypatch.setitem(kernel, (BF16, BF16, DIM, DIM, -1), run)


@pytest.fixture
def launched(monkeypatch):
    return Launched(monkeypatch)


def test_a_call_with_the_same_addresses_and_sizes_packs_nothing(launched):
    given = arguments(workspace_buffer=torch.zeros(1 << 20, dtype=torch.uint8))
    for scale in (0.1, 0.2):  # It is an argument of the run.
        XQA(**{**given, "bmm1_scale": scale, "out": torch.empty(2, HEADS, DIM, dtype=BF16)})
    assert len(launched.packed) == 1
    assert launched.blocks[0] is launched.blocks[1]
    assert [args[7] for args in launched.runs] == [0.1, 0.2]
    # Views of the same memory are the same.
    XQA(**{**given, "block_tables": given["block_tables"][:], "seq_lens": given["seq_lens"][:]})
    assert len(launched.packed) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"block_tables": torch.tensor([[3, 0], [1, 2]], dtype=I32)},
        {"seq_lens": torch.tensor(LENS, dtype=I32)},
        {"workspace_buffer": torch.zeros(1 << 20, dtype=torch.uint8)},
        {"window_left": 3},
        {"kv_layout": "HND", "kv_cache": torch.zeros(4, 2, KV_HEADS, PAGE, DIM, dtype=BF16)},
        {"kv_cache": torch.zeros(4, 2, 2 * PAGE, KV_HEADS, DIM, dtype=BF16)},
        {"query": torch.zeros(2, 2 * HEADS, DIM, dtype=BF16)},
        {"q_cu_seq_lens": torch.tensor([0, 1, 2], dtype=I32)},
        {"query": torch.zeros(4, HEADS, DIM, dtype=BF16), "q_len_per_req": 2},
    ],
    ids=lambda change: "-".join(change),
)
def test_another_one_packs_again(change, launched):
    given = arguments(workspace_buffer=torch.zeros(1 << 20, dtype=torch.uint8))
    XQA(**given)
    XQA(**{**given, **change})
    XQA(**given)
    assert len(launched.packed) == 2
    assert launched.blocks[0] is launched.blocks[2] is not launched.blocks[1]


def test_something_else_at_the_same_address_is_checked_again(launched):
    """The block of the call before would read it as what was there."""
    given = arguments()
    XQA(**given)
    XQA(**{**given, "seq_lens": given["seq_lens"].view(torch.int16)[:2]})
    assert len(launched.packed) == 2, "the binding refuses its dtype"
    with pytest.raises(ValueError, match="block_tables must have stride 1"):
        XQA(**{**given, "block_tables": given["block_tables"].t()})
    with pytest.raises(ValueError, match="workspace_buffer must be uint8 or int8, got"):
        XQA(**{**given, "workspace_buffer": given["workspace_buffer"].view(torch.int32)})
    assert len(launched.runs) == 2


def test_the_parts_of_a_workspace_do_not_overlap(launched):
    mask = torch.ones(2, 3, 2, dtype=torch.uint16)
    given = arguments(q_len=3, mask=mask)
    XQA(**given)
    workspace = given["workspace_buffer"]
    (_, _, _, _, _, ints, floats, bits, bits_indptr, *_) = launched.packed[0]
    begin = workspace.data_ptr()
    assert ints.data_ptr() == begin, "plan() gets the whole workspace"
    assert begin + ints.nbytes <= bits.data_ptr()
    assert bits.data_ptr() + bits.nbytes <= floats.data_ptr()
    assert floats.data_ptr() + floats.nbytes == begin + workspace.nbytes
    assert all(part.data_ptr() % 256 == begin % 256 for part in (ints, bits, floats))
    assert bits_indptr.tolist() == [0, bits.nbytes // 2, bits.nbytes]
    kept = workspace.clone()
    XQA(**given)
    assert torch.equal(kept, workspace), "the mask is written at every call"
    assert len(launched.packed) == 1


def test_pages_start_at_the_rows_of_the_table(launched):
    given = arguments()
    wide = torch.zeros(2, 7, dtype=I32)
    XQA(**{**given, "block_tables": wide[:, :2]})
    kv_indptr, qo_indptr, last, lens, indices, *_ = launched.packed[0]
    assert kv_indptr.tolist() == [0, 7, 14]
    assert qo_indptr is last is None
    assert lens is given["seq_lens"]
    assert indices.data_ptr() == wide.data_ptr()
    assert indices.shape == (9,)


def test_blocks_keep_nothing_of_the_caller_alive(launched):
    import weakref

    given = arguments()
    XQA(**given)
    alive = [weakref.ref(given[name]) for name in ("workspace_buffer", "block_tables", "seq_lens")]
    del given
    launched.packed.clear()
    launched.runs.clear()
    assert [ref() for ref in alive] == [None] * 3
    assert len(launch._blocks) == 1


def test_there_are_not_more_blocks_than_a_limit(launched, monkeypatch):
    monkeypatch.setattr(launch, "_MOST_BLOCKS", 3)
    for window in range(8):
        XQA(**arguments(window_left=window))
        assert len(launch._blocks) <= 3


def test_what_a_graph_reads_is_kept_or_its_own(monkeypatch):
    monkeypatch.setattr(buffers, "_ranges", {})
    device = torch.device("cpu")
    with monkeypatch.context() as capturing:
        capturing.setattr(buffers, "is_capturing", lambda device: True)
        own, is_kept = buffers.stepped_range(3, 5, device)
        assert (own.tolist(), is_kept) == ([0, 5, 10], False)
    kept, is_kept = buffers.stepped_range(3, 5, device)
    assert is_kept
    with monkeypatch.context() as capturing:
        capturing.setattr(buffers, "is_capturing", lambda device: True)
        more, is_kept = buffers.stepped_range(900, 5, device)
        assert is_kept
        assert more.data_ptr() == kept.data_ptr()
    monkeypatch.setattr(buffers, "_MOST_RANGES", 1)
    assert not buffers.stepped_range(3, 6, device)[1]
    assert buffers.stepped_range(4, 0, device)[0].tolist() == [0, 0, 0, 0]
    assert buffers.stepped_range(3, 2**30 - 1, device)[0].tolist() == [0, 2**30 - 1, 2**31 - 2]


def test_errors_of_bindings_get_public_names():
    from precast._ops.attention.functional.calls import renamed

    words = Words("op", query="rows", lens="lengths")
    for said, wanted in (
        ("run_paged: q must have 3 rows", "op: rows must have 3 rows"),
        ("pack_plan: kv_len must be int32, got int64", "op: lengths must be int32, got int64"),
        (
            "run_paged: out must not overlap int_workspace's memory; call .clone()",
            "op: out must not overlap workspace_buffer's memory; call .clone()",
        ),
        ("run_paged: paged_kv_cache[1] must", "op: kv_cache[1] must"),
        ("op: k_cache must be e4m3", "op: kv_cache[0] must be e4m3"),
        ("other: q must", "other: q must"),
    ):
        assert str(renamed(words, ValueError(said), is_pair=True)) == wanted
    one = renamed(words, ValueError("run_paged: k_cache must"), is_pair=False)
    assert str(one) == "op: kv_cache must"


# -- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [XQA, TRTLLM], ids=lambda f: f.__name__)
@pytest.mark.parametrize("options", [{}, {"q_len": 3}, {"as_8_bit": True}], ids=str)
def test_compiled_calls_give_the_same_numbers(function, options, reference_mode):
    q_len, as_8_bit = options.get("q_len", 1), "as_8_bit" in options
    given = arguments(q_len)
    if as_8_bit:
        given["query"] = given["query"].to(E4M3)
        given["out"] = torch.empty(2, HEADS, DIM, dtype=BF16)
    want = function(**given)
    torch._dynamo.reset()
    compiled = torch.compile(lambda **call: function(**call), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given), want, rtol=0, atol=0)


def test_compiled_calls_of_prefill_and_xqa(reference_mode):
    given, bounds = arguments(), torch.tensor([0, 1, 2], dtype=I32)
    table, lens, workspace = (given[n] for n in ("block_tables", "seq_lens", "workspace_buffer"))
    cache = given["kv_cache"].transpose(2, 3)

    def prefill(q: torch.Tensor) -> Any:
        sizes = (table, lens, 1, 16, 0.125, 1.0, 2, bounds, bounds)
        return CONTEXT(q, cache, workspace, *sizes, return_lse=True)

    def xqa(q: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(q).unsqueeze(1)
        rest = (lens.unsqueeze(1), output, workspace, workspace, KV_HEADS, PAGE)
        precast.xqa(q.unsqueeze(1), cache[:, 0], cache[:, 1], table, *rest, kv_layout="HND")
        return output

    for call in (prefill, xqa):
        torch._dynamo.reset()
        want = call(given["query"])
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(given["query"])
        torch.testing.assert_close(got, want, rtol=0, atol=0)
