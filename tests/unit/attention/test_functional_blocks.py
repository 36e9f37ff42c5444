# SPDX-License-Identifier: Apache-2.0
"""Params blocks of functions without a plan: what is kept, and what makes another one."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from functional_calls import FUNCTIONS, decode_arguments
from torch.utils._python_dispatch import TorchDispatchMode

import precast
from precast._op.dispatch import kernels
from precast._ops.attention import buffers
from precast._ops.attention import kernels as plan_kernels
from precast._ops.attention.enums import MaskMode
from precast._ops.attention.functional import launch, self_plan
from precast._ops.attention.functional.calls import Words
from precast._ops.attention.plan import read_block

BF16, I32 = torch.bfloat16, torch.int32
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 8
XQA = precast.xqa_batch_decode_with_kv_cache


class Launched:
    """Exports that write down what they get, in the place of those of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.packed: list[tuple[Any, ...]] = []
        self.planned: list[torch.Tensor] = []
        self.runs: list[tuple[Any, ...]] = []
        monkeypatch.setattr(launch, "_blocks", {})
        monkeypatch.setattr(self_plan, "_counters", {})
        monkeypatch.setattr(buffers, "_ranges", {})
        exports = {
            "pack_plan": lambda *args: self.packed.append(args),
            "plan": lambda workspace, block, *args: self.planned.append(block),
        }
        for name, export in exports.items():
            monkeypatch.setitem(getattr(plan_kernels, name), (-1,), export)
        for name in FUNCTIONS:
            kernel = kernels()[name]
            run = functools.partial(kernel.around, lambda *args: self.runs.append(args))
            monkeypatch.setitem(kernel, (BF16, BF16, DIM, DIM, -1), run)

    @property
    def blocks(self) -> list[torch.Tensor]:
        """That of each run."""
        return [args[6] for args in self.runs]


@pytest.fixture
def launched(monkeypatch):
    return Launched(monkeypatch)


def test_a_call_with_the_same_addresses_and_sizes_packs_nothing(launched):
    given = decode_arguments(workspace_buffer=torch.zeros(1 << 20, dtype=torch.uint8))
    for scale in (0.1, 0.2):  # It is an argument of the run.
        XQA(**{**given, "bmm1_scale": scale, "out": torch.empty(2, HEADS, DIM, dtype=BF16)})
    assert len(launched.packed) == 1
    assert launched.blocks[0] is launched.blocks[1]
    assert [args[7] for args in launched.runs] == [0.1, 0.2]
    # Views of the same memory are the same.
    XQA(**{**given, "block_tables": given["block_tables"][:], "seq_lens": given["seq_lens"][:]})
    assert len(launched.packed) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"block_tables": torch.tensor([[3, 0], [1, 2]], dtype=I32)},
        {"seq_lens": torch.tensor((5, 11), dtype=I32)},
        {"workspace_buffer": torch.zeros(1 << 20, dtype=torch.uint8)},
        {"window_left": 3},
        {"kv_layout": "HND", "kv_cache": torch.zeros(4, 2, KV_HEADS, PAGE, DIM, dtype=BF16)},
        {"kv_cache": torch.zeros(4, 2, 2 * PAGE, KV_HEADS, DIM, dtype=BF16)},
        {"query": torch.zeros(2, 2 * HEADS, DIM, dtype=BF16)},
        {"q_cu_seq_lens": torch.tensor([0, 1, 2], dtype=I32)},
        {"query": torch.zeros(4, HEADS, DIM, dtype=BF16), "q_len_per_req": 2},
    ],
    ids=lambda change: "-".join(change),
)
def test_another_one_packs_again(change, launched):
    given = decode_arguments(workspace_buffer=torch.zeros(1 << 20, dtype=torch.uint8))
    XQA(**given)
    XQA(**{**given, **change})
    XQA(**given)
    assert len(launched.packed) == 2
    assert launched.blocks[0] is launched.blocks[2] is not launched.blocks[1]


def test_something_else_at_the_same_address_is_checked_again(launched):
    """The block of the call before would read it as what was there."""
    given = decode_arguments()
    XQA(**given)
    XQA(**{**given, "seq_lens": given["seq_lens"].view(torch.int16)[:2]})
    assert len(launched.packed) == 2, "the binding refuses its dtype"
    with pytest.raises(ValueError, match="block_tables must have stride 1"):
        XQA(**{**given, "block_tables": given["block_tables"].t()})
    with pytest.raises(ValueError, match="workspace_buffer must be uint8 or int8, got"):
        XQA(**{**given, "workspace_buffer": given["workspace_buffer"].view(torch.int32)})
    assert len(launched.runs) == 2


def test_the_parts_of_a_workspace_do_not_overlap(launched):
    given = decode_arguments(q_len=9)
    XQA(**given)
    workspace = given["workspace_buffer"]
    ints, floats = launched.packed[0][5:7]
    begin = workspace.data_ptr()
    assert ints.data_ptr() == begin, "plan() gets the whole workspace"
    assert len(launched.planned) == 1
    assert begin + ints.nbytes <= floats.data_ptr()
    assert floats.data_ptr() + floats.nbytes == begin + workspace.nbytes
    assert all(part.data_ptr() % 256 == begin % 256 for part in (ints, floats))


def test_a_draft_mask_is_read_where_it_is(launched):
    """No operation of PyTorch prepares it, at the first call and at the next ones."""
    mask = torch.ones(2, 3, 2, dtype=torch.uint16)
    given = decode_arguments(q_len=3, mask=mask, out=torch.empty(6, HEADS, DIM, dtype=BF16))
    kept = given["workspace_buffer"].clone()
    XQA(**given)
    bits, bits_indptr = launched.packed[0][7:9]
    assert bits.data_ptr() == mask.data_ptr()
    assert (bits.dtype, bits.shape, bits_indptr) == (torch.uint8, (6, 4), None)
    shape, scores = read_block(launched.blocks[0])
    assert scores.mask_mode == MaskMode.CUSTOM
    assert not shape.causal
    with _Operations() as operations:
        XQA(**given)
    assert {name.partition(".")[0] for name in operations.names} <= {"aten::view"}
    assert torch.equal(kept, given["workspace_buffer"])
    assert len(launched.packed) == 1


class _Operations(TorchDispatchMode):
    """Writes down what PyTorch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_pages_start_at_the_rows_of_the_table(launched):
    given = decode_arguments()
    wide = torch.zeros(2, 7, dtype=I32)
    XQA(**{**given, "block_tables": wide[:, :2]})
    kv_indptr, qo_indptr, last, lens, indices, *_ = launched.packed[0]
    assert kv_indptr.tolist() == [0, 7, 14]
    assert qo_indptr is last is None
    assert lens is given["seq_lens"]
    assert indices.data_ptr() == wide.data_ptr()
    assert indices.shape == (9,)


def test_blocks_keep_nothing_of_the_caller_alive(launched):
    given = decode_arguments()
    XQA(**given)
    alive = [weakref.ref(given[name]) for name in ("workspace_buffer", "block_tables", "seq_lens")]
    del given
    launched.packed.clear()
    launched.runs.clear()
    assert [ref() for ref in alive] == [None] * 3
    assert len(launch._blocks) == 1


def test_there_are_not_more_blocks_than_a_limit(launched, monkeypatch):
    monkeypatch.setattr(launch, "_MOST_BLOCKS", 3)
    for window in range(8):
        XQA(**decode_arguments(window_left=window))
        assert len(launch._blocks) <= 3


def test_what_a_graph_reads_is_kept_or_its_own(monkeypatch):
    monkeypatch.setattr(buffers, "_ranges", {})
    device = torch.device("cpu")
    with monkeypatch.context() as capturing:
        capturing.setattr(buffers, "is_capturing", lambda device: True)
        own, is_kept = buffers.stepped_range(3, 5, device)
        assert (own.tolist(), is_kept) == ([0, 5, 10], False)
    kept, is_kept = buffers.stepped_range(3, 5, device)
    assert is_kept
    with monkeypatch.context() as capturing:
        capturing.setattr(buffers, "is_capturing", lambda device: True)
        more, is_kept = buffers.stepped_range(900, 5, device)
        assert is_kept
        assert more.data_ptr() == kept.data_ptr()
    monkeypatch.setattr(buffers, "_MOST_RANGES", 1)
    assert not buffers.stepped_range(3, 6, device)[1]
    assert buffers.stepped_range(4, 0, device)[0].tolist() == [0, 0, 0, 0]
    assert buffers.stepped_range(3, 2**30 - 1, device)[0].tolist() == [0, 2**30 - 1, 2**31 - 2]


def test_errors_of_bindings_get_public_names():
    from precast._ops.attention.functional.calls import renamed

    words = Words("op", query="rows", lens="lengths")
    for said, wanted in (
        ("run_paged: q must have 3 rows", "op: rows must have 3 rows"),
        ("pack_plan: kv_len must be int32, got int64", "op: lengths must be int32, got int64"),
        (
            "run_paged: out must not overlap int_workspace's memory; call .clone()",
            "op: out must not overlap workspace_buffer's memory; call .clone()",
        ),
        ("run_paged: paged_kv_cache[1] must", "op: kv_cache[1] must"),
        ("op: k_cache must be e4m3", "op: kv_cache[0] must be e4m3"),
        ("other: q must", "other: q must"),
    ):
        assert str(renamed(words, ValueError(said), is_pair=True)) == wanted
    one = renamed(words, ValueError("run_paged: k_cache must"), is_pair=False)
    assert str(one) == "op: kv_cache must"
