# SPDX-License-Identifier: Apache-2.0
"""What tests of low-rank adapters in a mixture of experts share: calls, and results in float64."""

from __future__ import annotations

import dataclasses

import torch

from precast.fused_moe import bgmv_moe, bgmv_moe_expand, bgmv_moe_shrink, fill_w_ptr


@dataclasses.dataclass
class Lora:
    """One call: slices of weights, and pairs of which some have no token, expert or adapter."""

    x: torch.Tensor  # [tokens, hidden]
    a: list[torch.Tensor]  # [adapters, experts, rank, hidden]
    b: list[torch.Tensor]  # [adapters, experts, columns, rank]
    tokens: torch.Tensor  # [pairs]
    experts: torch.Tensor  # [pairs]
    loras: torch.Tensor  # [tokens]
    weights: torch.Tensor  # [pairs]

    @property
    def count(self) -> int:
        return int(self.a[0].shape[1])

    @property
    def pairs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.tokens, self.experts, self.loras

    def run(self, output_dim: int | None = None) -> torch.Tensor:
        return bgmv_moe(
            *(self.x, self.a, self.b, *self.pairs, self.weights, self.count, output_dim)
        )

    def tables(self, weights: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        table = self.tokens.new_zeros(len(weights), self.count)
        strides = {fill_w_ptr(table, w, self.count, i) for i, w in enumerate(weights)}
        (stride,) = strides
        return table, stride

    def shrink(self, y: torch.Tensor, x: torch.Tensor | None = None) -> None:
        """``x`` has a row for each pair."""
        table, stride = self.tables(self.a)
        given = self.x if x is None else x
        per_pair = x is not None
        bgmv_moe_shrink(y, given, table, *self.pairs, stride, per_pair_input=per_pair)

    def starts(self) -> torch.Tensor:
        sizes = torch.tensor([b.shape[2] for b in self.b], device=self.x.device)
        return sizes.cumsum(0) - sizes

    def expand(self, y: torch.Tensor, x: torch.Tensor, finalize: bool = True) -> None:
        table, stride = self.tables(self.b)
        sizes = [b.shape[2] for b in self.b]
        given = self.tokens, self.experts, self.weights, self.loras, self.starts()
        bgmv_moe_expand(y, x, table, *given, sizes, stride, finalize=finalize)

    def chosen(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which pairs have weights, and their tokens, experts and adapters."""
        exists = (self.tokens >= 0) & (self.tokens < len(self.loras))
        exists &= (self.experts >= 0) & (self.experts < self.count)
        token = self.tokens.where(exists, 0)
        lora = self.loras[token] if len(self.loras) else token - 1
        exists &= lora >= 0
        return exists, token[exists], self.experts[exists], lora[exists]

    def shrunk(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """``[slices, pairs, rank]`` in float64, zero where there are no weights."""
        exists, token, expert, lora = self.chosen()
        rows = (self.x[token] if x is None else x[exists]).double()
        result = []
        for a in self.a:
            y = rows.new_zeros(len(self.tokens), a.shape[2])
            y[exists] = (a[lora, expert].double() @ rows[:, :, None])[:, :, 0]
            result.append(y)
        return torch.stack(result)

    def expanded(self, x: torch.Tensor, finalize: bool = True) -> torch.Tensor:
        """The products in float64: of tokens, weighted, or of pairs."""
        exists, token, expert, lora = self.chosen()
        result = []
        for of_slice, b in zip(x, self.b):
            product = (b[lora, expert].double() @ of_slice[exists].double()[:, :, None])[:, :, 0]
            y = product.new_zeros(len(self.loras if finalize else self.tokens), b.shape[2])
            if finalize:
                y.index_add_(0, token, product * self.weights[exists, None].double())
            else:
                y[exists] = product
            result.append(y)
        return torch.cat(result, dim=1)


def draw(
    tokens: int,
    topk: int,
    hidden: int,
    sizes: tuple[int, ...],
    rank: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    adapters: int = 3,
    experts: int = 5,
    order: str = "tokens",
) -> Lora:
    """A fifth of the pairs has no token or no expert, and a fourth of the tokens no adapter.

    ``order`` is that of the pairs: by ``"tokens"``, by ``"experts"``, or ``"random"``.
    """
    device = generator.device

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    def integers(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), device=device, generator=generator)

    pairs = tokens * topk
    of = torch.arange(tokens, device=device).repeat_interleave(topk)
    expert = integers(0, experts, pairs)
    if order == "experts":
        by = expert.argsort(stable=True)
        of, expert = of[by], expert[by]
    elif order == "random":
        of = of[torch.randperm(pairs, device=device, generator=generator)]
    odd = torch.tensor([-1, 2**40, -(2**62), 2**62], device=device)[integers(0, 4, pairs)]
    fate = integers(0, 10, pairs)
    return Lora(
        normal(tokens, hidden),
        [normal(adapters, experts, rank, hidden) * hidden**-0.5 for _ in sizes],
        [normal(adapters, experts, size, rank) for size in sizes],
        torch.where(fate == 0, odd, of),
        torch.where(fate == 1, odd, expert),
        integers(0, adapters, tokens).where(integers(0, 4, tokens) > 0, -1),
        torch.rand(pairs, device=device, generator=generator),
    )


def accepted(call: Lora) -> bool:
    """Whether anything at all has weights, so that a test asserts something."""
    return bool(call.chosen()[0].any())
