# SPDX-License-Identifier: Apache-2.0
"""The order of rows that TensorRT-LLM's generated GEMM kernels load."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast
from precast import utils

# Where each row of a block comes from, written out.
ROWS_OF_16 = [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
ROWS_OF_32 = [
    *(0, 4, 8, 12, 16, 20, 24, 28),
    *(1, 5, 9, 13, 17, 21, 25, 29),
    *(2, 6, 10, 14, 18, 22, 26, 30),
    *(3, 7, 11, 15, 19, 23, 27, 31),
]


@pytest.mark.parametrize(
    ("tile", "block"), [(64, ROWS_OF_16), (8, ROWS_OF_16), (128, ROWS_OF_32), (256, ROWS_OF_32)]
)
def test_rows_of_a_weight(tile: int, block: list[int]) -> None:
    weight = torch.arange(96 * 3).view(96, 3)
    size = len(block)
    want = [first + row for first in range(0, 96, size) for row in block]
    rows = utils.get_shuffle_matrix_a_row_indices(weight, tile)
    assert rows.tolist() == want
    assert rows.dtype == torch.int64
    assert torch.equal(precast.shuffle_matrix_a(weight, tile), weight[want])
    codes = weight.to(torch.uint8).view(torch.float8_e4m3fn).T.contiguous().T
    got = precast.shuffle_matrix_a(codes, tile)
    assert got.dtype == codes.dtype
    assert torch.equal(got.view(torch.uint8), codes.view(torch.uint8)[want])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 4, 6])
def test_scales_are_shuffled_and_go_into_tiles(columns: int, dtype: torch.dtype) -> None:
    scales = (torch.arange(256 * columns) % 251).view(256, columns).to(dtype)
    rows = utils.get_shuffle_matrix_sf_a_row_indices(scales, 128, 32)
    assert torch.equal(rows, utils.get_shuffle_matrix_a_row_indices(scales, 128))
    with precast.reference_mode():
        want = precast.block_scale_interleave(scales[rows])
        assert torch.equal(precast.shuffle_matrix_sf_a(scales, 128), want)


BYTES = torch.zeros(128, 4, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: precast.shuffle_matrix_a(BYTES[0], 128), r"2 dimensions, got shape \[4\]"),
        (
            lambda: precast.shuffle_matrix_a(BYTES[:48], 128),
            "shuffle_matrix_a: input_tensor must have a multiple of 32 rows for "
            "epilogue_tile_m=128, got 48",
        ),
        (lambda: precast.shuffle_matrix_a(BYTES[:40], 64), "a multiple of 16 rows"),
        (lambda: precast.shuffle_matrix_a(BYTES, 0), "epilogue_tile_m must be positive, got 0"),
        (lambda: precast.shuffle_matrix_sf_a(BYTES, 128, 8), "num_elts_per_sf must be 16 or 32"),
        (lambda: precast.shuffle_matrix_sf_a(BYTES[:64], 128), "a multiple of 128 rows, got 64"),
        (lambda: precast.shuffle_matrix_sf_a(BYTES.float(), 128), "must be uint8 or bfloat16, got"),
        (lambda: precast.shuffle_matrix_sf_a(BYTES[0], 128), "must have 2 dimensions"),
        (
            lambda: utils.get_shuffle_matrix_sf_a_row_indices(BYTES, 128, 7),
            "^get_shuffle_matrix_sf",
        ),
    ],
)
def test_invalid_arguments(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(TypeError, match=r"input_tensor must be a torch\.Tensor, got list"):
        precast.shuffle_matrix_a([1], 128)  # type: ignore[arg-type]
