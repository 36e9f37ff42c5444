# SPDX-License-Identifier: Apache-2.0
"""Paged KV caches for tests: memory that is compared whole, and what must stand in it.

What must come out is made by torch's own indexing on the layouts' definition, not by the library's
references. Tensors are views of buffers of random bits; a test compares the whole buffer, so that a
byte written anywhere else is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

DEVICE = "cuda"
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
FORMS = ("pair", "packed", "slices", "padded")
LAYOUTS = ("NHD", "HND")


def random_bits(
    *shape: int, dtype: torch.dtype, generator: torch.Generator, device: str | None = None
) -> torch.Tensor:
    """Any bits, NaNs among them: copies must not look at them."""
    count = torch.Size(shape).numel() * dtype.itemsize
    place = generator.device if device is None else torch.device(device)
    flat = torch.randint(
        256, (count,), dtype=torch.uint8, device=generator.device, generator=generator
    )
    return flat.to(place).view(dtype).view(shape)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view as integers of the same size."""
    return tensor.view(BITS[tensor.element_size()])


@dataclass
class PagedCache:
    """A cache in one of the forms that engines have, and the buffers it lies in.

    Attributes
    ----------
    argument : torch.Tensor or tuple of torch.Tensor
        What an op gets.
    halves : tuple of torch.Tensor
        Both parts as ``[pages, page_size, ...]``.
    buffers : tuple of torch.Tensor
        All memory, with what lies between.
    """

    argument: Any
    halves: tuple[torch.Tensor, torch.Tensor]
    buffers: tuple[torch.Tensor, ...]

    def before(self) -> tuple[torch.Tensor, ...]:
        return tuple(as_bits(b).clone() for b in self.buffers)

    def check(
        self, before: tuple[torch.Tensor, ...], rows: Any, page: Any, entry: Any, name: str
    ) -> None:
        """All memory is as before, but for ``rows`` at ``(page, entry)``."""
        got = tuple(as_bits(b).clone() for b in self.buffers)
        for buffer, old in zip(self.buffers, before, strict=True):
            as_bits(buffer).copy_(old)
        for half, row in zip(self.halves, rows, strict=True):
            as_bits(half)[page, entry] = as_bits(row)
        for mine, buffer in zip(got, self.buffers, strict=True):
            want = as_bits(buffer)
            wrong = (mine != want).nonzero()
            assert wrong.numel() == 0, f"{name}: {len(wrong)} elements differ, first {wrong[0]}"


def kv_cache(
    form: str,
    layout: str,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
    offset: int = 0,
) -> PagedCache:
    """``sizes``: pages, page size, heads, head_dim; ``offset`` elements into the buffer."""
    pages, page_size, heads, dim = sizes
    inner = (heads, page_size) if layout == "HND" else (page_size, heads)

    def make(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        flat = random_bits(torch.Size(shape).numel() + offset, dtype=dtype, generator=generator)
        return flat, flat[offset:].view(shape)

    if form == "pair":
        made = [make(pages, *inner, dim) for _ in range(2)]
        buffers, parts = zip(*made)
        argument: Any = parts
    elif form == "packed":
        buffer, argument = make(pages, 2, *inner, dim)
        buffers, parts = (buffer,), argument.unbind(1)
    elif form == "slices":  # Keys and values beside each other in a row.
        buffer, whole = make(pages, *inner, 2 * dim)
        buffers, argument = (buffer,), (whole[..., :dim], whole[..., dim:])
        parts = argument
    else:  # Pages of a larger buffer, with another layer's between.
        buffer, whole = make(pages, 3, *inner, dim)
        buffers, argument = (buffer,), (whole[:, 2], whole[:, 0])
        parts = argument
    halves = tuple(part.transpose(1, 2) if layout == "HND" else part for part in parts)
    return PagedCache(argument, halves, tuple(buffers))  # type: ignore[arg-type]


def mla_cache(
    one_buffer: bool,
    sizes: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> PagedCache:
    """``sizes``: pages, page size; ``dims``: of both parts of an entry."""
    whole = random_bits(*sizes, sum(dims), dtype=dtype, generator=generator)
    parts = whole.split(dims, -1)
    if one_buffer:
        return PagedCache(parts, parts, (whole,))  # type: ignore[arg-type]
    copies = tuple(part.contiguous() for part in parts)
    return PagedCache(copies, copies, copies)  # type: ignore[arg-type]


@dataclass
class Tokens:
    """Where tokens go: a page table and slots that say the same, and the truth."""

    batch_indices: torch.Tensor
    positions: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    kv_last_page_len: torch.Tensor
    slots: torch.Tensor
    kept: torch.Tensor
    page: torch.Tensor  # of the kept ones
    entry: torch.Tensor

    @property
    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.batch_indices, self.positions

    @property
    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.kv_indices, self.kv_indptr, self.kv_last_page_len

    def named(self) -> dict[str, torch.Tensor]:
        names = ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")
        return {name: getattr(self, name) for name in names}


def tokens_for(
    count: int,
    pages: int,
    page_size: int,
    generator: torch.Generator,
    *,
    lost: bool = True,
    index: torch.dtype = torch.int32,
) -> Tokens:
    """``count`` tokens of a ragged batch at different places; with ``lost``, some without one."""
    device = generator.device

    def shuffled(n: int) -> torch.Tensor:
        return torch.randperm(n, device=device, generator=generator)

    requests = max(1, min(pages // 2, 7))
    cuts = (shuffled(pages - 1)[: requests - 1] + 1).sort().values if pages > 1 else shuffled(0)
    ends = torch.tensor([pages], device=device)
    indptr = torch.cat([torch.zeros_like(ends), cuts, ends])
    indices = shuffled(pages)
    requests = indptr.numel() - 1
    total = pages * page_size
    assert count <= total
    place = shuffled(total)[:count]  # As if all pages of all requests lay in a row.
    at = place // page_size
    batch = torch.searchsorted(indptr, at, right=True) - 1
    position = place - indptr[batch] * page_size
    page, entry = indices[at], place % page_size
    slot = page * page_size + entry
    kept = torch.ones(count, dtype=torch.bool, device=device)
    if lost and count >= 8:
        kept[shuffled(count)[:6]] = False
        wrong = (~kept).nonzero().flatten()
        batch[wrong[0]], position[wrong[1]], slot[wrong[0]] = -1, -1, -1
        batch[wrong[2]], slot[wrong[1]] = requests, -7
        position[wrong[3]], slot[wrong[2]] = total, total
        position[wrong[4]], slot[wrong[3]] = 2**31 - 1, 2**31 - 1
        batch[wrong[5]], slot[wrong[4]] = 2**31 - 1, total + 1
        slot[wrong[5]] = -(2**31)
        if index == torch.int64:
            batch[wrong[0]], position[wrong[1]] = 2**40, 2**32
            slot[wrong[0]], slot[wrong[1]] = 2**32, 2**63 - 1
    last = torch.full((requests,), page_size, device=device)
    numbers = [t.to(index) for t in (batch, position, indices, indptr, last, slot)]
    return Tokens(*numbers, kept, page[kept], entry[kept])


def keys_and_values(
    count: int, heads: int, dim: int, dtype: torch.dtype, generator: torch.Generator, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are appended: contiguous, slices of a packed qkv, or at odd addresses."""
    if form == "packed qkv":
        packed = random_bits(count, 4 * heads + 2 * heads, dim, dtype=dtype, generator=generator)
        return packed[:, 4 * heads : 5 * heads], packed[:, 5 * heads :]
    made = []
    for shift in (1, 3) if form == "odd addresses" else (0, 0):
        size = count * heads * dim
        flat = random_bits(size + shift, dtype=dtype, generator=generator)
        made.append(flat[shift:].view(count, heads, dim))
    return made[0], made[1]
