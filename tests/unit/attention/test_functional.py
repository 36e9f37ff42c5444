# SPDX-License-Identifier: Apache-2.0
"""Functions without a plan beyond numbers: dtypes, caches, workspaces, blocks, torch.compile."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from functional_calls import FUNCTIONS
from functional_calls import decode_arguments as arguments

import precast

BF16, F16, E4M3, I32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 8
XQA, TRTLLM = precast.xqa_batch_decode_with_kv_cache, precast.trtllm_batch_decode_with_kv_cache
CONTEXT = precast.trtllm_batch_context_with_kv_cache
FMHA_V2 = precast.trtllm_fmha_v2_prefill


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
    "trtllm_fmha_v2_prefill": """
        qkv input_layout workspace_buffer seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale
        batch_size cum_seq_lens_q cum_seq_lens_kv block_tables out out_dtype sinks
        pos_encoding_mode logits_soft_cap_scale mask_mode window_left chunked_attention_size
        save_softmax_stats skip_softmax_threshold_scale_factor
    """,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_those_that_engines_pass(name):
    parameters = inspect.signature(getattr(precast, name)).parameters
    assert [*parameters] == PARAMETERS[name].split()


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


def test_compiled_calls_of_other_functions(reference_mode):
    given, bounds = arguments(), torch.tensor([0, 1, 2], dtype=I32)
    table, lens, workspace = (given[n] for n in ("block_tables", "seq_lens", "workspace_buffer"))
    cache = given["kv_cache"].transpose(2, 3)

    def context(q: torch.Tensor) -> Any:
        sizes = (table, lens, 1, 16, 0.125, 1.0, 2, bounds, bounds)
        return CONTEXT(q, cache, workspace, *sizes, return_lse=True)

    def xqa(q: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(q).unsqueeze(1)
        rest = (lens.unsqueeze(1), output, workspace, workspace, KV_HEADS, PAGE)
        precast.xqa(q.unsqueeze(1), cache[:, 0], cache[:, 1], table, *rest, kv_layout="HND")
        return output

    def packed(q: torch.Tensor) -> Any:
        sizes = (lens, 1, 16, 0.125, 1.0, 2, bounds, bounds)
        return FMHA_V2(torch.stack((q, q, q), 1), "PACKED_QKV", workspace, *sizes)

    for call in (context, xqa, packed):
        torch._dynamo.reset()
        want = call(given["query"])
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(given["query"])
        torch.testing.assert_close(got, want, rtol=0, atol=0)
