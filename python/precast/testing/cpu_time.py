# SPDX-License-Identifier: Apache-2.0
"""How long a call keeps the CPU, launch included."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precast.testing.stats import Timing

# The launch queue of a stream holds about a thousand kernels; a full one makes the CPU wait.
_BLOCK = 200


def bench_cpu_time(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    blocks: int = 50,
    calls: int = _BLOCK,
    synchronize: Callable[[], None] | None = None,
) -> Timing:
    """Measure the CPU time of one call, in seconds, in Python and in the driver.

    Parameters
    ----------
    fn, args, kwargs
        The call. Take tensors so small that the GPU is faster than the launches.
    blocks : int
        Samples; each is the mean of several consecutive calls, and the GPU is idle at its start.
    calls : int
        Calls of each sample; fewer than 200 for kernels so slow that the CPU does not matter.
    synchronize : callable, optional
        Waits for the device between samples; default ``torch.cuda.synchronize``.
    """
    if synchronize is None:
        import torch

        synchronize = torch.cuda.synchronize
    kwargs = dict(kwargs or {})
    samples = []
    for _ in range(blocks + 1):
        synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            fn(*args, **kwargs)
        samples.append((time.perf_counter_ns() - start) * 1e-6 / calls)
    synchronize()
    return Timing.of_milliseconds(samples[1:])
