# SPDX-License-Identifier: Apache-2.0
"""The example that generates text, in reference mode with a tiny random model."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import generate
import pytest
import tiny_llama
import torch
from generate import PAGE_SIZE, Engine, NewToken, Request, Transcript
from gguf_model import GgufModel
from llama import Llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GgufModel:
    return GgufModel(tiny_llama.write(tmp_path_factory.mktemp("model") / "tiny.gguf", seed=5))


@pytest.fixture(autouse=True)
def _inference(reference_mode: None) -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def engine(file: GgufModel) -> Engine:
    """Few slots, few pages, and no two neighbours among the free pages."""
    engine = Engine(Llama(file, CPU, torch.float32), slots=3, pages=12)
    random.Random(7).shuffle(engine.free_pages)
    return engine


def prompt(seed: int, length: int) -> list[int]:
    choice = random.Random(seed)
    return [choice.randrange(256) for _ in range(length)]


def run(engine: Engine, *requests: Request) -> list[list[int]]:
    for _ in engine.serve(requests):
        pass
    return [request.output for request in requests]


def test_greedy_tokens_are_those_of_the_formula_while_requests_join_and_leave(
    file: GgufModel, engine: Engine
) -> None:
    # Prompts and answers that end before, at and behind the end of a page.
    shapes = [(1, 20), (16, 4), (15, 18), (17, 1), (33, 7), (2, 15), (40, 12)]
    requests = [Request(prompt(i, length), count) for i, (length, count) in enumerate(shapes)]
    free = sorted(engine.free_pages)
    answers = run(engine, *requests)
    for request, answer in zip(requests, answers):
        assert len(answer) == request.max_new_tokens
        logits = tiny_llama.exact_logits(file, request.prompt + answer, torch.float32)
        assert answer == logits[len(request.prompt) - 1 : -1].argmax(-1).tolist()
    assert sorted(engine.free_pages) == free
    assert engine.slots == [None] * 3
    # A request joined while another one ran, and none waited for all to end.
    assert any(a.joined < b.joined < a.left for a in requests for b in requests)
    assert engine.steps < sum(count for _, count in shapes) / 2


def test_tokens_come_as_they_are_made(engine: Engine) -> None:
    requests = [Request(prompt(1, 5), 3), Request(prompt(2, 9), 4)]
    passes = [[request for request, _ in new] for new in engine.serve(requests)]
    assert passes == [requests, requests, requests, requests[1:]]


def test_a_seed_gives_its_answer_whoever_else_is_served(engine: Engine) -> None:
    def request(seed: int) -> Request:
        return Request(prompt(3, 12), 6, temperature=1.5, top_p=0.95, seed=seed)

    alone = [run(engine, request(seed))[0] for seed in range(3)]
    assert len(set(map(tuple, alone))) == 3
    other = Request(prompt(4, 21), 5)
    together = run(engine, other, *(request(seed) for seed in range(3)))
    assert together[1:] == alone
    assert together[0] == run(engine, Request(other.prompt, 5))[0]


def test_the_stop_token_ends_an_answer(engine: Engine) -> None:
    [answer] = run(engine, Request(prompt(6, 8), 12))
    stop = answer[5]
    [stopped] = run(engine, Request(prompt(6, 8), 12, stop_token=stop))
    assert stopped == answer[: answer.index(stop) + 1]


def test_a_request_that_fits_the_cache_exactly_is_served_and_a_larger_one_rejected(
    engine: Engine,
) -> None:
    whole = 12 * PAGE_SIZE
    [answer] = run(engine, Request(prompt(8, whole - 2), 2))
    assert len(answer) == 2
    with pytest.raises(ValueError, match="needs 13 pages, and the whole cache has 12"):
        run(engine, Request(prompt(8, whole - 2), 3))


def test_the_transcript_keeps_the_order_and_whole_characters(
    file: GgufModel, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = file.tokenizer()
    first, second = Request([0], 3), Request([0], 1)
    transcript = Transcript(tokenizer, {first: "one", second: "two"})
    euro = tokenizer.encode("€").ids  # three bytes, so three tokens
    assert len(euro) == 3
    letter = tokenizer.encode("x").ids[0]

    def add(*new: tuple[Request, int]) -> str:
        for request, token in new:
            request.output.append(token)
        transcript.add([NewToken(*pair) for pair in new])
        return capsys.readouterr().out

    assert add((first, euro[0]), (second, letter)) == "\n> one\n"
    assert add((first, euro[1])) == ""
    end = add((first, euro[2]))
    assert end.startswith("€\n  [3 tokens")
    assert "\n> two\nx\n  [1 tokens" in end


def test_the_tokenizer_knows_bytes_merges_and_control_tokens(file: GgufModel) -> None:
    tokenizer = file.tokenizer()
    text = f"the path of 42 üs{tiny_llama.END}"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    words = [tokenizer.id_to_token(i) for i in ids]
    assert words[:2] == ["th", "e"]
    assert words[-1] == tiny_llama.END
    assert file.chat("hello") == "hello: "


def test_the_program_answers_each_prompt_at_each_temperature(
    file: GgufModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tiny_llama.write(tmp_path / "tiny.gguf", seed=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["hello", "a much longer question", "--max-new-tokens", "5", "--slots", "2"]
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments, "--model", str(path)])
    generate.main()
    out = capsys.readouterr().out
    assert "tiny, torch.float32 on the CPU, in reference mode\n4 requests in 2 slots" in out
    titles = [line for line in out.splitlines() if line.startswith("> ")]
    kinds = ("greedy", "temperature 0.7")
    questions = ("hello", "a much longer question")
    assert titles == [f"> {question} ({kind})" for question in questions for kind in kinds]
    assert out.count("  [5 tokens, decode steps ") == 4
    assert "prefill: 62 tokens in" in out
    assert "decode:  16 tokens in" in out


@pytest.mark.parametrize("option", ["--max-new-tokens", "--slots"])
@pytest.mark.parametrize("number", ["0", "-3"])
def test_the_program_rejects_what_never_ends(
    option: str,
    number: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["generate.py", f"{option}={number}"])
    with pytest.raises(SystemExit):
        generate.main()
    assert f"argument {option}: must be at least 1, got {number}" in capsys.readouterr().err


def test_the_engine_rejects_what_never_ends(file: GgufModel, engine: Engine) -> None:
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        run(engine, Request(prompt(1, 3), 0))
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        Engine(Llama(file, CPU, torch.float32), slots=0)
    assert Request(prompt(1, 3), 2, output=[1, 2, 3]).done
