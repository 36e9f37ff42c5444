# SPDX-License-Identifier: Apache-2.0
"""Find the seed and the offset of a call."""

from __future__ import annotations

from typing import TypeAlias

from precast._base.torch import torch
from precast._ops.sampling._philox import signed

#: What the exports take: seed and offset as tensors, or else as numbers.
Random: TypeAlias = "tuple[torch.Tensor | None, int, torch.Tensor | None, int]"

INCREMENT = 4  # A generator's offset counts words, and kernels of torch take four at a time.


def random_arguments(
    function: str,
    x: torch.Tensor,
    generator: torch.Generator | None,
    seed: torch.Tensor | int | None,
    offset: torch.Tensor | int | None,
) -> Random:
    """Return the seed and the offset that are given, or those of a generator, which moves on.

    While a CUDA graph is captured, and in ``torch.compile``, both are drawn on the device, by the
    generator too: so each replay of a graph that it is registered with has numbers of its own.
    """
    if seed is not None or offset is not None:
        return _given(function, seed, offset)
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and x.is_cuda and x.get_device() != torch.cuda.current_device():
        # Whether the tensor's stream is captured counts here and in the generator's functions.
        with torch.cuda.device(x.get_device()):
            return random_arguments(function, x, generator, seed, offset)
    if is_compiling or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        if generator is None:
            drawn = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=x.device)
        else:
            _check_device(function, x, generator, on_device=True)
            drawn = torch.empty(2, dtype=torch.int64, device=x.device)
            drawn.random_(generator=generator)
        return drawn[:1], 0, drawn[1:], 0
    if generator is None:
        index = x.get_device()
        cuda = torch.cuda.default_generators if index >= 0 else ()
        generator = cuda[index] if index >= 0 else torch.default_generator
    else:
        _check_device(function, x, generator, on_device=False)
    if generator.device.type == "cuda":
        start = generator.get_offset()
        generator.set_offset(start + INCREMENT)
        return None, signed(generator.initial_seed()), None, start
    # A generator of the CPU has no counter that a kernel could use: it draws a seed.
    drawn = torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
    return None, int(drawn), None, 0


def _check_device(
    function: str, x: torch.Tensor, generator: torch.Generator, on_device: bool
) -> None:
    """Check that a generator is of the tensor's device, or of the CPU unless the device draws."""
    device = generator.device
    if device.type == x.device.type:
        if device.index in (None, x.device.index):  # None: the device it was made on
            return
    elif device.type == "cpu":
        if not on_device:
            return
        raise ValueError(
            f"{function}: generator must be on {x.device} as the distributions while a CUDA graph "
            f"is captured, got one on the CPU: all replays would have the numbers that it draws "
            f"now. Fix: pass a generator of {x.device} that is registered with the graph "
            f"(graph.register_generator_state), or seed and offset as tensors"
        )
    raise ValueError(
        f"{function}: generator must be on {x.device} as the distributions or on the CPU, got "
        f"{device}"
    )


def _given(
    function: str, seed: torch.Tensor | int | None, offset: torch.Tensor | int | None
) -> Random:
    if seed is None or offset is None:
        missing = "seed" if seed is None else "offset"
        raise ValueError(f"{function}: seed and offset must be given together, got no {missing}")
    if isinstance(seed, torch.Tensor) and isinstance(offset, torch.Tensor):
        return seed, 0, offset, 0
    if isinstance(seed, torch.Tensor) or isinstance(offset, torch.Tensor):
        raise ValueError(f"{function}: seed and offset must both be tensors or both be scalars")
    return None, signed(seed), None, signed(offset)
