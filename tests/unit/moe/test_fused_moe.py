# SPDX-License-Identifier: Apache-2.0
"""The fused mixture of experts in reference mode: float64, memory, torch.compile, errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_support import COMPUTED, E4M3, Experts, draw

import precast
from precast import fused_moe
from precast._ops.moe import _activation_reference, _experts, _rows, moe_sort
from precast._ops.moe.moe_finalize import FINALIZE
from precast.errors import BackendSupportedError
from precast.tllm_enums import ActivationType

pytestmark = pytest.mark.usefixtures("reference_mode")

ROOT = Path(__file__).parents[3]
MODES = ("half", "fp8", "blocks", "mxfp4", "int4")
#: Modes whose tokens are bfloat16 alone.
PACKED = ("mxfp4", "int4")

modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(23)


def constants_of(header: str) -> dict[str, str]:
    text = (ROOT / "include/precast/moe" / header).read_text()
    return dict(re.findall(r"constexpr \w+ (k\w+) = ([^;]+);", text))


def test_constants_are_those_of_the_kernels() -> None:
    sort, rows = constants_of("moe_sort.cuh"), constants_of("expert_rows.cuh")
    assert int(sort["kMaxSortExperts"]) == moe_sort.MAX_EXPERTS
    assert int(sort["kSortThreads"]) * int(sort["kSortSteps"]) == moe_sort.CHUNK
    assert int(rows["kExpertGroup"]) == _rows.GROUP
    assert float(rows["kExpertEps"].rstrip("f")) == _rows.EPS
    assert int(constants_of("moe_activation.cuh")["kExpertColumns"]) == _rows.VECTOR


def test_functions_have_one_number_everywhere() -> None:
    text = (ROOT / "include/precast/core/expert_functions.cuh").read_text()
    body = text.partition("enum class ExpertFunction")[2].partition("};")[0]
    of_kernel = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+),", body)}
    of_enum = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", act.name).lower(): act.value for act in COMPUTED}
    assert of_kernel == of_enum
    for name, number in of_enum.items():
        if name != "identity":
            assert getattr(_activation_reference, name.upper()) == number
    gated = {act for act in COMPUTED if _activation_reference.is_gated(act)}
    assert gated == {act for act in COMPUTED if act.is_gated}


def test_the_order_of_rows(generator: torch.Generator) -> None:
    selected = torch.randint(-2, 12, (57, 3), generator=generator, dtype=torch.int32)
    offsets, rows, experts = fused_moe.moe_sort(selected, 5, 4)
    want: list[list[tuple[int, int]]] = [[] for _ in range(5)]
    for token, slots in enumerate(selected.tolist()):
        for slot, expert in enumerate(slots):
            if 4 <= expert < 9:
                want[expert - 4].append((token, slot))
    flat = [pair for pairs in want for pair in pairs]
    assert offsets.tolist() == [sum(map(len, want[:e])) for e in range(6)]
    for row, (token, slot) in enumerate(flat):
        assert rows[token, slot] == row
        assert selected[token, slot] - 4 == experts[row]
    assert (rows >= 0).sum() == len(flat)


@modes
@pytest.mark.parametrize("act", COMPUTED, ids=lambda act: act.name)
def test_numbers(act: ActivationType, mode: str, generator: torch.Generator) -> None:
    for dtype, biases in ((torch.bfloat16, True), (torch.float16, False)):
        if mode in PACKED and dtype is torch.float16:
            continue
        call = draw(
            *(19, 3, 4, 128, 128, generator, dtype, mode, act, biases),
            ep_size=2,
            ep_rank=1,
        )
        call.check(call.run())


@modes
def test_the_reference_is_what_reference_mode_does(mode: str, generator: torch.Generator) -> None:
    for act in (ActivationType.SwigluBias, ActivationType.Relu2):
        call = draw(
            *(19, 3, 4, 128, 256, generator, torch.bfloat16, mode, act, True),
            ep_size=2,
            ep_rank=1,
        )
        ignored = ("ep_size",)
        options = {name: given for name, given in call.options.items() if name not in ignored}
        want = fused_moe.cutlass_fused_moe_reference(
            *(call.x, call.selected, call.weights, call.fc1, call.fc2, call.dtype, call.scales),
            **options,
        )
        assert torch.equal(call.run(), want)


def test_the_first_half_is_up_and_the_second_gate() -> None:
    """The gate decides: with a gate of minus infinity, nothing passes."""
    x = torch.ones(1, 8).half()
    fc1 = torch.zeros(1, 16, 8).half()
    fc1[:, :8], fc1[:, 8:] = 1, -1000
    fc2 = torch.ones(1, 8, 8).half()
    experts = torch.zeros(1, 1, dtype=torch.int32)
    given = (x, experts, None, fc1, fc2, torch.float16, None)
    assert (fused_moe.cutlass_fused_moe(*given)[0] == 0).all()
    fc1[:, :8], fc1[:, 8:] = -1000, 0
    assert (fused_moe.cutlass_fused_moe(*given)[0] == 0).all()
    fc1[:, :8], fc1[:, 8:] = 1, 1
    assert (fused_moe.cutlass_fused_moe(*given)[0] > 500).all()


def test_numbers_of_swiglu_turn_it_into_swiglu_bias(generator: torch.Generator) -> None:
    call = draw(9, 2, 3, 16, 16, generator, act=ActivationType.SwigluBias)
    want = call.run()
    assert torch.equal(call.run(activation_type=ActivationType.Swiglu), want)
    assert not torch.equal(
        call.run(activation_type=3, swiglu_alpha=None, swiglu_beta=None, swiglu_limit=None), want
    )


def test_where_the_first_product_computes_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    act, cuda, bias = ActivationType, torch.device("cuda", 0), torch.ones(1)
    modes = list(_experts.Mode)
    for is_hopper in (True, False):
        monkeypatch.setattr(_experts, "is_hopper", lambda device, is_hopper=is_hopper: is_hopper)
        for rows in (1, _experts.FUSED_ROWS):
            fused = [
                (mode, function, given)
                for mode in modes
                for function in COMPUTED
                for given in (None, bias)
                if _experts.is_fused(mode, function, cuda, given, rows)
            ]
            half, blocks = _experts.Mode.HALF, _experts.Mode.FP8_BLOCKS
            want = [(half, f, given) for f in COMPUTED if f.is_gated for given in (None, bias)]
            if rows > 1:
                want.append((blocks, act.Swiglu, None))
            assert fused == (want if is_hopper else [])


def test_the_sums_know_over_how_many_ranks_experts_are_spread(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    launched: list[int] = []
    launch = FINALIZE.launch
    monkeypatch.setattr(FINALIZE, "launch", lambda *a: (launched.append(a[-2]), launch(*a))[0])
    for ep_size in (1, 4):
        draw(9, 2, 8, 16, 16, generator, ep_size=ep_size).run()
    assert launched == [1, 4]


@modes
def test_memory_that_the_caller_brings(mode: str, generator: torch.Generator) -> None:
    call = draw(23, 4, 3, 128, 128, generator, mode=mode, ep_size=2)
    sizes = (128, 128, 6, 4)
    options = {"ep_size": 2, **call.sizing}
    size = fused_moe.cutlass_fused_moe_workspace_size(23, *sizes, **options)
    memory = torch.full((size + 128,), 0xFF, dtype=torch.uint8)
    at = -memory.data_ptr() % 128
    out = torch.full((23, 128), torch.nan, dtype=torch.bfloat16)
    got = call.run(workspace_buffer=memory[at : at + size], output=out)
    assert got is out
    assert torch.equal(got, call.run())
    call.check(got)
    assert (memory[at + size :] == 0xFF).all()
    more = fused_moe.cutlass_fused_moe_workspace_size(24, *sizes, **options)
    assert more >= size


def test_a_workspace_for_many_tokens_holds_the_counts_of_the_sort() -> None:
    def size(tokens: int) -> int:
        return fused_moe.cutlass_fused_moe_workspace_size(
            *(tokens, 64, 64, 256, 8), x_dtype=torch.bfloat16, weight_dtype=torch.bfloat16
        )

    per_token = 8 * (4 + 4 + 2 * (64 + 64 + 128))
    assert size(512) < 512 * per_token + 4096
    assert size(1024) >= 1024 * per_token + 2 * 256 * 4


@modes
def test_compiled(mode: str, generator: torch.Generator) -> None:
    call = draw(20, 4, 3, 128, 128, generator, mode=mode)
    given = (call.selected, call.weights, call.fc1, call.fc2, call.dtype, call.scales)

    def double(x: torch.Tensor) -> torch.Tensor:
        return fused_moe.cutlass_fused_moe(x, *given, **call.options)[0] * 2

    torch._dynamo.reset()
    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(call.x), call.run() * 2)


def test_scales_of_mxfp4_are_bytes_words_or_e8m0(generator: torch.Generator) -> None:
    call = draw(9, 2, 3, 128, 256, generator, mode="mxfp4")
    want = call.run()
    assert call.scales is not None
    words = call.scales
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        call.scales = [scale.view(dtype) for scale in words]
        assert torch.equal(call.run(), want)


def test_mxfp4_is_bf16_weights_of_the_same_values(generator: torch.Generator) -> None:
    call = draw(19, 3, 4, 256, 128, generator, mode="mxfp4", act=ActivationType.SwigluBias)
    want = call.run()
    assert call.values is not None
    plain = Experts(**{**call.__dict__, "scales": None, "values": None})
    plain.fc1, plain.fc2 = call.values
    assert torch.equal(plain.run(use_w4_group_scaling=False), want)


def test_int4_without_scales_of_columns_and_factors(generator: torch.Generator) -> None:
    call = draw(19, 3, 4, 256, 128, generator, mode="int4")
    assert call.scales is not None
    call.x *= 16
    call.scales[2:] = [torch.empty(0)] * 6
    call.check(call.run())
    want = call.run()
    ones = [torch.ones(n).bfloat16() for n in (256, 128)]
    call.scales[2:] = [ones[0][None], ones[1][:, None], *call.scales[4:6], *(torch.ones(4),) * 2]
    assert torch.equal(call.run(), want)


def test_no_tokens_and_no_local_experts(generator: torch.Generator) -> None:
    call = draw(0, 4, 3, 128, 128, generator)
    assert call.run().shape == (0, 128)
    call = draw(5, 2, 3, 128, 128, generator)
    call.selected.fill_(3)
    assert (call.run() == 0).all()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"use_w4_group_scaling": True},
        BackendSupportedError,
        "torch.bfloat16 results and use_w4_group_scaling; there are",
    ),
    ({"use_mxfp8_act_scaling": True}, BackendSupportedError, "calls with use_mxfp8_act_scaling"),
    ({"min_latency_mode": True}, BackendSupportedError, "calls with min_latency_mode"),
    (
        {"use_packed_weights": True},
        BackendSupportedError,
        "use_packed_weights, but without use_w4_group_scaling",
    ),
    ({"use_wfp4afp8_humming": True}, BackendSupportedError, "calls with use_wfp4afp8_humming"),
    ({"cluster_size": 2}, BackendSupportedError, "calls with cluster_size"),
    ({"input_sf": torch.ones(1)}, BackendSupportedError, "calls with input_sf"),
    ({"situ_beta": torch.ones(4)}, BackendSupportedError, "calls with situ_beta"),
    ({"backend": "cake"}, BackendSupportedError, "backend='cake'"),
    ({"backend": "x"}, ValueError, "backend must be 'cutlass', got 'x'"),
    ({"clamped_relu2_limit": torch.ones(1)}, ValueError, "supported only with"),
    ({"activation_type": 10}, BackendSupportedError, "Situ; there are Gelu, Relu, Silu, Swiglu"),
    ({"activation_type": 99}, ValueError, "activation_type must be that of an ActivationType"),
    ({"use_deepseek_fp8_block_scale": True}, BackendSupportedError, "use_deepseek_fp8_block_sc"),
    ({"ep_rank": 1}, ValueError, r"ep_rank must be in \[0, 1\), got 1"),
    ({"tp_size": 0}, ValueError, "tp_size must be positive, got 0"),
    ({"profile_ids": [0]}, ValueError, "profile_ids must contain"),
    ({"swiglu_beta": torch.ones(5)}, ValueError, r"swiglu_beta must have shape \[4\], got \[5\]"),
    ({"fc1_expert_biases": torch.ones(4, 256)}, ValueError, "fc1_expert_biases must be torch.bf"),
    ({"output": torch.ones(5, 64)}, ValueError, r"output must be torch\.bfloat16"),
    ({"workspace_buffer": torch.empty(9)}, ValueError, "workspace_buffer must be uint8 or int8"),
    (
        {"workspace_buffer": torch.empty(256, dtype=torch.uint8)},
        ValueError,
        "Fix: make it with cutlass_fused_moe_workspace_size",
    ),
]


@pytest.mark.parametrize(("options", "kind", "words"), WRONG, ids=lambda value: None)
def test_what_is_refused(
    options: dict[str, Any], kind: type[Exception], words: str, generator: torch.Generator
) -> None:
    call = draw(5, 2, 4, 64, 128, generator)
    out = torch.full((5, 64), 7.0, dtype=torch.bfloat16)
    with pytest.raises(kind, match=words.replace("torch.bf", r"torch\.bf")) as error:
        call.run(**{"output": out, **options})
    assert str(error.value).startswith("cutlass_fused_moe: ")
    assert (out == 7).all()


def test_operands_that_do_not_fit(generator: torch.Generator) -> None:
    good = draw(5, 2, 4, 64, 128, generator)
    for name, value, words in (
        ("x", good.x[:, :32].contiguous(), "fc2_expert_weights must have shape"),
        ("x", good.x[0], "input must have 2 dimensions"),
        ("x", good.x.T.contiguous().T, "input must be contiguous"),
        ("selected", good.selected.long(), r"token_selected_experts must be torch\.int32"),
        ("selected", good.selected[:, :0], "token_selected_experts must have columns"),
        ("weights", good.selected, r"token_final_scales must be torch\.float32"),
        ("fc1", good.fc1[:3], r"fc1_expert_weights must have shape \[4, 256, 64\]"),
        ("fc2", good.fc2[:, :, :100].contiguous(), "the intermediate size must be a positive mul"),
    ):
        call = Experts(**{**good.__dict__, name: value})
        with pytest.raises(ValueError, match=words):
            call.run()
    call = draw(5, 2, 4, 128, 128, generator, mode="blocks")
    assert call.scales is not None
    call.scales = call.scales[:1]
    with pytest.raises(ValueError, match="quant_scales must hold 2 tensors"):
        call.run()
    call = draw(5, 2, 4, 128, 128, generator, mode="mxfp4")
    assert call.scales is not None
    for scale, words in (
        (call.scales[0][:2], r"quant_scales\[0\] must have shape \[4, 4, 1, 16, 16\], got \[2"),
        (call.scales[0].float(), r"quant_scales\[0\] must be torch\.uint8, got torch\.float32"),
        (call.scales[0].mT, r"quant_scales\[0\] must be torch\.uint8, got torch\.int32"),
    ):
        wrong = Experts(**{**call.__dict__, "scales": [scale, call.scales[1]]})
        with pytest.raises(ValueError, match=words):
            wrong.run()
    call = draw(5, 2, 4, 128, 256, generator, mode="int4")
    assert call.scales is not None
    one = torch.ones(1).bfloat16()
    for i, scale, words in (
        (0, call.scales[0][:2], r"quant_scales\[0\] must have shape \[4, 8, 1, 8, 8\], got \[2"),
        (0, call.scales[0].flatten(1), "interleave_moe_scales_for_sm90_mixed_gemm"),
        (1, call.scales[1].float(), r"quant_scales\[1\] must be torch\.bfloat16, got torch\.float"),
        (2, one, r"quant_scales\[2\] must have 128 elements, one for each column, or none, got sh"),
        (3, call.scales[3].float(), r"quant_scales\[3\] must be torch\.bfloat16, got torch\.float"),
        (4, one, r"quant_scales\[4\] must have no elements"),
        (6, call.scales[6][:2], r"quant_scales\[6\] must have shape \[4\], got \[2\]"),
        (7, call.scales[7].double(), r"quant_scales\[7\] must be torch\.float32, got torch\.floa"),
    ):
        scales = [*call.scales[:i], scale, *call.scales[i + 1 :]]
        with pytest.raises(ValueError, match=words):
            Experts(**{**call.__dict__, "scales": scales}).run()
    with pytest.raises(ValueError, match="quant_scales must hold 8 tensors for this mode, got 2"):
        Experts(**{**call.__dict__, "scales": call.scales[:2]}).run()
    half = Experts(**{**call.__dict__, "fc2": call.fc2[:, :, :32].contiguous()})
    with pytest.raises(ValueError, match="intermediate size must be a positive multiple of 128"):
        half.run()
    call = draw(5, 2, 4, 128, 128, generator, mode="fp8")
    assert call.scales is not None
    call.scales[0] = call.scales[0][:2]
    with pytest.raises(ValueError, match=r"quant_scales\[0\] must have shape \[4\], got \[2\]"):
        call.run()
    assert call.x.dtype is E4M3


def test_sizes_of_a_workspace_that_are_refused() -> None:
    def size(*sizes: int, **options: Any) -> int:
        given = {"x_dtype": torch.half, "weight_dtype": torch.half, "output_dtype": torch.half}
        return fused_moe.cutlass_fused_moe_workspace_size(*sizes, **{**given, **options})

    for sizes, options, words in (
        ((0, 8, 8, 2, 1), {}, "max_num_tokens must be positive, got 0"),
        ((1, 8, 8, 3, 1), {"ep_size": 2}, "num_experts_total must be divisible by ep_size, 2"),
        ((1, 12, 8, 2, 1), {}, "the hidden size must be a positive multiple of 8, got 12"),
        ((1, 8, 8, 2000, 1), {}, "a rank must have 1 to 1024 experts, got 2000"),
        ((1, 8, 8, 2, 1), {"backend": "cake"}, "backend must be 'cutlass', got 'cake'"),
    ):
        with pytest.raises(ValueError, match=words):
            size(*sizes, **options)
    with pytest.raises(BackendSupportedError, match="calls with use_packed_weights"):
        size(1, 8, 8, 2, 1, use_packed_weights=True)


@modes
def test_calls_that_are_known_are_checked_as_new_ones(
    mode: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What differs from a legal call by anything but addresses is looked at, and so are these."""
    monkeypatch.setattr(_experts, "_KNOWN", {})
    call = draw(5, 2, 4, 128, 128, generator, mode=mode, biases=True)
    out = torch.zeros(5, 128, dtype=torch.bfloat16)
    size = fused_moe.cutlass_fused_moe_workspace_size(5, 128, 128, 4, 2, **call.sizing)
    room = torch.zeros(size + 128, dtype=torch.uint8)
    at = -room.data_ptr() % 128
    memory = room[at : at + size]
    for _ in range(2):
        want = call.run(output=out, workspace_buffer=memory).clone()
    assert len(_experts._KNOWN) == 1
    out.fill_(7)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"output": out[:, :64]}, "output must have shape"),
        ({"output": out.float()}, r"output must be torch\.bfloat16"),
        ({"output": out.T.contiguous().T}, "output must be contiguous"),
        ({"workspace_buffer": memory[:-256]}, "workspace_buffer must have at least"),
        ({"workspace_buffer": room[at + 8 : at + 8 + size]}, "must start at a multiple of 128"),
        ({"fc2_expert_biases": call.options["fc1_expert_biases"]}, "fc2_expert_biases must have"),
        ({"ep_size": 2, "ep_rank": 2}, "ep_rank must be in"),
        ({"min_latency_mode": True}, "calls with min_latency_mode"),
        ({"backend": "trtllm"}, "backend must be 'cutlass'"),
    ]
    for options, words in wrong:
        with pytest.raises((ValueError, BackendSupportedError), match=words):
            call.run(**{"output": out, "workspace_buffer": memory, **options})
    if call.x.dtype == out.dtype:
        with pytest.raises(ValueError, match="output must not overlap input's memory"):
            call.run(output=call.x, workspace_buffer=memory)
    assert (out == 7).all()
    assert torch.equal(call.run(output=out, workspace_buffer=memory), want)
    monkeypatch.setattr(_experts, "_MOST_KNOWN", 1)
    for tokens in (3, 4, 5):
        part = Experts(**{**call.__dict__, "x": call.x[:tokens]})
        part.selected, part.weights = call.selected[:tokens], None
        part.run()
        assert len(_experts._KNOWN) == 1


def test_autotune_is_taken(generator: torch.Generator) -> None:
    call = draw(5, 2, 4, 64, 128, generator)
    with precast.autotuner.autotune(True):
        got = call.run(tune_max_num_tokens=5)
    assert torch.equal(got, call.run())
