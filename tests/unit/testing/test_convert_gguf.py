# SPDX-License-Identifier: Apache-2.0
"""benchmarks/convert_gguf.py: the checkpoint computes what the GGUF file does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny_llama
import torch
from bench_support import BENCHMARKS, benchmarks
from gguf_model import GgufModel
from safetensors.torch import load_file
from torch.nn.functional import linear, silu

__all__ = ["benchmarks"]


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Logits behind every token, as readers of such checkpoints compute them, in float64."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
    head_dim, groups = config["head_dim"], config["num_attention_heads"]
    groups //= config["num_key_value_heads"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + config["rms_norm_eps"]) * stored[f"{name}.weight"]

    power = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    positions = torch.arange(len(tokens), dtype=torch.float64)
    angles = positions[:, None, None] * config["rope_theta"] ** -torch.cat([power, power])

    def rope(x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()

    x = stored["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        hidden = norm(x, f"{name}.input_layernorm")
        q, k, v = (
            linear(hidden, stored[f"{name}.self_attn.{p}_proj.weight"]).unflatten(
                -1, (-1, head_dim)
            )
            for p in "qkv"
        )
        k, v = (y.repeat_interleave(groups, dim=1).transpose(0, 1) for y in (rope(k), v))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            rope(q).transpose(0, 1), k, v, is_causal=True
        )
        x = x + linear(mixed.transpose(0, 1).flatten(1), stored[f"{name}.self_attn.o_proj.weight"])
        hidden = norm(x, f"{name}.post_attention_layernorm")
        gate, up, down = (stored[f"{name}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
        x = x + linear(silu(linear(hidden, gate)) * linear(hidden, up), down)
    tied = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return linear(norm(x, "model.norm"), stored[tied])


def test_checkpoint_computes_what_the_file_does(tmp_path: Path) -> None:
    file = tiny_llama.write(tmp_path / "tiny.gguf", seed=3)
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "convert_gguf.py"), str(file), str(tmp_path / "model")],
        capture_output=True,
        text=True,
        check=True,
    )
    tokens = [5, 200, 7, 7, 33, 256, 1, 90]
    found = logits(tmp_path / "model", tokens)
    expected = tiny_llama.exact_logits(GgufModel(file), tokens, torch.bfloat16)
    # Rows in another order would differ by the size of the logits, which is about 1.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert f"--vocab {found.shape[1]}" in done.stdout
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    assert config["max_position_embeddings"] == tiny_llama.CONTEXT
    assert not config["tie_word_embeddings"]


def test_head_is_tied_if_the_file_has_none(benchmarks: Any, tmp_path: Path) -> None:
    class Tied(GgufModel):
        def __contains__(self, name: str) -> bool:
            return name != "output.weight" and super().__contains__(name)

    convert_gguf = benchmarks("convert_gguf")
    model = Tied(tiny_llama.write(tmp_path / "tiny.gguf", seed=3))
    config = convert_gguf.config_of(model)
    assert config["tie_word_embeddings"]
    assert "lm_head.weight" not in dict(convert_gguf.weights(model, config))


def test_other_models_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    argv = [str(BENCHMARKS / "convert_gguf.py"), str(tmp_path / "other.gguf"), str(tmp_path / "m")]
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: the model must be a llama with plain RoPE, got 'gpt2'. Fix:"
    )
    assert not (tmp_path / "m").exists()
    with pytest.raises(FileNotFoundError):
        GgufModel(tmp_path / "none.gguf")
