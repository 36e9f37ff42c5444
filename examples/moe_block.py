# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on precast's kernels: of Qwen3-30B-A3B, DeepSeek-V3 and gpt-oss-120b.

The blocks have the shapes of the models and random weights from a seed; routers prefer some
experts, as those of models do. Qwen's has 128 experts in bfloat16, of which a token goes to 8 by a
softmax that is renormalised. DeepSeek's has 256 in FP8 with scales of blocks, 8 of a token in the
best four of eight groups, and 32 ranks share them; one rank computes its part. gpt-oss has 128 in
MXFP4, 4 of a token, with biases and a clamped SwiGLU, which four ranks share::

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
TOLERANCES = {"Qwen3-30B-A3B": 1e-2, "DeepSeek-V3": 6e-2, "gpt-oss-120b": 1e-2}
BF16, FP8, MXFP4 = "bfloat16", "FP8 with scales of blocks", "MXFP4"
#: Of gpt-oss: the factor of gates in their sigmoid, what is added to up, the limit of both.
ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0


class Shape(NamedTuple):
    """A block of a model, or what fits of it."""

    name: str
    hidden: int
    inter: int
    experts: int  # of all ranks
    topk: int
    ranks: int  # that share the experts
    groups: int  # of experts, of which half are kept; 1 for a softmax over all
    stored: str  # the weights of experts

    @property
    def local(self) -> int:
        return self.experts // self.ranks


SHAPES = (
    Shape("Qwen3-30B-A3B", 2048, 768, 128, 8, 1, 1, BF16),
    Shape("DeepSeek-V3", 7168, 2048, 256, 8, 32, 8, FP8),
    Shape("gpt-oss-120b", 2944, 2944, 128, 4, 4, 1, MXFP4),  # 2880, padded to multiples of 128
)
#: What a CPU computes in a few seconds.
FEW = (
    SHAPES[0]._replace(hidden=512, inter=256, experts=16),
    SHAPES[1]._replace(hidden=512, inter=256, experts=64, ranks=16),
    SHAPES[2]._replace(hidden=384, inter=256, experts=16),
)


class Weights(NamedTuple):
    norm: torch.Tensor  # [hidden]
    router: torch.Tensor  # [experts, hidden]
    bias: torch.Tensor  # [experts], of the router
    fc1: torch.Tensor  # [local, 2 * inter, hidden], up first
    fc2: torch.Tensor  # [local, hidden, inter]
    scales: list[torch.Tensor] | None  # of blocks of 128 x 128, or of 32 numbers
    biases: dict[str, torch.Tensor]  # of both products, and the numbers of the activation
    plain: tuple[torch.Tensor, torch.Tensor]  # both weights as their numbers


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
    norm = 1 + 0.1 * normal(shape.hidden)
    router = normal(shape.experts, shape.hidden) * shape.hidden**-0.5
    scales, biases, plain = None, {}, (fc1, fc2)
    if shape.stored == FP8:
        (fc1, first), (fc2, second) = quantised(fc1), quantised(fc2)
        scales, plain = [first, second], (by_blocks(fc1, first), by_blocks(fc2, second))
    elif shape.stored == MXFP4:
        (fc1, first, one), (fc2, second, two) = mxfp4(fc1), mxfp4(fc2)
        scales, plain = [first, second], (one, two)
        numbers = {"alpha": ALPHA, "beta": BETA, "limit": LIMIT}
        biases = {
            f"swiglu_{name}": torch.full((shape.local,), number, device=generator.device)
            for name, number in numbers.items()
        }
        biases["fc1_expert_biases"] = 0.3 * weight(shape.local, 2 * shape.inter)
        biases["fc2_expert_biases"] = 0.3 * weight(shape.local, shape.hidden)
    return Weights(norm.to(DTYPE), router, bias, fc1, fc2, scales, biases, plain)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An e4m3 weight ``[experts, n, k]`` with scales of blocks of 128 x 128."""
    blocks = weight.float().unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    scales = blocks.abs().amax((2, 4)) / 448
    codes = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(weight.shape), scales


def by_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of such a weight."""
    return codes.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight in MXFP4 as the kernels take it, its scales, and its numbers.

    A checkpoint has the packed codes and the scales; an engine interleaves both when it loads them.
    """
    steps = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.device)
    groups = weight.float().unflatten(2, (-1, 32))
    exponent = (groups.abs().amax(3, keepdim=True) / 6).log2().ceil()
    ratio = groups / exponent.exp2()
    codes = torch.bucketize(ratio.abs(), (steps[1:] + steps[:-1]) / 2)
    numbers = (steps[codes].copysign(ratio) * exponent.exp2()).flatten(2)
    codes = (codes.byte() | ratio.signbit().byte() << 3).flatten(2)
    packed, scales = codes[..., ::2] | codes[..., 1::2] << 4, (exponent + 127).byte().flatten(2)
    return (
        precast.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(packed),
        precast.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales),
        numbers,
    )


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
            use_deepseek_fp8_block_scale=shape.stored == FP8,
            use_w4_group_scaling=shape.stored == MXFP4,
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
            use_deepseek_fp8_block_scale=shape.stored == FP8,
            use_w4_group_scaling=shape.stored == MXFP4,
            workspace_buffer=self.workspace,
            **w.biases,
        )
        return out

    def exact(self, residual: torch.Tensor) -> torch.Tensor:
        """The same in fp32 from the formulas, for the same experts."""
        w, shape = self.weights, self.shape
        x = precast.rmsnorm(residual, w.norm, EPS)
        experts, scales = route(shape, w, x)
        out = torch.zeros_like(residual, dtype=torch.float32)
        for local in range(shape.local):
            fc1, fc2 = (weight[local].float() for weight in w.plain)
            chosen = experts == local + self.rank * shape.local
            token, slot = chosen.nonzero(as_tuple=True)
            rows = x[token].float() @ fc1.T
            if w.biases:
                rows = rows + w.biases["fc1_expert_biases"][local].float()
            up, gate = rows.chunk(2, dim=1)
            rows = self._activation(up, gate) @ fc2.T
            if w.biases:
                rows = rows + w.biases["fc2_expert_biases"][local].float()
            out.index_add_(0, token, rows * scales[token, slot, None])
        return out

    def _activation(self, up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if not self.weights.biases:
            return torch.nn.functional.silu(gate) * up
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(ALPHA * gate) * (up + BETA)


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
        print(
            f"{shape.name}: {shape.local} of {shape.experts} experts, {shape.topk} of a token, "
            f"{shape.hidden} x {shape.inter}, {shape.stored}, on {device}"
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
