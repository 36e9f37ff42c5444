# SPDX-License-Identifier: Apache-2.0
"""All-reduces beside FlashInfer's: the same calls by two processes, one on each GPU."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from ranks_support import launch

import precast.comm as ours

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
NAMES = (
    "allreduce_fusion",
    "create_shared_buffer",
    "free_shared_buffer",
    "vllm_all_reduce",
    "vllm_dispose",
    "vllm_get_graph_buffer_ipc_meta",
    "vllm_init_custom_ar",
    "vllm_meta_size",
    "vllm_register_buffer",
    "vllm_register_graph_buffers",
)


@pytest.mark.without_gpu
@pytest.mark.parametrize("name", NAMES)
def test_arguments_stand_where_theirs_do(name: str) -> None:
    import flashinfer.comm as theirs

    own = [*inspect.signature(getattr(ours, name)).parameters.values()]
    other = [*inspect.signature(getattr(theirs, name)).parameters.values()]
    assert [(p.name, p.kind, p.default) for p in own] == [
        (p.name, p.kind, p.default) for p in other
    ]


@pytest.mark.without_gpu
def test_patterns_have_their_numbers() -> None:
    from flashinfer.comm import AllReduceFusionPattern as Theirs

    theirs = {name: value for name, value in vars(Theirs).items() if name.startswith("k")}
    assert len(theirs) == 13
    for name, value in theirs.items():
        assert int(getattr(ours.AllReduceFusionPattern, name)) == int(value)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("what", ["vllm", "fusion"])
def test_the_same_results(what: str) -> None:
    script = Path(__file__).with_name("peer_comm_ranks.py")
    said = launch(script, what, processes=2, seconds=600)
    skipped = [line for line in said.splitlines() if line.startswith("skip:")]
    if skipped:
        pytest.skip(skipped[0])
    assert all(f"rank {rank}: same results" in said for rank in range(2))
