# SPDX-License-Identifier: Apache-2.0
"""How engines probe and call the fused all-reduce, as their sources do."""

from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch

import precast
from precast.shim import look_up, modules

SIZES = {
    "world_size": 1,
    "rank": 0,
    "max_token_num": 64,
    "hidden_dim": 16,
    "dtype": torch.bfloat16,
}


def comm(name: str, engine: str):
    return look_up("comm", name, engine)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_signatures_have_what_engines_look_for(engine):
    made = inspect.signature(comm("create_allreduce_fusion_workspace", engine)).parameters
    called = inspect.signature(comm("allreduce_fusion", engine)).parameters
    assert {"group", "comm_backend"} <= made.keys()
    assert "trigger_completion_at_end" in called
    with precast.reference_mode():
        workspace = comm("create_allreduce_fusion_workspace", engine)(**SIZES)
    asked = inspect.signature(workspace.is_buffer_size_sufficient).parameters
    assert {"use_oneshot", "strategy"} & asked.keys()
    workspace.destroy()


def test_vllm_asks_for_multicast_and_then_for_trtllm():
    """It takes another backend if the word is in the error, and compares names of backends."""
    create = comm("create_allreduce_fusion_workspace", "vllm")
    with pytest.raises(ValueError, match="multicast"):
        create(backend="mnnvl", **SIZES)
    with precast.reference_mode():
        workspace = create(backend="trtllm", comm_backend=None, group=None, **SIZES)
    workspace.destroy()


def test_options_of_another_backend_are_refused_by_name():
    create = comm("create_allreduce_fusion_workspace", "vllm")
    with pytest.raises(ValueError, match=r"rms_eps, output_dtype must be None.*'mnnvl-cutedsl'"):
        create(**SIZES, rms_eps=1e-6, output_dtype=torch.bfloat16)


def test_sglang_derives_its_own_communicators():
    """One overrides a method of TorchDistBackend, one is a CommBackend of its own."""
    backend = look_up("comm.mnnvl", "TorchDistBackend", "sglang")
    base = look_up("comm.mnnvl", "CommBackend", "sglang")
    assert issubclass(backend, base)

    class Fixed(backend):
        def __init__(self, device_group, cpu_group):
            super().__init__(group=device_group)

        def bcast(self, data, root):
            return data

    with pytest.raises(RuntimeError, match="must be initialised"):
        Fixed(None, None)

    class Own(base):
        Get_rank = Get_size = allgather = bcast = barrier = Split = lambda self: None

    Own()
    assert callable(look_up("comm.mnnvl", "is_mnnvl_fabric_supported", "sglang"))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_find_no_exchange_of_experts(engine):
    """They take it for there if a module or a name is, and it needs NVLink between hosts."""
    for module in ("comm.trtllm_alltoall", "comm.trtllm_moe_alltoall", "comm.dcp_alltoall"):
        assert module not in modules(engine)
    for name in ("MoeAlltoAll", "PcieIpcAllReduceWorkspace"):
        with pytest.raises(AttributeError):
            comm(name, engine)
    with pytest.raises(AttributeError):
        look_up("comm.mnnvl", "MnnvlMemory", engine)
    assert importlib.util.find_spec("precast.comm.trtllm_moe_alltoall") is None
