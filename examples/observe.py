# SPDX-License-Identifier: Apache-2.0
"""The records of a call: its lines in the log, and its definition as a trace.

Both are off unless these variables are set when precast is imported::

    PRECAST_LOGLEVEL=3 PRECAST_TRACE_DUMP=1 python examples/observe.py

Without a GPU the reference runs.
"""

from __future__ import annotations

import contextlib

import torch

import precast


def main() -> None:
    has_gpu = torch.cuda.is_available()
    mode = contextlib.nullcontext() if has_gpu else precast.reference_mode()
    x = torch.randn(4, 576, dtype=torch.bfloat16, device="cuda" if has_gpu else "cpu")
    weight = torch.ones_like(x[0])
    with mode:
        precast.rmsnorm(x, weight)
    definition = precast.fi_trace(precast.rmsnorm, x, weight)
    axes = ", ".join(
        f"{name} = {axis['value']}" if axis["type"] == "const" else f"any {name}"
        for name, axis in definition["axes"].items()
    )
    print(f"trace {definition['name']} ({axes}): {', '.join(definition['tags'])}")


if __name__ == "__main__":
    main()
