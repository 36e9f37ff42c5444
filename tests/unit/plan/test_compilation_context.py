# SPDX-License-Identifier: Apache-2.0
"""Which targets a process compiles for."""

from __future__ import annotations

import re

import pytest
import torch

from precast.compilation_context import CompilationContext


def context(monkeypatch: pytest.MonkeyPatch, text: str) -> CompilationContext:
    monkeypatch.setenv("PRECAST_CUDA_ARCH_LIST", text)
    return CompilationContext()


def present(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> CompilationContext:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: capabilities[i])
    return CompilationContext()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.0 9.0a 10.0a", {(8, "0"), (9, "0a"), (10, "0a")}),
        ("8.0,9.0;10.0", {(8, "0"), (9, "0a"), (10, "0f")}),
        ("11.0 12.0 12.1", {(11, "0a"), (12, "0f")}),
        ("  9.0 ; ", {(9, "0a")}),
        ("12.0a", {(12, "0a")}),
    ],
)
def test_a_list_is_taken_as_given_and_suffixes_come_from_the_table(monkeypatch, text, expected):
    present(monkeypatch, (8, 9))
    assert expected == context(monkeypatch, text).TARGET_CUDA_ARCHS


@pytest.mark.parametrize("word", ["9", "90", "sm90a", "9.0b", "9.0+PTX", "a.b"])
def test_a_malformed_entry_is_quoted(monkeypatch, word):
    with pytest.raises(ValueError, match=rf"PRECAST_CUDA_ARCH_LIST: '{re.escape(word)}' is not a"):
        context(monkeypatch, f"8.0 {word}")


@pytest.mark.parametrize("word", ["99.9", "7.5", "9.1", "13.0"])
def test_a_capability_that_no_target_serves_is_an_error(monkeypatch, word):
    with pytest.raises(
        ValueError, match=rf"'{word}': no target .*; legal: 8.0, 8.6, 8.7, 8.9, 9.0"
    ):
        context(monkeypatch, f"8.0 {word}")
    monkeypatch.delenv("PRECAST_CUDA_ARCH_LIST")
    major, minor = map(int, word.split("."))
    with pytest.raises(ValueError, match=rf"'{word}': no target .*; legal: 8.0, "):
        present(monkeypatch, (9, 0), (major, minor))


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([(9, 0)], {(9, "0a")}),
        ([(9, 0), (9, 0), (8, 0)], {(9, "0a"), (8, "0")}),
        ([(8, 7)], {(8, "6")}),
        ([(10, 3), (10, 0)], {(10, "0f")}),
        ([(12, 1)], {(12, "0f")}),
        ([], set()),
    ],
)
def test_without_a_list_the_gpus_present_decide(monkeypatch, gpus, expected):
    assert expected == present(monkeypatch, *gpus).TARGET_CUDA_ARCHS


def test_flags_of_the_targets_that_qualify(monkeypatch):
    targets = context(monkeypatch, "12.0 8.0 9.0 10.0")
    assert targets.get_nvcc_flags_list() == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100f,code=sm_100f",
        "-gencode=arch=compute_120f,code=sm_120f",
    ]
    # Neither 12.x nor any later major follows from a list that ends at 10.
    assert targets.get_nvcc_flags_list([9, 10]) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100f,code=sm_100f",
    ]


@pytest.mark.parametrize("majors", [[8], [9, 10, 11], []])
def test_no_target_left(monkeypatch, majors):
    targets = context(monkeypatch, "12.0")
    text = f"No supported CUDA architectures found for major versions {majors}"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        targets.get_nvcc_flags_list(majors)


def test_no_target_at_all(monkeypatch):
    with pytest.raises(
        RuntimeError, match=r"Targets: none \(no GPU present\). Fix: set PRECAST_CUDA"
    ):
        present(monkeypatch).get_nvcc_flags_list()
