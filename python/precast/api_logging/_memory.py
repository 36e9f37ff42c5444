# SPDX-License-Identifier: Apache-2.0
"""The memory of the tensors of a call, and copies of it that keep strides and aliases.

Tensors of one storage whose bytes interleave or overlap share one *block*: the bytes from the first
to the last of them. A tensor is a view of its block. Copies are made of bytes, whatever the dtype,
so the tensors in a restored block have the same strides, gaps and shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precast._base.torch import torch

#: Allocations of torch on a GPU start at multiples of this; a copy keeps the remainder.
ALIGNMENT = 512


@dataclass(frozen=True)
class View:
    """A tensor as bytes of a block."""

    block: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie densely in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Block:
    """Bytes on one device; ``alignment`` is the address of the first one modulo 512."""

    size: int
    alignment: int
    device: str


def opaque(tensor: torch.Tensor) -> str | None:
    """Why the memory of a tensor cannot be read, or None."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"is on the device {tensor.device}"
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return "is quantized, or a conjugate or negative view"
    try:
        tensor.data_ptr()
    except RuntimeError:  # Function transforms wrap tensors without changing their class.
        return "has no memory of its own"
    return None


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of the byte after the last; equal for an empty tensor."""
    start = int(tensor.data_ptr())
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * int(tensor.element_size())


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, Block], dict[str, View]]:
    """The blocks of the tensors, each named after its first tensor, and the tensors' views."""
    blocks: dict[str, Block] = {}
    views: dict[str, View] = {}
    by_storage: dict[Any, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        start, end = extent(tensor)
        # An empty tensor has no memory; its storage may not either.
        storage = name if start == end else tensor.untyped_storage().data_ptr()
        by_storage.setdefault((tensor.device, storage), []).append((start, end, name))
    order = {name: position for position, name in enumerate(tensors)}
    for (device, _), members in by_storage.items():
        groups: list[list[tuple[int, int, str]]] = []
        behind = -1
        for member in sorted(members):
            if not groups or member[0] >= behind:
                groups.append([])
            groups[-1].append(member)
            behind = max(behind, member[1])
        for group in groups:
            first = group[0][0]
            block = min((name for _, _, name in group), key=order.__getitem__)
            size = max(end for _, end, _ in group) - first
            blocks[block] = Block(size, first % ALIGNMENT, str(device))
            for start, _, name in group:
                tensor = tensors[name]
                views[name] = View(
                    block,
                    start - first,
                    str(tensor.dtype).partition(".")[2],
                    tuple(tensor.shape),
                    tuple(tensor.stride()),
                    str(device),
                )
    return blocks, {name: views[name] for name in tensors}


def copy_to_host(
    tensors: Mapping[str, torch.Tensor], blocks: Mapping[str, Block], views: Mapping[str, View]
) -> dict[str, torch.Tensor]:
    """The bytes of every block, as 1-D uint8 tensors on the CPU; waits for the GPU."""
    copies = {}
    for name, block in blocks.items():
        tensor = tensors[name].detach()
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        if block.size:
            start = tensor.storage_offset() * tensor.element_size() - views[name].offset
            raw.set_(tensor.untyped_storage(), start, (block.size,), (1,))
        copies[name] = raw.cpu().clone() if raw.device.type == "cpu" else raw.cpu()
    return copies


def view_of(block: torch.Tensor, view: View) -> torch.Tensor:
    """The tensor of a view in its block's bytes; a copy if they are not aligned for its dtype."""
    dtype = getattr(torch, view.dtype)
    if view.numel == 0:
        return torch.empty(view.shape, dtype=dtype, device=block.device).as_strided(
            view.shape, view.strides
        )
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.strides))
    end = view.offset + (last + 1) * int(dtype.itemsize)
    if not 0 <= view.offset < end <= block.numel():
        raise ValueError(f"bytes {view.offset} to {end} are not in a block of {block.numel()}")
    part = block[view.offset : end]
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    # as_strided counts from the start of the storage, unless it gets the offset.
    part = part.view(dtype)
    return part.as_strided(view.shape, view.strides, part.storage_offset())


def place(data: torch.Tensor, block: Block, device: torch.device | str) -> torch.Tensor:
    """A copy of a block's bytes on ``device``, at an address with the same alignment."""
    room = torch.empty(block.size + 2 * ALIGNMENT, dtype=torch.uint8, device=device)
    start = (block.alignment - int(room.data_ptr())) % ALIGNMENT
    placed = room[start : start + block.size]
    return placed.copy_(data.view(torch.uint8).reshape(-1))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU."""
    return tensor.detach().cpu().contiguous().clone()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two contiguous tensors of one dtype and shape hold the same bytes."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
    return bool(torch.equal(a, b))


def shared(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each tensor whose address range overlaps an earlier one, a text with the earlier one."""
    found = {}
    seen: list[tuple[str, torch.Tensor, int, int]] = []
    for name, tensor in tensors.items():
        start, end = extent(tensor)
        for other, earlier, low, high in seen:
            if earlier.device == tensor.device and start < high and low < end:
                same = (start, tensor.shape, tensor.stride(), tensor.dtype) == (
                    low, earlier.shape, earlier.stride(), earlier.dtype,
                )  # fmt: skip
                # Strided tensors may interleave and have no byte in common.
                found[name] = f"is {other}" if same else f"overlaps the address range of {other}"
                break
        seen.append((name, tensor, start, end))
    return found
