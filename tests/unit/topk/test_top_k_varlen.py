# SPDX-License-Identifier: Apache-2.0
"""Top-k of the rows of requests in reference mode: lengths, drafts, values, buffers, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import precast
from precast.errors import BackendSupportedError

pytestmark = pytest.mark.usefixtures("reference_mode")

SIZE = 40


def call(next_n: int = 1) -> dict[str, Any]:
    lens = torch.tensor([0, 1, 7, 35, 40, 90], dtype=torch.int32)
    rows = len(lens) * next_n
    logits = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(next_n)).round(
        decimals=1
    )
    return {"logits": logits, "seq_lens": lens, "top_k": 6, "next_n": next_n}


@pytest.mark.parametrize("next_n", [1, 2, 5])
@pytest.mark.parametrize("ratio", [1, 4])
def test_positions_and_values(next_n: int, ratio: int) -> None:
    given = {**call(next_n), "compress_ratio": ratio}
    indices, values = precast.top_k_varlen(**given, return_values=True)
    assert values is not None
    assert (indices.dtype, values.dtype) == (torch.int32, torch.float32)
    for i, row in enumerate(given["logits"].tolist()):
        request, t = divmod(i, next_n)
        tokens = int(given["seq_lens"][request]) - next_n + t + 1
        length = min(max(0, tokens // ratio), SIZE)
        want = sorted(sorted(range(length), key=lambda at: (-row[at], at))[:6])
        assert indices[i].tolist() == want + [-1] * (6 - len(want))
        assert values[i].tolist() == pytest.approx([row[at] for at in want] + [0] * (6 - len(want)))
    again, none = precast.top_k_varlen(**given)
    assert none is None and torch.equal(again, indices)


def test_buffers() -> None:
    given = call()
    want, scores = precast.top_k_varlen(**given, return_values=True)
    flat, values = torch.full((36,), -7, dtype=torch.int32), torch.full((6, 6), -7.0)
    got = precast.top_k_varlen(
        **given, return_values=True, out_indices=flat, out_values=values, backend="radix_cutlass"
    )
    assert got[1] is values and got[0].data_ptr() == flat.data_ptr()
    assert torch.equal(got[0], want) and torch.equal(values, scores)
    values.fill_(-7)
    precast.top_k_varlen(**given, out_values=values, pre_idx=want, load_balance=False, workspace={})
    assert (values == -7).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logits": torch.zeros(6)}, "logits must have 2 dimensions, got shape"),
        ({"logits": torch.zeros(6, 4).double()}, "logits must be float32 or float16 or bfloat16"),
        ({"seq_lens": torch.zeros(6).long()}, "seq_lens must be int32, got int64"),
        ({"next_n": 2}, "logits must have next_n = 2 rows for each of the 6 numbers of seq_lens"),
        ({"next_n": 0}, "next_n must be from 1 to 2147483647, got 0"),
        ({"compress_ratio": 0}, "compress_ratio must be from 1 to 2147483647, got 0"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": -2}, "top_k must be at least 1, got -2"),
        ({"top_k": 1048577}, "top_k must be at most 1048576, got 1048577"),
        ({"out_indices": torch.zeros(6, 5).int()}, r"out_indices must have shape \[6, 6\], got"),
        ({"out_indices": torch.zeros(35).int()}, r"out_indices must have shape \[6, 6\] or be a"),
        ({"out_indices": torch.zeros(6, 6).long()}, "out_indices must be int32, got int64"),
        ({"backend": "cub"}, "backend must be one of auto, radix_cutlass, got 'cub'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^top_k_varlen: {words}"):
        precast.top_k_varlen(**{**call(), **change})


@pytest.mark.parametrize("backend", ["radix", "gvr", "gvr_2", "radix_filter"])
def test_backends_for_other_gpus(backend: str) -> None:
    with pytest.raises(
        BackendSupportedError, match=r"is for compute capability 10.0 .* 'auto'|Fix"
    ):
        precast.top_k_varlen(**call(), backend=backend)
