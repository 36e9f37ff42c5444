# SPDX-License-Identifier: Apache-2.0
"""Gated activations: gate and up read once, their product written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from _harness import Case
from _script import script
from torch.nn import functional

from precast.testing import poison

HIDDEN = 14336  # the intermediate size of Llama 8B
ROWS = {
    "silu_and_mul": (1, 64, 1024, 16384),
    "gelu_and_mul": (1024, 16384),
    "gelu_tanh_and_mul": (1024, 16384),
}
ACTIVATIONS = {
    "silu_and_mul": functional.silu,
    "gelu_and_mul": functional.gelu,
    "gelu_tanh_and_mul": lambda x: functional.gelu(x, approximate="tanh"),
}


def _gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return call


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for op, all_rows in ROWS.items():
        for rows in all_rows:

            def make(rows: int = rows) -> tuple[torch.Tensor, torch.Tensor]:
                x = torch.randn((rows, 2 * HIDDEN), dtype=dtype, device="cuda")
                return x, poison(torch.empty((rows, HIDDEN), dtype=dtype, device="cuda"))

            yield Case(
                op,
                f"[{rows}, 2x{HIDDEN}]",
                3 * rows * HIDDEN * dtype.itemsize,
                make,
                bind=lambda gated: lambda x, out: gated(x, out),
                eager=_gated(ACTIVATIONS[op]),
            )


if __name__ == "__main__":
    script(__file__)
