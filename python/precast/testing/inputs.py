# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs for tests: fresh random data, awkward strides, poison and guards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# These bits are a NaN in float16 and bfloat16, and repeated also in float32, that no arithmetic
# produces.
_POISON = 0x7FA5

#: Hidden sizes that break assumptions: below a vector, a warp, a block; not a power of two; huge.
ODD_HIDDEN_SIZES = (1, 3, 17, 127, 129, 1000, 4095, 5120, 7168, 8192, 16384, 65536, 65537)


def random_tensor(
    *shape: int,
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    generator: torch.Generator | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Normally distributed values with standard deviation ``scale``.

    With a CPU generator the values do not depend on the device.
    """
    source = generator.device if generator is not None else torch.device(device)
    values = torch.randn(shape, generator=generator, device=source, dtype=torch.float32)
    return (values * scale).to(device=device, dtype=dtype)


def row_strided(tensor: torch.Tensor, gap: int, offset: int = 0) -> torch.Tensor:
    """Copy to a buffer at ``offset`` elements, with ``gap`` more elements between rows.

    An odd offset gives a pointer that is not aligned to a vector; everything around the values is
    poison.
    """
    guarded = Guarded(tensor.shape, tensor.dtype, tensor.device, gap=gap, offset=offset)
    return guarded.view.copy_(tensor)


def packed_slice(
    tokens: int,
    heads: Sequence[int],
    which: int,
    head_dim: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cuda",
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return ``(tokens, heads[which], head_dim)``, a view of ``(tokens, sum(heads) * head_dim)``.

    Engines pass the queries or keys of a fused projection to a norm like this.
    """
    packed = random_tensor(
        tokens, sum(heads) * head_dim, dtype=dtype, device=device, generator=generator
    )
    start = sum(heads[:which]) * head_dim
    part = packed[:, start : start + heads[which] * head_dim]
    return part.view(tokens, heads[which], head_dim)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a floating-point tensor with a NaN that no kernel computes, and return it.

    In fp8 a kernel may write this NaN if it was given one.
    """
    bits = _bits(tensor)
    bits.fill_(_PATTERNS[bits.dtype])
    return tensor


_PATTERNS = {
    torch.int8: 0x7F,
    torch.int16: _POISON,
    torch.int32: (_POISON << 16) | _POISON,
}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dtype.is_floating_point or tensor.element_size() not in (1, 2, 4):
        raise ValueError(f"tensor must be float8, float16, bfloat16 or float32, got {tensor.dtype}")
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


class Guarded:
    """A poisoned tensor inside a poisoned buffer, to detect writes outside of the tensor.

    Parameters
    ----------
    shape : sequence of int
        Shape of :attr:`view`; its last dimension is contiguous.
    gap : int
        Elements between two rows.
    offset : int
        Elements before the first one, added to a margin of 256 bytes on either side.

    Examples
    --------
    >>> guarded = Guarded((2, 3), torch.float32, "cpu", gap=1)
    >>> guarded.view.copy_(torch.ones(2, 3)).sum()
    tensor(6.)
    >>> guarded.check()
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
        *,
        gap: int = 0,
        offset: int = 0,
    ) -> None:
        strides: list[int] = []
        step = 1
        for position, size in enumerate(reversed(shape)):
            strides.insert(0, step)
            step = step * size + (gap if position == 0 else 0)
        margin = 256 // torch.empty(0, dtype=dtype).element_size()
        buffer = torch.empty(step + offset + 2 * margin, dtype=dtype, device=device)
        self.buffer = poison(buffer)
        self.view = buffer.as_strided(tuple(shape), tuple(strides), margin + offset)

    def check(self, name: str = "output") -> None:
        """Raise AssertionError if anything outside of the tensor was written."""
        rest = _bits(self.buffer.clone())
        twin = rest.as_strided(self.view.size(), self.view.stride(), self.view.storage_offset())
        expected = _bits(poison(torch.empty_like(self.buffer)))
        twin.fill_(expected[0])
        wrong = (rest != expected).nonzero().flatten()
        if wrong.numel():
            first = int(wrong[0]) - self.view.storage_offset()
            raise AssertionError(
                f"{name}: {wrong.numel()} elements outside of the tensor were written, the first "
                f"{first} elements from its start (shape {tuple(self.view.shape)}, strides "
                f"{self.view.stride()})"
            )
