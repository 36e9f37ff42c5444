# SPDX-License-Identifier: Apache-2.0
"""What the products of low-rank adapters share: references, checks, scratch memory and texts."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Iterator

from precast._base.torch import torch

#: ``kTokenPairsRow``: int32 of scratch for each token, where kernels list its pairs.
TOKEN_PAIRS_ROW = 32
#: With fewer pairs, each CTA reads them all and needs no list.
MAX_PAIRS_WITHOUT_LIST = 1024
#: ``kLoraVector`` and ``kMaxLoraRank``.
VECTOR, MAX_RANK = 8, 65528

#: What the functions say of their pairs.
PAIRS = """
Parameters
----------
sorted_token_ids : torch.Tensor
    ``[pairs]``, int64, contiguous: the token of each pair of a token and an expert, in any order. A
    number that is no token, such as -1, says that the pair is padding.
expert_ids : torch.Tensor
    ``[pairs]``, int64, contiguous: the expert of each pair. A number that is no expert says that
    the pair has no weights here.
lora_indices : torch.Tensor
    ``[tokens]``, int64, contiguous: the adapter of each token, or -1 for none.

Raises
------
ValueError
    A tensor that is not on a CUDA device; a dtype, shape, device, strides or alignment other than
    above; outputs that overlap another argument; a rank that is no multiple of 8.
"""

#: Finds the matrix of a slice, an adapter and an expert; None where there is none.
Find = Callable[[int, int, int], torch.Tensor | None]


def groups_of_pairs(
    sorted_token_ids: torch.Tensor, expert_ids: torch.Tensor, lora_indices: torch.Tensor
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """For each adapter and expert that pairs have together: the two numbers, and those pairs."""
    tokens = len(lora_indices)
    loras = torch.nn.functional.pad(lora_indices, (0, 1), value=-1)  # The last token has none.
    exists = (sorted_token_ids >= 0) & (sorted_token_ids < tokens)
    lora = loras[torch.where(exists, sorted_token_ids, tokens)]
    chosen = torch.stack([lora, expert_ids])[:, (lora >= 0) & (expert_ids >= 0)]
    for one, expert in chosen.unique(dim=1).T.tolist():
        yield one, expert, ((lora == one) & (expert_ids == expert)).nonzero()[:, 0]


def shrink(
    y: torch.Tensor,
    x: torch.Tensor,
    find: Find,
    pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    per_pair_input: bool,
    accumulates: bool,
) -> None:
    """Write the products to the rank to ``y``, ``[slices, pairs, rank]``."""
    for lora, expert, which in groups_of_pairs(*pairs):
        rows = x[which if per_pair_input else pairs[0][which]].float()
        for i, of_slice in enumerate(y):
            weight = find(i, lora, expert)
            if weight is not None:
                product = rows @ weight.float().T
                before = of_slice[which].float() if accumulates else 0.0
                of_slice[which] = (before + product).to(y.dtype)


def expanded(
    x: torch.Tensor,
    slice_id: int,
    find: Find,
    pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    features: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products from the rank of a slice, ``[pairs, features]``, and which there are."""
    product = x.new_zeros(x.shape[1], features, dtype=torch.float32)
    exists = torch.zeros(x.shape[1], dtype=torch.bool, device=x.device)
    for lora, expert, which in groups_of_pairs(*pairs):
        weight = find(slice_id, lora, expert)
        if weight is not None:
            product[which] = x[slice_id, which].float() @ weight.float().T
            exists[which] = True
    return product, exists


def add_up(
    y: torch.Tensor,
    product: torch.Tensor,
    exists: torch.Tensor,
    sorted_token_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> None:
    """Add the products of each token's pairs to its row, weighted, in the order of the pairs."""
    terms = product[exists] * topk_weights[exists, None]
    y.index_add_(0, sorted_token_ids[exists], terms)


def matrix_at(address: int, rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """The matrix at an address, of the 16-bit dtype and on the device of ``like``."""
    count = rows * columns
    if like.is_cuda:
        where = {"data": (address, False), "shape": (count,), "typestr": "<i2", "version": 3}
        memory = types.SimpleNamespace(__cuda_array_interface__=where)
        numbers = torch.as_tensor(memory, device=like.device)
        return numbers.view(like.dtype).view(rows, columns)
    numbers = (ctypes.c_int16 * count).from_address(address)
    return torch.frombuffer(numbers, dtype=like.dtype).view(rows, columns)


def find_in_table(
    w_ptr: torch.Tensor, lora_stride: int, rows: int, columns: int, like: torch.Tensor
) -> Find:
    """The matrices ``[rows, columns]`` whose addresses a table holds."""
    table = w_ptr.tolist()

    def find(slice_id: int, lora: int, expert: int) -> torch.Tensor | None:
        of_slice = table[slice_id]
        if expert >= len(of_slice) or of_slice[expert] == 0 or rows * columns == 0:
            return None
        address = of_slice[expert] + lora * lora_stride * like.element_size()
        return matrix_at(address, rows, columns, like)

    return find


def find_in(weights: torch.Tensor) -> Find:
    """The matrices of one slice, ``[adapters, experts, a, b]``."""

    def find(slice_id: int, lora: int, expert: int) -> torch.Tensor | None:
        loras, experts = weights.shape[:2]
        return weights[lora, expert] if lora < loras and expert < experts else None

    return find


def write_slice(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    topk_weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write both products of one slice to its columns, with one rounding between them."""
    shrunk = x.new_zeros(1, len(pairs[0]), a.shape[2])
    shrink(shrunk, x, find_in(a), pairs, False, accumulates=False)
    product, exists = expanded(shrunk, 0, find_in(b), pairs, b.shape[2])
    sums = x.new_zeros(len(out), b.shape[2], dtype=torch.float32)
    add_up(sums, product, exists, pairs[0], topk_weights)
    out.copy_(sums.to(out.dtype))


def new_token_pairs(sorted_token_ids: torch.Tensor, tokens: int) -> torch.Tensor | None:
    """Scratch memory for lists of each token's pairs, where there are many pairs."""
    pairs = sorted_token_ids.shape[0]
    if not torch.compiler.is_compiling() and pairs <= MAX_PAIRS_WITHOUT_LIST:
        return None
    return sorted_token_ids.new_zeros(tokens, TOKEN_PAIRS_ROW, dtype=torch.int32)


# -- checks, in the words of the bindings ---------------------------------------------------------


def check_rank_of(export: str, name: str, t: torch.Tensor, rank: int) -> None:
    if rank % VECTOR or rank > MAX_RANK:
        raise ValueError(
            f"{export}: {name} must have a rank that is a multiple of 8 and at most {MAX_RANK}, "
            f"got shape {[*t.shape]}"
        )


def check_rows_of(export: str, name: str, t: torch.Tensor, least: int, of: str) -> None:
    if len(t) < least:
        raise ValueError(
            f"{export}: {name} must have a row for each of the {least} {of}, got shape {[*t.shape]}"
        )


def check_stride(export: str, lora_stride: int) -> None:
    if lora_stride < 0 or lora_stride % VECTOR:
        raise ValueError(
            f"{export}: lora_stride must be a multiple of 8 and at least 0, got {lora_stride}"
        )


def check_weights(export: str, name: str, weights: torch.Tensor) -> None:
    """Raise unless the matrices of one slice are contiguous and start at multiples of 16 bytes."""
    if weights.numel() == 0:
        return
    *sizes, rows, columns = weights.shape
    *strides, of_row, of_column = weights.stride()
    fits = (columns == 1 or of_column == 1) and (rows == 1 or of_row == columns)
    if not fits or any(n > 1 and stride % VECTOR for n, stride in zip(sizes, strides)):
        raise ValueError(
            f"{export}: {name} must have contiguous matrices at multiples of 16 bytes, got strides "
            f"{[*weights.stride()]}; call .contiguous()"
        )
