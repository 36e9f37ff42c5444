# SPDX-License-Identifier: Apache-2.0
"""Lengths and pages of a batch in the buffers of a CUDA graph: one launch copies and plans."""

import pytest
import torch

import precast
from precast._ops.attention import kernels

I32 = torch.int32

pytestmark = pytest.mark.usefixtures("reference_mode")


@pytest.fixture
def workspace():
    return torch.empty(1024, dtype=torch.uint8)


TABLE = (
    torch.tensor([0, 2, 3], dtype=I32),
    torch.tensor([4, 1, 0, 7], dtype=I32),
    torch.tensor([3, 8], dtype=I32),
)


def buffered(kind, tables, workspace):
    """A wrapper for CUDA graphs, and the numbers that a graph reads."""
    held = [torch.full_like(table, -7) for table in tables]
    cores = (True,) if "Decode" in kind else ()
    return getattr(precast, kind)(workspace, "NHD", True, *cores, *held), held


ROWS = torch.tensor([0, 3, 4], dtype=I32)
TABLES = {
    "BatchDecodeWithPagedKVCacheWrapper": (TABLE, (8,)),
    "BatchPrefillWithPagedKVCacheWrapper": ((ROWS, *TABLE), (8,)),
    "BatchPrefillWithRaggedKVCacheWrapper": ((ROWS, ROWS * 2), ()),
}


@pytest.mark.parametrize("kind", TABLES)
def test_one_launch_copies_and_plans_under_graphs(workspace, monkeypatch, kind):
    tables, page = TABLES[kind]
    seen = []
    reference = kernels.plan.reference

    def run(ints, block, *tables_and_pdl):
        seen.append([table for table in tables_and_pdl[:4] if table is not None])
        reference(ints, block, *tables_and_pdl)

    monkeypatch.setattr(kernels.plan, "reference", run)
    wrapper, held = buffered(kind, tables, workspace)
    sizes = (4, 2, 64, *page)
    wrapper.plan(*tables, *sizes, q_data_type="float32")
    assert {id(table) for table in seen.pop()} == {id(table) for table in tables}
    assert all(torch.equal(buffer, table) for buffer, table in zip(held, tables))
    # What is in its place is not copied, and other dtypes are by PyTorch.
    wrapper.plan(*held, *sizes, q_data_type="float32")
    assert seen.pop() == []
    held[0].fill_(-7)
    wrapper.plan(tables[0].long(), *held[1:], *sizes, q_data_type="float32")
    assert seen.pop() == []
    assert torch.equal(held[0], tables[0])
    assert not seen


def test_fewer_pages_than_the_buffer_has(workspace):
    wrapper, held = buffered("BatchDecodeWithPagedKVCacheWrapper", TABLE, workspace)
    wrapper.plan(TABLE[0], TABLE[1][:3], TABLE[2], 4, 2, 64, 8, q_data_type="float32")
    assert held[1].tolist() == [4, 1, 0, -7]


def test_rows_of_no_request_are_0(workspace):
    """Under CUDA graphs a later plan may have fewer queries than the first."""
    kind = "BatchPrefillWithPagedKVCacheWrapper"
    tables, page = TABLES[kind]
    wrapper, _ = buffered(kind, tables, workspace)
    wrapper.plan(*tables, 4, 2, 64, *page, q_data_type="float32")
    cache = torch.randn(8, 2, 8, 2, 64)
    shape = wrapper._plan.shape._replace(rows=-1)  # As of lengths on the device.
    wrapper._plan = wrapper._plan._replace(shape=shape, block=None)
    out = wrapper.run(torch.randn(7, 4, 64), cache)
    assert out[:4].all(-1).all()
    assert not out[4:].any()
    wrapper.plan(*tables, 4, 2, 64, *page, q_data_type="float32", uniform_q_len=2)
    assert not wrapper._plan.hints.pads, "there are none"
    plain = precast.BatchPrefillWithPagedKVCacheWrapper(workspace)
    plain.plan(*tables, 4, 2, 64, *page, q_data_type="float32")
    assert not plain._plan.hints.pads


def test_a_plan_says_which_backend_it_is_for(workspace):
    wrapper = precast.BatchDecodeWithPagedKVCacheWrapper(workspace)
    assert wrapper._backend == "auto"
    wrapper.plan(*TABLE, 4, 2, 64, 8, q_data_type="float32")
    assert wrapper._backend == "fa2"
