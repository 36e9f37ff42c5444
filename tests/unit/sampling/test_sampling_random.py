# SPDX-License-Identifier: Apache-2.0
"""Random numbers: Philox by its published vectors, and where seeds and offsets come from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import precast
from precast._ops.sampling import _random
from precast._ops.sampling._philox import philox4x32, signed, uniforms
from precast._ops.sampling._random import random_arguments

CPU = torch.device("cpu")

#: Counter, key and result of Random123's known answers for philox4x32-10.
KNOWN = [
    ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]

pytestmark = pytest.mark.usefixtures("reference_mode")


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


def probs(rows: int = 64, size: int = 500) -> torch.Tensor:
    return torch.rand(rows, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_by_its_known_answers(counter: str, key: str, result: str) -> None:
    found = philox4x32(words(counter), words(key))[0]  # type: ignore[arg-type]
    assert [f"{word:08x}" for word in found.tolist()] == result.split()


def test_a_uniform_number_is_made_of_24_bits_of_a_word() -> None:
    """Seed and offset are 64 bits, lower half first; the row and the draw follow."""
    seed, offset, row, draw = 0x299F31D0A4093822, 0x85A308D3243F6A88, 3, 5
    counter = words("243f6a88 85a308d3 3 5")
    expected = philox4x32(counter, words("a4093822 299f31d0"))[0]  # type: ignore[arg-type]
    got = uniforms(signed(seed), signed(offset), 4, draw, CPU)[row]
    assert got.tolist() == [(word >> 8) / 2**24 for word in expected.tolist()]
    many = uniforms(1, 0, 1 << 16, 0, CPU)
    assert 0 <= many.min() < many.max() < 1
    assert abs(float(many.mean()) - 0.5) < 0.005


@pytest.mark.parametrize(
    ("number", "bits"),
    [
        *[(0, 0), (2**63 - 1, 2**63 - 1), (2**63, -(2**63)), (2**64 - 1, -1), (-1, -1)],
        *[(np.int64(-5), -5), (np.int32(7), 7), (np.uint64(2**64 - 3), -3), (True, 1)],
    ],
)
def test_seeds_are_the_low_64_bits(number: int, bits: int) -> None:
    assert signed(number) == bits
    assert type(signed(number)) is int


def test_seeds_of_numpy_are_seeds() -> None:
    x = probs()
    wanted = precast.sampling_from_probs(x, seed=2**64 - 3, offset=8)
    for seed, offset in ((np.int64(-3), np.int64(8)), (np.uint64(2**64 - 3), np.uint8(8))):
        assert torch.equal(precast.sampling_from_probs(x, seed=seed, offset=offset), wanted)


@pytest.mark.parametrize("bad", [1.5, "1", np.float64(2)])
def test_seeds_that_are_no_whole_numbers_are_rejected(bad: Any) -> None:
    for name in ("seed", "offset"):
        words = f"{name} must be a torch.Tensor or an integer, got {type(bad).__name__}"
        random = {"seed": 0, "offset": 0, name: bad}
        for call in (precast.sampling_from_probs, precast.sampling_from_logits, precast.sample):
            with pytest.raises(TypeError, match=f"^{call.__name__}: {words}"):
                call(probs(), **random)


def test_integers_and_tensors_are_the_same_seeds() -> None:
    x = probs()
    wanted = precast.sampling_from_probs(x, seed=2**64 - 3, offset=8)
    for dtype in (torch.int64, torch.uint64):
        seed = torch.tensor([-3]).view(dtype)
        offset = torch.tensor([8]).view(dtype)
        assert torch.equal(precast.sampling_from_probs(x, seed=seed, offset=offset), wanted)
    assert not torch.equal(precast.sampling_from_probs(x, seed=2**64 - 3, offset=12), wanted)
    assert not torch.equal(precast.sampling_from_probs(x, seed=2**64 - 4, offset=8), wanted)


def test_a_request_with_its_own_seed_gets_its_tokens_wherever_it_stands() -> None:
    x = probs()
    seeds, offsets = torch.arange(64) + 77, torch.arange(64) * 4
    tokens = precast.top_p_sampling_from_probs(x, 0.5, seed=seeds, offset=offsets)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    moved = precast.top_p_sampling_from_probs(
        x[order], 0.5, seed=seeds[order], offset=offsets[order]
    )
    assert torch.equal(moved, tokens[order])
    alone = [
        precast.top_p_sampling_from_probs(
            x[i : i + 1], 0.5, seed=seeds[i : i + 1], offset=offsets[i : i + 1]
        )
        for i in range(64)
    ]
    assert torch.equal(torch.cat(alone), tokens)


def test_equal_seeds_give_equal_rows_equal_tokens() -> None:
    """Not so a single seed, for whose outputs the position counts."""
    x = probs(1).expand(64, -1)
    many, one = torch.full((64,), 5), torch.tensor([5])
    for offset in (many, one):
        assert len(precast.sampling_from_probs(x, seed=many, offset=offset).unique()) == 1
        assert len(precast.sample(x.log(), seed=many, offset=offset).tokens.unique()) == 1
        assert len(precast.sampling_from_probs(x, seed=one, offset=offset).unique()) > 30
    apart = precast.sampling_from_probs(x, seed=many, offset=4 * torch.arange(64))
    assert len(apart.unique()) > 30


def test_rows_of_one_seed_have_different_numbers() -> None:
    x = probs(1).expand(64, -1)
    assert len(precast.sampling_from_probs(x, seed=1, offset=0).unique()) > 30


def test_a_generator_moves_on_and_starts_again() -> None:
    x, generator = probs(), torch.Generator().manual_seed(9)
    first = precast.sampling_from_probs(x, generator=generator)
    second = precast.sampling_from_probs(x, generator=generator)
    assert not torch.equal(first, second)
    generator.manual_seed(9)
    assert torch.equal(precast.sampling_from_probs(x, generator=generator), first)


def test_the_default_generator() -> None:
    x = probs()
    state = torch.get_rng_state()
    try:
        torch.manual_seed(5)
        first = precast.sampling_from_logits(x)
        assert not torch.equal(precast.sampling_from_logits(x), first)
        torch.manual_seed(5)
        assert torch.equal(precast.sampling_from_logits(x), first)
    finally:
        torch.set_rng_state(state)


def test_explicit_seeds_leave_generators_alone() -> None:
    x, generator = probs(), torch.Generator().manual_seed(9)
    before, default = generator.get_state(), torch.get_rng_state()
    precast.sampling_from_probs(x, generator=generator, seed=1, offset=0)
    precast.top_k_sampling_from_probs(x, 3, generator=generator, seed=1, offset=0)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), default)


class FakeGenerator:
    """A generator of a GPU: counters on the host."""

    def __init__(self, seed: int, offset: int, device: str = "cuda:0") -> None:
        self.seed, self.offset, self.device = seed, offset, torch.device(device)

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def on_gpu(index: int = 0) -> Any:
    """A tensor of a GPU, as far as generators go."""
    device = torch.device("cuda", index)
    return SimpleNamespace(device=device, is_cuda=True, get_device=lambda: index)


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, captured: Sequence[int]) -> None:
    """Two GPUs, of which 0 is the current one; the current streams of some are captured."""
    current = [0]

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] in captured)


def test_a_generator_of_a_gpu_gives_its_seed_and_moves_by_four(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_cuda(monkeypatch, captured=())
    given: Any = FakeGenerator(2**64 - 1, 20)
    assert random_arguments("f", on_gpu(), given, None, None) == (None, -1, None, 20)
    assert random_arguments("f", on_gpu(), given, None, None) == (None, -1, None, 24)
    default = FakeGenerator(7, 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (default,))
    assert random_arguments("f", on_gpu(), None, None, None) == (None, 7, None, 0)
    assert (given.offset, default.offset) == (28, 4)
    elsewhere: Any = FakeGenerator(7, 0, "cuda:1")
    with pytest.raises(ValueError, match=r"f: generator must be on cuda:0 .*, got cuda:1"):
        random_arguments("f", on_gpu(), elsewhere, None, None)


@pytest.mark.parametrize("captured", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("index", [0, 1])
def test_whether_a_graph_is_captured_is_asked_of_the_device_of_the_rows(
    index: int, captured: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cuda(monkeypatch, captured)
    generators = FakeGenerator(7, 20), FakeGenerator(8, 40, "cuda:1")
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    drawn_on: list[torch.device] = []

    def randint(*args: Any, device: torch.device, **more: Any) -> torch.Tensor:
        drawn_on.append(device)
        return torch.tensor([5, 6])

    monkeypatch.setattr(_random.torch, "randint", randint, raising=False)
    seed_arr, seed, offset_arr, offset = random_arguments("f", on_gpu(index), None, None, None)
    if index in captured:
        assert drawn_on == [torch.device("cuda", index)]
        assert seed_arr is not None
        assert offset_arr is not None
        assert (seed_arr.tolist(), offset_arr.tolist()) == ([5], [6])
        assert [generator.offset for generator in generators] == [20, 40]
    else:
        assert drawn_on == []
        assert (seed_arr, seed, offset_arr, offset) == [(None, 7, None, 20), (None, 8, None, 40)][
            index
        ]
    assert torch.cuda.current_device() == 0


def test_a_generator_of_the_cpu_cannot_draw_for_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.Generator().manual_seed(9)
    before = own.get_state()
    pretend_cuda(monkeypatch, captured=(1,))
    words = (
        r"f: generator must be on cuda:1 .* while a CUDA graph is captured, got one on the CPU: "
        r".*Fix: pass a generator of cuda:1 that is registered with the graph .*register_gen"
    )
    with pytest.raises(ValueError, match=words):
        random_arguments("f", on_gpu(1), own, None, None)
    assert torch.equal(own.get_state(), before)
    elsewhere: Any = FakeGenerator(7, 0, "cuda:0")
    with pytest.raises(ValueError, match=r"f: generator must be on cuda:1 .*, got cuda:0"):
        random_arguments("f", on_gpu(1), elsewhere, None, None)
    assert random_arguments("f", on_gpu(0), own, None, None)[2:] == (None, 0)


def test_a_default_device_does_not_matter() -> None:
    x, generator = probs(), torch.Generator().manual_seed(9)
    wanted = precast.top_p_sampling_from_probs(x, 0.3, generator=generator)
    generator.manual_seed(9)
    with torch.device("meta"):
        got = precast.top_p_sampling_from_probs(x, 0.3, generator=generator)
    assert torch.equal(got, wanted)


ONE = torch.tensor([1])
WRONG = [
    ({"seed": 1}, "seed and offset must be given together, got no offset"),
    ({"offset": ONE}, "seed and offset must be given together, got no seed"),
    ({"seed": ONE, "offset": 0}, "seed and offset must both be tensors or both be scalars"),
    ({"seed": 1, "offset": ONE}, "seed and offset must both be tensors or both be scalars"),
    ({"seed": ONE.int(), "offset": ONE}, "seed tensor must be int64/uint64, got int32"),
    ({"seed": ONE, "offset": ONE.float()}, "offset tensor must be int64/uint64, got float32"),
    ({"seed": ONE[None], "offset": ONE}, r"seed tensor must be 1D, got shape \[1, 1\]"),
    ({"seed": ONE.expand(3), "offset": ONE}, "seed tensor length must be 1 or 64, got 3"),
    ({"seed": ONE, "offset": ONE.to("meta")}, "offset tensor must be on cpu as .*, got meta"),
]


@pytest.mark.parametrize(("random", "words"), WRONG)
def test_wrong_seeds_are_rejected(random: dict[str, Any], words: str) -> None:
    for call in (
        lambda: precast.sampling_from_probs(probs(), **random),
        lambda: precast.top_k_top_p_sampling_from_logits(probs(), 3, 0.5, **random),
        lambda: precast.sample(probs(), **random),
    ):
        with pytest.raises(ValueError, match=words):
            call()
