# SPDX-License-Identifier: Apache-2.0
"""All-reduce of registered buffers: ranks that are streams, and ranks that are processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks_support import launch

from precast.comm import vllm_dispose, vllm_init_custom_ar, vllm_register_buffer

pytestmark = pytest.mark.alone

RANKS = Path(__file__).with_name("custom_all_reduce_ranks.py")
STREAMS = RANKS.with_name("custom_all_reduce_streams.py")


def test_ranks_that_are_streams_of_one_gpu() -> None:
    said = launch(STREAMS, "60", "200")
    assert [f"{world} ranks: 60 calls" in said for world in (2, 4, 6, 8)] == [True] * 4


def test_two_processes() -> None:
    """On one GPU their kernels take turns, which is slow."""
    many = torch.cuda.device_count() > 1
    said = launch(RANKS, *(("200", "1000") if many else ("8", "8")), processes=2)
    assert "2 processes" in said


def test_ranks_that_are_forked_before_cuda_is_used() -> None:
    assert "two forked ranks are done" in launch(RANKS, "fork")


def test_a_rank_without_peers() -> None:
    """The form that a sanitizer can run, under which no two kernels run at once."""
    assert "alone: 40 calls" in launch(STREAMS, "alone", "40")


def test_a_rank_that_does_not_call() -> None:
    assert "rank 0 did not wait for ever" in launch(
        RANKS, "lag", processes=2, PRECAST_COMM_TIMEOUT="3"
    )


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_four_processes() -> None:
    assert "4 processes" in launch(RANKS, "100", "500", processes=4)


def test_eight_processes() -> None:
    """On fewer GPUs their kernels take turns, which is slow."""
    many = torch.cuda.device_count() >= 8
    said = launch(RANKS, *(("100", "500") if many else ("4", "4")), processes=8)
    assert "8 processes" in said


def test_what_a_handle_refuses() -> None:
    signals = [torch.zeros(1 << 16, dtype=torch.uint8, device="cuda") for _ in range(2)]
    addresses = [signal.data_ptr() for signal in signals]
    table = torch.zeros(128, dtype=torch.uint8, device="cuda")
    for arguments, words in (
        ((addresses[:1], table, 0, True), "must have 2, 4, 6, 8 ranks, got 1"),
        ((addresses, table, 2, True), "rank must be 0 to 1, got 2"),
        (([addresses[0] + 8, addresses[1]], table, 0, True), "multiples of 16"),
        (([1 << 60, addresses[1]], table, 0, True), "is no address of memory of a CUDA device"),
        ((addresses, table[:32], 0, True), "rank_data must have 64 bytes"),
        ((addresses, table[1:], 0, True), "start at a multiple of 16"),
        ((addresses, table.cpu(), 0, True), "rank_data must be a CUDA tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            vllm_init_custom_ar(*arguments)
    handle = vllm_init_custom_ar(addresses, table, 0, True)
    vllm_register_buffer(handle, addresses)
    vllm_register_buffer(handle, addresses)
    with pytest.raises(ValueError, match="got 128 bytes for 3 of them"):
        vllm_register_buffer(handle, addresses)
    assert table.view(torch.int64).view(2, 8)[:, :2].tolist() == [addresses, addresses]
    vllm_dispose(handle)
    with pytest.raises(ValueError, match="must be a handle"):
        vllm_dispose(handle)
