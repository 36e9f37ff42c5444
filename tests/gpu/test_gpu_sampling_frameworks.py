# SPDX-License-Identifier: Apache-2.0
"""What engines do with sampling: generators, graphs, torch.compile, devices, huge batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_calls import DRAWS, RANDOM

import precast

Call = Callable[..., Any]

EVERY: dict[str, Call] = {
    **{name: DRAWS[name] for name in ("plain", "k50", "p.3", "m.2", "joint")},
    "logits": precast.sampling_from_logits,
    "logits_kp": lambda x, **more: precast.top_k_top_p_sampling_from_logits(x, 40, 0.9, **more),
    "sample": lambda x, **more: precast.sample(x, 0.8, 40, 0.9, **more).tokens,
    "chain": lambda x, **more: precast.chain_speculative_sampling(
        x[:, None], torch.zeros(len(x), 1, dtype=torch.int32, device=x.device), pairs(x), **more
    )[0],
}
every = pytest.mark.parametrize("call", EVERY.values(), ids=EVERY)


def pairs(x: torch.Tensor) -> torch.Tensor:
    """``[rows, 2, vocabulary]``, without a copy."""
    return x[:, None].expand(-1, 2, -1)


def rows(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(count, size, device="cuda", generator=generator)


@every
def test_generators(call: Call, generator: torch.Generator) -> None:
    x = rows(64, 2000, generator)
    own = torch.Generator("cuda").manual_seed(9)
    first = call(x, generator=own)
    assert own.get_offset() == 4
    second = call(x, generator=own)
    assert not torch.equal(first, second)
    assert torch.equal(call(x, generator=own.manual_seed(9)), first)
    assert torch.equal(call(x, seed=9, offset=4), second)
    state = own.get_state()
    default = torch.cuda.get_rng_state()
    call(x, generator=own, seed=1, offset=0)
    assert torch.equal(own.get_state(), state)
    assert torch.equal(torch.cuda.get_rng_state(), default)
    torch.cuda.manual_seed(77)
    first = call(x)
    assert torch.equal(call(x, seed=77, offset=0), first)
    noise = torch.rand(8, device="cuda")
    torch.cuda.manual_seed(77)
    call(x)
    assert torch.equal(torch.rand(8, device="cuda"), noise)
    with torch.device("cuda"):
        torch.cuda.manual_seed(77)
        assert torch.equal(call(x), first)


@every
def test_seeds_of_64_bits_as_numbers_and_tensors(call: Call, generator: torch.Generator) -> None:
    x = rows(64, 2000, generator)
    wanted = call(x, seed=2**64 - 3, offset=2**63 + 8)
    for dtype in (torch.int64, torch.uint64):
        seed = torch.tensor([-3]).view(dtype).cuda()
        offset = torch.tensor([8 - 2**63]).view(dtype).cuda()
        assert torch.equal(call(x, seed=seed, offset=offset), wanted)
    many = torch.full((64,), -3, device="cuda")
    own = call(x, seed=many, offset=torch.tensor([8 - 2**63], device="cuda"))
    assert torch.equal(own[0], wanted[0])
    assert not torch.equal(own, wanted)


@every
def test_a_graph_follows_its_seeds(call: Call, generator: torch.Generator) -> None:
    x = rows(40, 5000, generator)
    seed, offset = torch.zeros((2, 1), dtype=torch.int64, device="cuda")
    call(x, seed=seed, offset=offset)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = call(x, seed=seed, offset=offset)
    for step in range(4):
        x.copy_(rows(40, 5000, generator))
        seed.fill_(step * 3 + 2**40)
        offset.fill_(step * 4)
        graph.replay()
        assert torch.equal(tokens, call(x, seed=step * 3 + 2**40, offset=step * 4))


@every
def test_replays_have_numbers_of_their_own(call: Call, generator: torch.Generator) -> None:
    x = rows(64, 2000, generator)
    call(x)
    own = torch.Generator("cuda").manual_seed(9)
    for given in (None, own):
        graph = torch.cuda.CUDAGraph()
        if given is not None:
            graph.register_generator_state(given)
        with torch.cuda.graph(graph):
            first = call(x, generator=given)
            second = call(x, generator=given)
        found = []
        for _ in range(3):
            graph.replay()
            found += [first.clone(), second.clone()]
        assert len({tuple(tokens.flatten().tolist()) for tokens in found}) == 6
        (given or torch.cuda.default_generators[0]).manual_seed(123)
        graph.replay()
        again = first.clone()
        (given or torch.cuda.default_generators[0]).manual_seed(123)
        graph.replay()
        assert torch.equal(first, again)


def test_a_generator_of_the_cpu_cannot_draw_for_replays(generator: torch.Generator) -> None:
    x = rows(4, 2000, generator)
    own = torch.Generator().manual_seed(9)
    precast.sampling_from_probs(x, generator=own)
    before, words = own.get_state(), "generator must be on cuda:0 .* while a CUDA graph is captured"
    for call in EVERY.values():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), pytest.raises(ValueError, match=words):
            call(x, generator=own)
    assert torch.equal(own.get_state(), before)


def test_torch_compile(generator: torch.Generator) -> None:
    x = rows(40, 900, generator)

    def block(x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        probs = precast.top_k_renorm_probs(precast.softmax(4 * x, 0.5), 300)
        tokens, valid = precast.top_p_sampling_from_probs(
            precast.top_p_renorm_probs(probs, 0.9), p, return_valid=True, **RANDOM
        )
        masked = precast.top_k_mask_logits(x, 40)
        out = precast.sample(masked, 0.7, top_k=20, return_logprobs=True, top_logprobs=2, **RANDOM)
        more = (out.tokens, out.logprobs, out.top_tokens)
        kp = precast.top_k_top_p_sampling_from_logits(x, 5, 0.5, **RANDOM)
        return tokens, valid, *more, kp, precast.sampling_from_logits(x)

    p = torch.full((40,), 0.5, device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    got, again, plain = compiled(x, p), compiled(x, p), block(x, p)
    for mine, theirs in zip(got[:-1], plain[:-1], strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(got[-1], again[-1])


@every
def test_no_synchronisation_and_no_allocation(call: Call, generator: torch.Generator) -> None:
    x = rows(40, 3000, generator)
    seeds = torch.arange(40, device="cuda")
    calls: list[Callable[[], Any]] = [
        lambda: call(x),
        lambda: call(x, **RANDOM),
        lambda: call(x, seed=seeds, offset=seeds),
    ]
    for run in calls:
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        grown = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        # The chain has two counters, and the draft that the test makes.
        assert grown == (4 if result.dim() == 2 else 1)


def test_a_kernel_that_starts_early_sees_its_input_complete(generator: torch.Generator) -> None:
    x = 3 * torch.randn(33, 128256, device="cuda", generator=generator)
    work = torch.empty_like(x)
    want = None
    for _ in range(100):
        work.zero_()
        work.copy_(x)
        probs = precast.softmax(work, 0.9)
        kept = precast.top_p_renorm_probs(precast.top_k_renorm_probs(probs, 500), 0.9)
        tokens = precast.min_p_sampling_from_probs(kept, 0.01, **RANDOM)
        fused = precast.sample(work, 0.9, 500, 0.9, 0.01, **RANDOM).tokens
        if want is None:
            torch.cuda.synchronize()
            want = tokens.clone(), fused.clone()
        assert torch.equal(tokens, want[0])
        assert torch.equal(fused, want[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@every
def test_second_device(call: Call, generator: torch.Generator) -> None:
    x = rows(40, 40000, generator)
    want = call(x, **RANDOM)
    other = x.to("cuda:1")
    assert torch.equal(call(other, **RANDOM).cpu(), want.cpu())
    own = torch.Generator("cuda:1").manual_seed(3)
    assert call(other, generator=own).device == other.device
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="generator must be on cuda:1"):
        call(other, generator=torch.Generator("cuda:0"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_a_capture_on_one_device_is_none_on_another(generator: torch.Generator) -> None:
    """Of rows on a device that is not the current one, that device's stream counts."""
    x = rows(64, 2000, generator).to("cuda:1")
    y = rows(64, 2000, generator)
    precast.sampling_from_probs(x)
    precast.sampling_from_probs(y)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(1)
    with (
        torch.cuda.device(1),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"),
        torch.cuda.device(0),  # The current one, while the other captures.
    ):
        first = precast.sampling_from_probs(x)
        second = precast.sampling_from_probs(x)
    found = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize(1)
        found += [first.clone(), second.clone()]
    assert len({tuple(tokens.tolist()) for tokens in found}) == 6
    own = torch.Generator("cuda:1").manual_seed(5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        precast.sampling_from_probs(y, seed=1, offset=0)
        precast.sampling_from_probs(x, generator=own)
    assert own.get_offset() == 4, "a call outside the capture moves its generator on"


def test_more_than_2_to_31_elements(free_memory: None, generator: torch.Generator) -> None:
    """Rows that begin behind 2^31 elements, read, written and drawn from."""
    size, count = 1 << 18, (1 << 13) + 9
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GiB of GPU memory")
    x = torch.empty(count, size, device="cuda")
    x.fill_(0.25)
    x[-20:] = torch.rand(20, size, device="cuda", generator=generator)
    seeds = torch.arange(count, device="cuda")
    part = {"seed": seeds[-20:], "offset": seeds[-20:]}
    for name in ("plain", "p.3", "k50"):
        tokens = DRAWS[name](x, seed=seeds, offset=seeds)
        assert torch.equal(tokens[-20:], DRAWS[name](x[-20:].clone(), **part))
    where = torch.tensor([count - 1, 3, count - 20], device="cuda")
    own = {"seed": seeds[where], "offset": seeds[where]}
    tokens = DRAWS["plain"](x, seed=seeds, offset=seeds)
    assert torch.equal(DRAWS["plain"](x, indices=where, **own), tokens[where].long())
    want = precast.top_p_renorm_probs(x[-20:].clone(), 0.5)
    assert torch.equal(precast.top_p_renorm_probs(x, 0.5)[-20:], want)
    drawn = precast.sample(x, 0.7, 50, seed=seeds, offset=seeds).tokens
    assert torch.equal(drawn[-20:], precast.sample(x[-20:].clone(), 0.7, 50, **part).tokens)
