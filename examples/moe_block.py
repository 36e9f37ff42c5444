# SPDX-License-Identifier: Apache-2.0
"""Two mixtures of experts on precast's kernels: those of Qwen3-30B-A3B and of DeepSeek-V3.

The blocks have the shapes of the models and random weights from a seed; routers prefer some
experts, as those of models do. Qwen's has 128 experts in bfloat16, of which a token goes to 8 by a
softmax that is renormalised. DeepSeek's has 256 in FP8 with scales of blocks, 8 of a token in the
best four of eight groups, and 32 ranks share them; one rank computes its part::

    rmsnorm -> router -> top-k -> cutlass_fused_moe

Each output is compared with the plain form in fp32: token by token and expert by expert, without
quantisation of what goes through the experts. With a GPU the kernels run, and a CUDA graph is
replayed with other tokens. Without one the references run, on fewer experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch

import precast

DTYPE = torch.bfloat16
EPS = 1e-6
#: bf16 keeps 8 bits, and three roundings add up. e4m3 keeps 4, of tokens and of activations.
TOLERANCES = {"Qwen3-30B-A3B": 1e-2, "DeepSeek-V3": 6e-2}


class Shape(NamedTuple):
    """A block of a model, or what fits of it."""

    name: str
    hidden: int
    inter: int
    experts: int  # of all ranks
    topk: int
    ranks: int  # that share the experts
    groups: int  # of experts, of which half are kept; 1 for a softmax over all
    is_fp8: bool

    @property
    def local(self) -> int:
        return self.experts // self.ranks


SHAPES = (
    Shape("Qwen3-30B-A3B", 2048, 768, 128, 8, 1, 1, False),
    Shape("DeepSeek-V3", 7168, 2048, 256, 8, 32, 8, True),
)
#: What a CPU computes in a few seconds.
FEW = (
    SHAPES[0]._replace(hidden=512, inter=256, experts=16),
    SHAPES[1]._replace(hidden=512, inter=256, experts=64, ranks=16),
)


class Weights(NamedTuple):
    norm: torch.Tensor  # [hidden]
    router: torch.Tensor  # [experts, hidden]
    bias: torch.Tensor  # [experts], of the router
    fc1: torch.Tensor  # [local, 2 * inter, hidden], up first
    fc2: torch.Tensor  # [local, hidden, inter]
    scales: list[torch.Tensor] | None  # of blocks of 128 x 128


# -- the model ------------------------------------------------------------------------------------


def random_weights(shape: Shape, generator: torch.Generator) -> Weights:
    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=generator.device)

    def weight(*sizes: int) -> torch.Tensor:
        return torch.stack(
            [(normal(*sizes[1:]) * sizes[-1] ** -0.5).to(DTYPE) for _ in range(sizes[0])]
        )

    fc1 = weight(shape.local, 2 * shape.inter, shape.hidden)
    fc2 = weight(shape.local, shape.hidden, shape.inter)
    # A few experts are popular: scores fall with the rank of an expert, in a random order.
    order = torch.randperm(shape.experts, generator=generator, device=generator.device)
    bias = -0.4 * torch.log(1.0 + order)
    scales = None
    if shape.is_fp8:
        (fc1, first), (fc2, second) = quantised(fc1), quantised(fc2)
        scales = [first, second]
    norm = 1 + 0.1 * normal(shape.hidden)
    router = normal(shape.experts, shape.hidden) * shape.hidden**-0.5
    return Weights(norm.to(DTYPE), router, bias, fc1, fc2, scales)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An e4m3 weight ``[experts, n, k]`` with scales of blocks of 128 x 128."""
    blocks = weight.float().unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    scales = blocks.abs().amax((2, 4)) / 448
    codes = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(weight.shape), scales


def route(shape: Shape, weights: Weights, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of tokens, and the weights of their results."""
    logits = x.float() @ weights.router.T  # [tokens, experts]
    if shape.groups == 1:
        values, experts = torch.softmax(logits + weights.bias, 1).topk(shape.topk, dim=1)
        return experts.int(), values / values.sum(1, keepdim=True)
    values = torch.empty(len(x), shape.topk, device=x.device)
    found = torch.empty(len(x), shape.topk, dtype=torch.int32, device=x.device)
    precast.fused_topk_deepseek(
        *(logits, weights.bias, shape.groups, shape.groups // 2, shape.topk, 2.5, values, found)
    )
    return found, values


class Block:
    """One block of a model, with scratch memory for so many tokens."""

    def __init__(self, shape: Shape, weights: Weights, rank: int, most_tokens: int) -> None:
        self.shape, self.weights, self.rank = shape, weights, rank
        size = precast.cutlass_fused_moe_workspace_size(
            *(most_tokens, shape.hidden, shape.inter, shape.experts, shape.topk),
            x_dtype=DTYPE,
            weight_dtype=weights.fc1.dtype,
            ep_size=shape.ranks,
            use_deepseek_fp8_block_scale=shape.is_fp8,
        )
        self.workspace = torch.empty(size, dtype=torch.uint8, device=weights.fc1.device)

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """What the block adds to the residual stream ``[tokens, hidden]``."""
        w, shape = self.weights, self.shape
        x = precast.rmsnorm(residual, w.norm, EPS)
        experts, scales = route(shape, w, x)
        (out,) = precast.cutlass_fused_moe(
            *(x, experts, scales, w.fc1, w.fc2, DTYPE, w.scales),
            ep_size=shape.ranks,
            ep_rank=self.rank,
            use_deepseek_fp8_block_scale=shape.is_fp8,
            workspace_buffer=self.workspace,
        )
        return out

    def exact(self, residual: torch.Tensor) -> torch.Tensor:
        """The same in fp32 from the formulas, for the same experts."""
        w, shape = self.weights, self.shape
        x = precast.rmsnorm(residual, w.norm, EPS)
        experts, scales = route(shape, w, x)
        out = torch.zeros_like(residual, dtype=torch.float32)
        for local in range(shape.local):
            fc1, fc2 = (self._plain(i, local) for i in (0, 1))
            chosen = experts == local + self.rank * shape.local
            token, slot = chosen.nonzero(as_tuple=True)
            up, gate = (x[token].float() @ fc1.T).chunk(2, dim=1)
            rows = (torch.nn.functional.silu(gate) * up) @ fc2.T
            out.index_add_(0, token, rows * scales[token, slot, None])
        return out

    def _plain(self, which: int, expert: int) -> torch.Tensor:
        codes = (self.weights.fc1, self.weights.fc2)[which][expert].float()
        if self.weights.scales is None:
            return codes
        scales = self.weights.scales[which][expert]
        return codes * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


# -- the run --------------------------------------------------------------------------------------


def inputs(shape: Shape, tokens: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(tokens, shape.hidden, generator=generator, device=generator.device)
    return x.to(DTYPE)


def error_of(block: Block, residual: torch.Tensor, got: torch.Tensor) -> float:
    want = block.exact(residual)
    return float((got.float() - want).norm() / want.norm())


def errors(shape: Shape, device: torch.device, seed: int) -> Iterator[tuple[str, float]]:
    """The errors of a prompt, of decodes and, on a GPU, of a graph that has other tokens."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = random_weights(shape, generator)
    most = 1024 if device.type == "cuda" else 96
    # The rank of the most popular expert.
    block = Block(shape, weights, int(weights.bias.argmax()) // shape.local, most)
    for tokens in (most, 64, 1):
        residual = inputs(shape, tokens, generator)
        experts, _ = route(shape, weights, precast.rmsnorm(residual, weights.norm, EPS))
        counts = torch.bincount(experts.flatten(), minlength=shape.experts)
        first = block.rank * shape.local
        here = counts[first : first + shape.local]
        words = f"{tokens} tokens, {int(here.sum())} rows here, {int(here.max())} of an expert"
        if here.sum() > 0:  # Of one token, other ranks may have all experts.
            yield words, error_of(block, residual, block.forward(residual))
    if device.type == "cuda":
        residual = inputs(shape, 64, generator)
        block.forward(residual)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = block.forward(residual)
        residual.copy_(inputs(shape, 64, generator))
        graph.replay()
        yield "a graph with 64 other tokens", error_of(block, residual, result)


def run(shapes: tuple[Shape, ...], device: torch.device, seed: int) -> bool:
    fine = True
    for shape in shapes:
        limit = TOLERANCES[shape.name]
        kind = "FP8 with scales of blocks" if shape.is_fp8 else str(DTYPE)
        print(
            f"{shape.name}: {shape.local} of {shape.experts} experts, {shape.topk} of a token, "
            f"{shape.hidden} x {shape.inter}, {kind}, on {device}"
        )
        for words, error in errors(shape, device, seed):
            verdict = "ok" if error <= limit else "TOO LARGE"
            print(f"  {words:48} error {error:.1e} (limit {limit:.0e}): {verdict}")
            fine &= error <= limit
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        print(torch.cuda.get_device_name(device))
        fine = run(SHAPES, device, args.seed)
    else:
        print("no GPU: reference mode, on fewer experts")
        with precast.reference_mode():
            fine = run(FEW, torch.device("cpu"), args.seed)
    print("every output is that of the plain form in fp32" if fine else "outputs differ")
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
