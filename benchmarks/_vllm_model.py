# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of SmolLM2-135M's shape with random weights from one seed, and prompts for it.

vLLM's own dummy weights are at most 0.001 everywhere, norms too, so that attention changes no token
there. These have the scales of a network at the start of its training, with peaked attention: a
wrong value of one head changes what is generated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
#: Tokens that are likely: with fewer, rounding decides less often between the best two.
LIKELY = 64

#: Around the sizes of pages and of chunks of prefill, and far beyond.
LENGTHS = (
    *(1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100),
    *(127, 128, 129, 255, 256, 257, 400, 511, 512, 513, 700, 1000, 1023, 1024, 1500, 2000),
)


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write ``config.json`` and ``model.safetensors`` for any engine that reads Hugging Face's."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")
    save_file(dict(weights(seed)), folder / "model.safetensors", {"format": "pt"})
    return folder


def weights(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors by name; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator)
        return (drawn * gain / math.sqrt(columns)).bfloat16()

    c = CONFIG
    hidden, inner, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    assert isinstance(hidden, int) and isinstance(inner, int) and isinstance(vocab, int)
    q_rows, kv_rows = 9 * 64, 3 * 64
    yield "model.embed_tokens.weight", normal(vocab, hidden, math.sqrt(hidden))
    for layer in range(int(str(c["num_hidden_layers"]))):
        name = f"model.layers.{layer}."
        yield name + "self_attn.q_proj.weight", normal(q_rows, hidden, 1.2)
        yield name + "self_attn.k_proj.weight", normal(kv_rows, hidden, 1.2)
        yield name + "self_attn.v_proj.weight", normal(kv_rows, hidden, 1.0)
        yield name + "self_attn.o_proj.weight", normal(hidden, q_rows, 0.4)
        yield name + "mlp.gate_proj.weight", normal(inner, hidden, 1.0)
        yield name + "mlp.up_proj.weight", normal(inner, hidden, 1.0)
        yield name + "mlp.down_proj.weight", normal(hidden, inner, 0.4)
        yield name + "input_layernorm.weight", torch.ones(hidden).bfloat16()
        yield name + "post_attention_layernorm.weight", torch.ones(hidden).bfloat16()
    yield "model.norm.weight", torch.ones(hidden).bfloat16()
    head = normal(vocab, hidden, 4.0)
    head[LIKELY:] *= 0.25
    yield "lm_head.weight", head


def prompts(seed: int, vocab: int, most: int) -> list[list[int]]:
    """One prompt of each length; all with an even number share a start, and all others one."""
    generator = torch.Generator().manual_seed(seed)
    bases = [torch.randint(1, vocab, (max(LENGTHS),), generator=generator) for _ in range(2)]
    return [bases[i % 2][: min(n, most)].tolist() for i, n in enumerate(LENGTHS)]
