# SPDX-License-Identifier: Apache-2.0
"""What a plan or a run of attention writes has memory that no tensor of the plan has.

A plan's tensors are no arguments of its runs, so that no declaration says which they are.
"""

from __future__ import annotations

import pytest
import torch
from attention_support import F32, OTHER_TABLE, SIZES, TABLE, cache, decode

pytestmark = pytest.mark.usefixtures("reference_mode")

I32 = torch.int32


def test_outputs_and_what_a_plan_reads():
    wrapper, kv, q = decode(), cache(), torch.randn(2, 4, 64)
    buffer = torch.zeros(1024)
    out = buffer[:512].view(2, 4, 64)
    names = ("kv_indptr", "kv_indices", "kv_last_page_len")
    for i, name in enumerate(names):
        table = list(TABLE)
        table[i] = buffer[4:].view(I32)[: TABLE[i].numel()]
        table[i].copy_(TABLE[i])
        wrapper.plan(*table, *SIZES, **F32)
        before = buffer.clone()
        with pytest.raises(ValueError, match=f"run_paged: out must not overlap {name}'s memory"):
            wrapper.run(q, kv, out=out)
        assert torch.equal(buffer, before)
    wrapper.plan(*TABLE, *SIZES, **F32)
    wrapper.run(q, kv, out=out)


def test_workspaces_and_what_a_plan_reads():
    for i, name in enumerate(("kv_indptr", "kv_indices", "kv_last_page_len")):
        for which in ("float", "int"):
            wrapper, buffer = decode(), torch.zeros(1 << 16, dtype=torch.uint8)
            own = [torch.empty(1 << 16, dtype=torch.uint8), buffer]
            wrapper.reset_workspace_buffer(*(own if which == "int" else reversed(own)))
            table = list(TABLE)
            table[i] = buffer[64:].view(I32)[: TABLE[i].numel()]
            table[i].copy_(TABLE[i])
            words = f"pack_plan: {which}_workspace must not overlap {name}'s memory"
            with pytest.raises(ValueError, match=words):
                wrapper.plan(*table, *SIZES, **F32)


def test_workspaces_and_what_a_run_reads():
    for which in ("float", "int"):
        wrapper, buffer, kv = decode(), torch.zeros(1 << 16, dtype=torch.uint8), cache()
        own = [torch.empty(1 << 16, dtype=torch.uint8), buffer]
        wrapper.reset_workspace_buffer(*(own if which == "int" else reversed(own)))
        wrapper.plan(*TABLE, *SIZES, **F32)
        inside = buffer.view(torch.float32)[16:528].view(2, 4, 64)
        with pytest.raises(ValueError, match=f"{which}_workspace must not overlap q's memory"):
            wrapper.run(inside, kv)
        wrapper.run(inside.clone(), kv)


def test_buffers_of_a_graph_and_the_tables_that_are_copied_to_them():
    wrapper = decode(in_graph=True)
    wrapper.plan(*TABLE, *SIZES, **F32)
    buffers = wrapper._plan.tables
    # A table may be its own buffer already.
    wrapper.plan(buffers.kv_indptr, *OTHER_TABLE[1:], *SIZES, **F32)
    with pytest.raises(ValueError, match="kv_indptr must not overlap kv_indices_buf's memory"):
        wrapper.plan(buffers.kv_indices, *OTHER_TABLE[1:], *SIZES, **F32)
