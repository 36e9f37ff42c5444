# SPDX-License-Identifier: Apache-2.0
"""What sampling must give, by definition in float64, and how well tokens fit a distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

DRAWS = 1 << 20
#: A correct sampler fails a test of fixed seeds never, and one of fresh seeds once in a million.
LEAST_P_VALUE = 1e-6


def float32(number: float) -> float:
    """A parameter as kernels see it."""
    return torch.tensor(number, dtype=torch.float32).item()


def kept(
    weights: torch.Tensor,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    joint: bool = False,
) -> torch.Tensor:
    """Which tokens of one distribution may be drawn, ``[vocabulary]`` bools."""
    w = weights.double()
    order = w.sort(descending=True).values
    inside = torch.ones_like(w, dtype=torch.bool)
    if 0 < top_k < len(w):
        inside = w >= order[top_k - 1]
    basis = w if joint else w.where(inside, 0)
    result = inside & (w > 0)
    if top_p < 1:
        need = max(float32(top_p), 0) * basis.sum()
        values, counts = basis.unique(return_counts=True)
        masses = values * counts
        above = masses.flip(0).cumsum(0).flip(0) - masses
        allowed = values[(above < need) | (values == values[-1])]
        result &= w >= allowed[0]
    if min_p > 0:
        result &= w >= torch.tensor(min_p, dtype=torch.float32) * weights.float().max()
    return result


def shares(weights: torch.Tensor, **filters: Any) -> torch.Tensor:
    """The distribution that is drawn from, ``[vocabulary]`` float64."""
    inside = weights.double().where(kept(weights, **filters), 0)
    return inside / inside.sum()


def p_value(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    """How likely tokens of this distribution fit it as badly, by Pearson's chi-square.

    Tokens that are expected less than ten times are counted in groups of neighbours that are
    expected as often. 0 if there is one that has no probability.

    Raises
    ------
    ValueError
        If the tokens are too few to tell anything of a distribution of several.
    """
    counts = torch.bincount(tokens.long().cpu(), minlength=len(expected)).double()
    wanted = expected.cpu() * counts.sum()
    if counts[wanted == 0].any() or len(counts) > len(expected):
        return 0.0
    rare = wanted < 10
    # Of less than 10 each, what makes up 20 makes up 10 without its first.
    groups = (wanted[rare].cumsum(0) / 20).long()
    number = max(1, int(groups.max()) if len(groups) else 1)
    groups = groups.clamp(max=number - 1)  # The last one may be small.
    counts, wanted = (
        torch.cat([x[~rare], x.new_zeros(number).index_add(0, groups, x[rare])])
        for x in (counts, wanted)
    )
    there = wanted > 0
    statistic = ((counts - wanted)[there] ** 2 / wanted[there]).sum()
    freedom = int(there.sum()) - 1
    if freedom == 0:
        if int((expected > 0).sum()) > 1:
            raise ValueError(f"{len(tokens)} tokens are too few for {len(expected)}")
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), statistic / 2))


def distribution(kind: str, size: int, seed: int = 0) -> torch.Tensor:
    """One distribution, ``[size]`` float32 that sums to 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(size, generator=generator, dtype=torch.float64)
    makers: dict[str, Callable[[], torch.Tensor]] = {
        "flat": lambda: torch.ones(size),
        "random": lambda: x,
        "peaked": lambda: x.pow(40) + 1e-9,
        "zipf": lambda: 1 / (1 + torch.randperm(size, generator=generator)),
        "ties": lambda: (4 * x).ceil(),
        "sparse": lambda: x.where(x > 0.98, 0).index_fill(0, torch.tensor([size // 2]), 1.0),
        "one": lambda: torch.zeros(size).index_fill(0, torch.tensor([size - 1]), 1.0),
    }
    made = makers[kind]().double()
    return (made / made.sum()).float()


class Case(NamedTuple):
    """A function of the library on one distribution."""

    kind: str
    size: int
    function: str
    filters: dict[str, Any]

    @property
    def name(self) -> str:
        words = "_".join(f"{name}{value}" for name, value in self.filters.items())
        return f"{self.function}-{self.kind}{self.size}-{words}"

    @property
    def from_logits(self) -> bool:
        return "logits" in self.function or self.function == "sample"

    def weights(self) -> torch.Tensor:
        return distribution(self.kind, self.size)

    def rows(self) -> torch.Tensor:
        """``[1, size]``, what the function is given."""
        weights = self.weights()[None]
        return weights.log() if self.from_logits else weights

    def arguments(self) -> dict[str, Any]:
        """Filters as the function takes them."""
        filters = dict(self.filters)
        if filters.pop("joint", False):
            filters["filter_apply_order"] = "joint"
        return filters

    def expected(self) -> torch.Tensor:
        return shares(self.weights(), **self.filters)


_K, _P, _M = "top_k_sampling_from_probs", "top_p_sampling_from_probs", "min_p_sampling_from_probs"
_KP = "top_k_top_p_sampling_from_probs"
CASES = [
    Case("zipf", 5000, "sampling_from_probs", {}),
    Case("flat", 1025, "sampling_from_probs", {}),
    Case("sparse", 40000, "sampling_from_probs", {}),
    Case("random", 300, "sampling_from_logits", {}),
    Case("ties", 2000, _K, {"top_k": 600}),
    Case("zipf", 5000, _P, {"top_p": 0.6}),
    Case("peaked", 3000, _P, {"top_p": 0.95}),
    Case("zipf", 2000, _M, {"min_p": 0.02}),
    Case("zipf", 5000, _KP, {"top_k": 50, "top_p": 0.7}),
    Case("zipf", 5000, _KP, {"top_k": 50, "top_p": 0.5, "joint": True}),
    Case("random", 1500, "top_k_top_p_sampling_from_logits", {"top_k": 400, "top_p": 0.5}),
    Case("zipf", 3000, "sample", {"top_k": 90, "top_p": 0.8, "min_p": 0.02}),
]
