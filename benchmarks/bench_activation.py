# SPDX-License-Identifier: Apache-2.0
"""Gated activations: gate and up read once, their product written once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _harness import DTYPES, Case, arguments, run

import precast
from precast.testing import poison

HIDDEN = 14336  # the intermediate size of Llama 8B
ROWS = {
    "silu_and_mul": (1, 64, 1024, 16384),
    "gelu_and_mul": (1024, 16384),
    "gelu_tanh_and_mul": (1024, 16384),
}


def cases(dtype: torch.dtype) -> Iterator[Case]:
    for op, all_rows in ROWS.items():
        function = getattr(precast, op)
        for rows in all_rows:

            def make(rows: int = rows) -> tuple[torch.Tensor, torch.Tensor]:
                x = torch.randn((rows, 2 * HIDDEN), dtype=dtype, device="cuda")
                return x, poison(torch.empty((rows, HIDDEN), dtype=dtype, device="cuda"))

            yield Case(
                op,
                f"[{rows}, 2x{HIDDEN}]",
                3 * rows * HIDDEN * dtype.itemsize,
                make,
                lambda x, out, fn=function: fn(x, out),
            )


if __name__ == "__main__":
    options = arguments(__doc__)
    run(cases(DTYPES[options.dtype]), options)
