# SPDX-License-Identifier: Apache-2.0
"""The fused mixture of experts: every mode, routing of every kind, graphs, memory, errors."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from block_calls import Buffer
from moe_support import COMPUTED, FP8_ERROR, Experts, draw

import precast
from precast.errors import BackendSupportedError
from precast.tllm_enums import ActivationType

MODES = ("half", "fp8", "blocks", "mxfp4", "int4")
#: Modes whose tokens are bfloat16 alone.
PACKED = ("mxfp4", "int4")
DTYPES = (torch.bfloat16, torch.float16)
CASES = int(os.environ.get("PRECAST_MOE_CASES", "2000"))

modes = pytest.mark.parametrize("mode", MODES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16"])


@modes
@dtypes
@pytest.mark.parametrize("act", COMPUTED, ids=lambda act: act.name)
def test_every_function(
    act: ActivationType, dtype: torch.dtype, mode: str, generator: torch.Generator
) -> None:
    for biases in (False, True):
        call = draw(67, 3, 5, 256, 128, generator, dtype, mode, act, biases)
        if mode in PACKED and dtype == torch.float16:
            with pytest.raises(BackendSupportedError, match=r"torch\.float16 tokens"):
                call.run()
        else:
            call.check(call.run())


@modes
@pytest.mark.parametrize("slots", range(1, 11))
def test_every_number_of_slots(slots: int, mode: str, generator: torch.Generator) -> None:
    for tokens, experts in ((1, 16), (9, 11), (130, 8)):
        call = draw(tokens, slots, experts, 128, 256, generator, mode=mode, skew=1.0)
        call.check(call.run())


@modes
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 511, 1000, 4097])
def test_every_number_of_tokens(tokens: int, mode: str, generator: torch.Generator) -> None:
    call = draw(tokens, 8, 32, 256, 128, generator, mode=mode, skew=0.8)
    call.check(call.run())


@modes
def test_many_tokens(mode: str, generator: torch.Generator) -> None:
    """Of Qwen3-30B's number of experts, in many chunks of the sort."""
    call = draw(16384, 8, 128, 256, 128, generator, mode=mode, skew=0.5)
    call.check(call.run())


@modes
def test_experts_without_tokens_with_one_and_with_all(
    mode: str, generator: torch.Generator
) -> None:
    call = draw(300, 2, 8, 256, 128, generator, mode=mode)
    for pattern in ([[3, 3]], [[0, 7]], [[7, 0]], [[2, 5]] * 7 + [[6, 2]]):
        rows = torch.tensor(pattern, dtype=torch.int32, device="cuda")
        call.selected.copy_(rows.repeat(300, 1)[:300])
        call.check(call.run())
    call.selected.fill_(4)  # One token has another expert, and expert 1 one token.
    call.selected[123, 1] = 1
    call.check(call.run())


@modes
def test_ranks_add_up_to_the_whole(mode: str, generator: torch.Generator) -> None:
    """With a rank that no token goes to, and tokens that no expert of a rank gets."""
    whole = draw(150, 4, 12, 128, 128, generator, mode=mode, biases=True)
    whole.selected[:, :] = torch.randint(
        0, 9, whole.selected.shape, generator=generator, device="cuda"
    ).int()
    whole.selected[::7] = -1
    want, lengths = whole.plain()
    sums = torch.zeros_like(want)
    for rank in range(4):
        at = slice(3 * rank, 3 * rank + 3)
        part = whole.of_rank(at, ep_size=4, ep_rank=rank)
        got = part.run()
        part.check(got)
        assert (got[::7] == 0).all()
        sums += got.double()
    assert ((sums - want).norm(dim=1) <= FP8_ERROR * lengths).all()


@modes
def test_numbers_that_are_no_experts_are_skipped(mode: str, generator: torch.Generator) -> None:
    call = draw(70, 4, 6, 128, 128, generator, mode=mode)
    wrong = torch.tensor([-1, 6, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    call.selected[::2, 1], call.selected[1::2, 3] = wrong.repeat(9)[:35], wrong.repeat(9)[:35]
    call.selected[10:20] = 2**31 - 1
    got = call.run()
    call.check(got)
    assert (got[10:20] == 0).all()


def test_ranks_of_tensor_parallelism_add_the_bias_once(generator: torch.Generator) -> None:
    call = draw(33, 2, 4, 128, 128, generator, biases=True)
    first, second = call.run(tp_size=2, tp_rank=0), call.run(tp_size=2, tp_rank=1)
    call.check(first)
    call.options["tp_rank"] = 1
    call.check(second)
    assert not torch.equal(first, second)


def test_no_weights_count_as_one(generator: torch.Generator) -> None:
    call = draw(33, 2, 4, 128, 128, generator)
    call.weights = None
    call.check(call.run())


@modes
def test_the_same_call_gives_the_same_bits(mode: str, generator: torch.Generator) -> None:
    call = draw(777, 6, 16, 256, 256, generator, mode=mode, skew=1.0)
    want = call.run(use_fused_finalize=False)
    for i in range(20):
        assert torch.equal(call.run(use_fused_finalize=bool(i % 2), enable_pdl=i % 3 > 0), want)


@modes
def test_what_the_workspace_holds_does_not_matter(mode: str, generator: torch.Generator) -> None:
    """All bits set are NaN in every type; rows that no slot has stay so."""
    call = draw(97, 5, 8, 128, 128, generator, mode=mode, ep_size=2)
    size = precast.fused_moe.cutlass_fused_moe_workspace_size(
        *(97, 128, 128, 16, 5), ep_size=2, **call.sizing
    )
    memory = Buffer(size)
    out = Buffer(97, 128, dtype=torch.bfloat16)
    want = call.run()
    call.check(want)
    for filled in (0xFF, 0x00):
        memory.view.fill_(filled)
        got = call.run(workspace_buffer=memory.view, output=out.view)
        assert got is out.view
        assert torch.equal(got, want)
        memory.check()
        out.check()
    # A buffer for more tokens serves fewer.
    assert call.weights is not None
    part = Experts(call.x[:11], call.selected[:11], call.weights[:11], *_weights_of(call))
    part.check(part.run(workspace_buffer=memory.view))
    memory.check()


def _weights_of(call: Experts) -> tuple[Any, ...]:
    return call.fc1, call.fc2, call.dtype, call.scales, call.options, call.values


@modes
def test_a_graph_follows_the_routing(mode: str, generator: torch.Generator) -> None:
    call = draw(130, 4, 16, 256, 128, generator, mode=mode, skew=1.0)
    call.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call.run()
    for skew in (0.0, 3.0):
        other = draw(130, 4, 16, 256, 128, generator, mode=mode, skew=skew)
        call.selected.copy_(other.selected)
        assert call.weights is not None
        assert other.weights is not None
        call.weights.copy_(other.weights)
        call.x.copy_(other.x)
        graph.replay()
        call.check(result)
        assert torch.equal(result, call.run())
    call.selected.fill_(3)
    graph.replay()
    call.check(result)
    call.selected.fill_(-1)
    graph.replay()
    assert (result == 0).all()


@modes
def test_compiled(mode: str, generator: torch.Generator) -> None:
    torch._dynamo.reset()
    call = draw(40, 4, 8, 128, 128, generator, mode=mode)
    want = call.run()

    given = (call.selected, call.weights, call.fc1, call.fc2, call.dtype, call.scales)

    def double(x: torch.Tensor) -> torch.Tensor:
        return precast.fused_moe.cutlass_fused_moe(x, *given, **call.options)[0] * 2

    assert torch.equal(torch.compile(double, fullgraph=True)(call.x), want * 2)


@modes
def test_a_chain_is_the_same_with_and_without_pdl(mode: str, generator: torch.Generator) -> None:
    """Each step reads what the kernel before it wrote; a missing wait shows as a difference."""
    call = draw(256, 4, 8, 256, 256, generator, mode=mode)
    size = precast.fused_moe.cutlass_fused_moe_workspace_size(*(256, 256, 256, 8, 4), **call.sizing)
    memory = torch.empty(size, dtype=torch.uint8, device="cuda")
    selections = [call.selected.clone(), call.selected.flip(0), call.selected.roll(1, 0)]

    def chain(pdl: bool) -> torch.Tensor:
        results = []
        for selected in selections:
            call.selected = selected
            results.append(call.run(workspace_buffer=memory, enable_pdl=pdl))
        return torch.stack(results)

    want = chain(False)
    torch.cuda.synchronize()
    assert all(torch.equal(chain(True), want) for _ in range(30))


def test_errors_leave_the_output_alone(generator: torch.Generator) -> None:
    call = draw(16, 2, 4, 128, 128, generator, biases=True)
    out = Buffer(16, 128, dtype=torch.bfloat16)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"use_w4_group_scaling": True}, BackendSupportedError, "and use_w4_group_scaling; there"),
        ({"use_packed_weights": True}, BackendSupportedError, "calls with use_packed_weights"),
        ({"min_latency_mode": True}, BackendSupportedError, "calls with min_latency_mode"),
        ({"backend": "cake"}, BackendSupportedError, "backend='cake'"),
        ({"activation_type": 7}, BackendSupportedError, "SwigluStep; there are Gelu, Relu"),
        ({"backend": "trtllm"}, ValueError, "backend must be 'cutlass'"),
        ({"ep_size": 2, "ep_rank": 2}, ValueError, r"ep_rank must be in \[0, 2\), got 2"),
        ({"tp_size": 0}, ValueError, "tp_size must be positive"),
        ({"profile_ids": [1]}, ValueError, "profile_ids must contain"),
        ({"output": out.view[:8]}, ValueError, r"output must have shape \[16, 128\]"),
        ({"output": call.x}, ValueError, "output must not overlap input's memory"),
        (
            {"workspace_buffer": torch.empty(64, dtype=torch.uint8, device="cuda")},
            ValueError,
            "workspace_buffer must have at least",
        ),
        (
            {"fc1_expert_biases": call.options["fc2_expert_biases"]},
            ValueError,
            r"fc1_expert_biases must have shape \[4, 256\]",
        ),
        ({"swiglu_alpha": torch.ones(3, device="cuda")}, ValueError, "swiglu_alpha must have"),
    ]
    for options, kind, words in wrong:
        with pytest.raises(kind, match=words):
            call.run(**{"output": out.view, **options})
    good = call.selected
    for selected, words in (
        (good.long(), "token_selected_experts must be torch.int32"),
        (good[:3], r"token_selected_experts must have shape \[16, 2\]"),
        (good.cpu(), "token_selected_experts must be on cuda:0"),
        (good.T.contiguous().T, "token_selected_experts must be contiguous"),
    ):
        call.selected = selected
        with pytest.raises(ValueError, match=words):
            call.run(output=out.view)
    call.selected = good
    aligned, odd = call.x, torch.empty(16 * 128 + 1, dtype=torch.bfloat16, device="cuda")
    call.x = odd[1:].view(16, 128)
    with pytest.raises(ValueError, match="input must start at a multiple of 16 bytes"):
        call.run(output=out.view)
    call.x = aligned
    call.dtype = torch.float16
    with pytest.raises(BackendSupportedError, match=r"no kernel computes torch\.bfloat16 tokens"):
        call.run(output=out.view)
    assert (out.bytes == 0xA5).all()


def test_random_calls(generator: torch.Generator) -> None:
    """Sizes and options at random; ``PRECAST_MOE_CASES`` says how many."""
    numbers = torch.Generator().manual_seed(generator.initial_seed())

    def of(*choices: Any) -> Any:
        return choices[int(torch.randint(0, len(choices), (1,), generator=numbers))]

    for _ in range(CASES):
        mode, tokens = of(*MODES), of(0, 1, 2, 3, 5, 8, 13, 16, 31, 64, 100, 257)
        block = 128 if mode in ("blocks", *PACKED) else 16
        sizes = [block * of(1, 2, 3, 4) for _ in range(2)]
        experts, slots = of(1, 2, 3, 5, 8, 16), of(1, 2, 3, 4, 6, 8, 10)
        ep_size = of(1, 1, 2, 3)
        options: dict[str, Any] = {"ep_rank": of(*range(ep_size))}
        dtype = torch.bfloat16 if mode in PACKED else of(*DTYPES)
        call = draw(
            *(tokens, slots, experts, *sizes, generator, dtype, mode, of(*COMPUTED)),
            *(of(False, True), ep_size, of(0.0, 1.0, 3.0)),
            **options,
        )
        if of(False, True, True):
            got = call.run(enable_pdl=of(None, False, True))
        else:
            call.weights = None
            got = call.run()
        try:
            call.check(got)
        except AssertionError as error:
            raise AssertionError(
                f"mode {mode}, tokens {tokens}, slots {slots}, experts {experts}, sizes {sizes}, "
                f"{call.dtype}, {call.options.keys()}, {call.options['activation_type']!r}"
            ) from error
