# SPDX-License-Identifier: Apache-2.0
"""allreduce_fusion without a GPU: references, processes of a gloo group, errors and workspaces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import precast
from precast._ops.comm import create_workspace, peer_buffers
from precast._ops.comm import workspace as workspaces
from precast._ops.comm.fused_reference import MAX_ROW_BYTES
from precast.comm import (
    AllReduceFusionPattern,
    allreduce_fusion,
    allreduce_fusion_reference,
    create_allreduce_fusion_workspace,
    trtllm_allreduce_fusion,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
)

ROOT = Path(__file__).parents[3]
HEADERS = ROOT / "include/precast/comm"
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with precast.reference_mode():
        yield


@pytest.fixture
def single() -> Iterator[Any]:
    made = create_allreduce_fusion_workspace("auto", 1, 0, 16, 256, torch.bfloat16)
    yield made
    made.destroy()


def normed(rows: int = 3, hidden: int = 256) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    return {"residual_in": drawn(rows, hidden), "rms_gamma": drawn(hidden)}


def test_the_sum_is_in_the_order_of_ranks_and_rounded_once() -> None:
    parts = [torch.tensor([x]).bfloat16() for x in (256.0, 1.0, 1.0, -256.0)]
    (total,) = allreduce_fusion_reference(parts)
    assert total is not None
    assert total.tolist() == [2.0]  # with a rounding in between it would be 0
    assert total.dtype == torch.bfloat16


@pytest.mark.parametrize("pattern", [1, 2, 4, 8, 9, 10, 11])
@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_patterns_are_separate_ops_one_after_the_other(
    single: Any, pattern: int, bias: float
) -> None:
    x, given = torch.randn(3, 256).bfloat16(), normed()
    residual = given["residual_in"].clone()
    y = x.clone()
    norm = precast.gemma_fused_add_rmsnorm if bias else precast.fused_add_rmsnorm
    norm(y, residual, given["rms_gamma"], 1e-5)
    scale = torch.tensor([0.02])
    scales: torch.Tensor | None = None
    if pattern in (8, 9):
        codes, wanted = precast.per_token_group_quant_8bit(
            y,
            128,
            448e-10,
            column_major_scales=True,
            scale_tma_aligned=True,
            scale_ue8m0=True,
            use_packed_ue8m0=True,
        )
        scales = torch.full((1, 4), -1, dtype=torch.int32)[:, :3].T
    elif pattern in (10, 11):
        codes, wanted = precast.per_token_quant_fp8(y, 1e-10)
        scales = torch.empty(3, 1)
    else:
        codes, wanted = precast.static_quant_fp8(y, scale), None
    out = torch.empty(3, 256, dtype=FP8)
    residual_out = torch.empty_like(x)
    result = allreduce_fusion(
        x,
        single,
        pattern,
        rms_eps=1e-5,
        weight_bias=bias,
        quant_out=out,
        scale_out=scales,
        scale_factor=scale,
        residual_out=residual_out,
        block_quant_group_size=128,
        **given,
    )
    assert torch.equal(residual_out, residual)
    if pattern in (1, 4, 9, 11):
        assert torch.equal(result, y)
    else:
        assert result is out
    if pattern != 1:
        assert torch.equal(out.float(), codes.float())
        if wanted is not None and scales is not None:
            assert torch.equal(scales.flatten(), wanted.flatten())


def test_outputs_may_be_the_input_and_the_residual(single: Any) -> None:
    x, given = torch.randn(3, 256).bfloat16(), normed()
    apart = allreduce_fusion(x.clone(), single, 1, **given)
    total = (x.float() + given["residual_in"].float()).bfloat16()
    for residual_out, norm_out in (
        (given["residual_in"].clone(), x.clone()),
        (x.clone(), given["residual_in"].clone()),
    ):
        inputs = {"residual_in": given["residual_in"], "rms_gamma": given["rms_gamma"]}
        input = x
        if norm_out.data_ptr() != x.data_ptr():
            input = x.clone()
        got = allreduce_fusion(
            input, single, 1, residual_out=residual_out, norm_out=norm_out, **inputs
        )
        assert torch.equal(got, apart)
        assert torch.equal(residual_out, total)
    crossed = x.clone()
    residual = given["residual_in"].clone()
    allreduce_fusion(
        crossed,
        single,
        1,
        residual_in=residual,
        rms_gamma=given["rms_gamma"],
        residual_out=crossed,
        norm_out=residual,
    )
    assert torch.equal(crossed, total)
    assert torch.equal(residual, apart)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(
            ({"pattern": value}, f"pattern must be 0, 1, 2, 4, 8, 9, 10 or 11, got {value}")
            for value in (3, 5, 6, 7, 12)
        ),
        ({"pattern": 0, "output": (2, 256)}, r"output must have input's shape \[3, 256\]"),
        ({"pattern": 1}, "residual_in must be a tensor for this pattern, got None"),
        ({"pattern": 1, "residual_in": (3, 8)}, "rms_gamma must be a tensor"),
        ({"pattern": 1, "rms_gamma": (8,), "residual_in": (3, 256)}, r"shape \[256\], got \[8\]"),
        ({"pattern": 1, "normed": True, "rms_eps": -1.0}, "rms_eps must be"),
        ({"pattern": 1, "normed": True, "weight_bias": float("nan")}, "weight_bias must be"),
        ({"pattern": 2, "normed": True}, "quant_out must be a tensor for this pattern"),
        ({"pattern": 2, "normed": True, "quant_out": (3, 256)}, "quant_out must be float8_e4m3fn"),
        ({"pattern": 2, "normed": True, "codes": True}, "scale_factor must be a tensor"),
        ({"pattern": 10, "normed": True, "codes": True}, "scale_out must be a tensor"),
        ({"pattern": 10, "normed": True, "codes": True, "scale_out": (3, 1)}, "must be float32"),
        (
            {"pattern": 8, "normed": True, "codes": True, "scale_out": (3, 1)},
            "block_quant_group_size must be 16, 32, 64 or 128, got 0",
        ),
    ],
)
def test_errors_leave_outputs_untouched(single: Any, arguments: dict[str, Any], words: str) -> None:
    given = dict(arguments)
    outputs = []
    if given.pop("normed", False):
        given |= normed()
    if given.pop("codes", False):
        given["quant_out"] = torch.zeros(3, 256, dtype=FP8)
        outputs.append(given["quant_out"])
    for name, value in given.items():
        if isinstance(value, tuple):
            given[name] = torch.zeros(value).bfloat16()
            outputs.append(given[name])
    norm_out = torch.zeros(3, 256).bfloat16()
    outputs.append(norm_out)
    with pytest.raises(ValueError, match=words):
        allreduce_fusion(torch.ones(3, 256).bfloat16(), single, norm_out=norm_out, **given)
    assert not any(output.float().any() for output in outputs)


def test_what_overlaps_is_refused(single: Any) -> None:
    x, given = torch.ones(3, 256).bfloat16(), normed()
    out = torch.zeros_like(x)
    with pytest.raises(ValueError, match="must not overlap"):
        allreduce_fusion(x, single, 1, residual_out=out, norm_out=out, **given)
    both = torch.zeros(4, 256).bfloat16()
    with pytest.raises(ValueError, match="norm_out must be input itself or not overlap"):
        allreduce_fusion(both[:3], single, 1, norm_out=both[1:], **given)
    with pytest.raises(ValueError, match="output must be contiguous"):
        allreduce_fusion(x, single, 0, output=torch.zeros(256, 3).bfloat16().T)


def test_torch_compile_traces_it_whole() -> None:
    memory = torch.zeros(workspaces.CONTROL_BYTES + 4096, dtype=torch.uint8)
    buffers = peer_buffers.PeerBuffers([memory.data_ptr()], memory, None, lambda: None)
    made = workspaces.TRTLLMAllReduceFusionWorkspace(1, 0, 8, 64, torch.bfloat16, None, buffers)

    def layer(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        y = allreduce_fusion(
            x * 2, made, 1, residual_in=residual, residual_out=residual, rms_gamma=gamma
        )
        return allreduce_fusion(y, made, 0) + 1

    x, gamma = torch.randn(8, 64).bfloat16(), torch.ones(64).bfloat16()
    residuals = [torch.ones_like(x) for _ in range(2)]
    wanted = layer(x, residuals[0], gamma)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, residuals[1], gamma)
    assert torch.equal(got, wanted)
    assert torch.equal(*residuals)
    made._destroyed = True  # there is no GPU to wait for


def test_a_workspace_that_is_none_or_destroyed() -> None:
    made = create_allreduce_fusion_workspace("trtllm", 1, 0, 4, 8, torch.float16)
    made.destroy()
    made.destroy()
    assert not made.is_buffer_size_sufficient(1, 1, 1, torch.float16)
    with pytest.raises(ValueError, match="workspace must not be destroyed"):
        allreduce_fusion(torch.ones(8).half(), made, 0)
    with pytest.raises(TypeError, match="workspace must be an AllReduceFusionWorkspace, got int"):
        allreduce_fusion(torch.ones(8), 3, 0)  # type: ignore[call-overload]


def test_a_forgotten_workspace_warns() -> None:
    made = create_allreduce_fusion_workspace("auto", 1, 0, 4, 8, torch.float16)
    with pytest.warns(ResourceWarning, match="was not destroyed"):
        made.__del__()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backend": "mnnvl"}, ValueError, "needs NVLink multicast"),
        ({"backend": "x"}, ValueError, "backend must be 'auto' or 'trtllm', got 'x'"),
        ({"rank": None}, ValueError, "rank must be given"),
        ({"rank": 1}, ValueError, "rank must be below world_size 1, got 1"),
        ({"world_size": 2.0}, TypeError, "world_size must be an int, got float"),
        ({"max_token_num": 0}, ValueError, "max_token_num must be positive, got 0"),
        ({"dtype": torch.int32}, ValueError, "dtype must be float16, bfloat16 or float32"),
        ({"world_size": 2}, RuntimeError, "2 ranks need a process group"),
    ],
)
def test_workspaces_that_cannot_be_made(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    legal = {
        "backend": "auto",
        "world_size": 1,
        "rank": 0,
        "max_token_num": 4,
        "hidden_dim": 8,
        "dtype": torch.bfloat16,
    }
    with pytest.raises(error, match=words):
        create_allreduce_fusion_workspace(**{**legal, **arguments})


def test_sizes_of_a_workspace(single: Any) -> None:
    assert single.is_buffer_size_sufficient(1, 16, 256, torch.bfloat16)
    assert single.is_buffer_size_sufficient(1, 32, 128, torch.float16, use_oneshot=True)
    assert not single.is_buffer_size_sufficient(1, 17, 256, torch.bfloat16)
    assert not single.is_buffer_size_sufficient(2, 16, 256, torch.bfloat16)
    assert not single.is_buffer_size_sufficient(1, 16, 256, torch.float32)
    assert single.metadata["max_token_num"] == 16


@pytest.mark.parametrize("world", create_workspace.WORLDS)
def test_a_region_takes_the_largest_row_and_is_bounded(world: int) -> None:
    vectors = MAX_ROW_BYTES // 16
    part = -(-(vectors // 32) // world) * 32
    row = ((world - 1) * part + vectors) * 16
    for message in (1, 1 << 16, 1 << 20, 1 << 24, 1 << 30):
        size = create_workspace.region_bytes(world, message, MAX_ROW_BYTES)
        assert row <= size <= 64 << 20
        assert (world - 1) * MAX_ROW_BYTES <= size
        if message <= 1 << 24:  # one round
            phase = (world - 1) * message if world == 2 else 0
            assert phase <= size


def number(name: str, file: str) -> int:
    text = (HEADERS / file).read_text(encoding="utf-8")
    found = re.search(rf"constexpr int {name} = ([^;]+);", text)
    assert found is not None, name
    return int(eval(found[1], {"kMaxRowThreads": 1024}))


def test_numbers_that_c_plus_plus_knows_too() -> None:
    assert number("kControlBytes", "allreduce_exchange.cuh") == workspaces.CONTROL_BYTES
    assert number("kMaxWorld", "peer_memory.cuh") == workspaces._MAX_WORLD
    assert number("kMaxRowThreads", "allreduce_cut.cuh") == 1024
    assert number("kMaxRowVecs", "allreduce_cut.cuh") * 16 == MAX_ROW_BYTES
    cut = (HEADERS / "allreduce_cut.cuh").read_text(encoding="utf-8")
    for world in (4, 8):
        assert str(create_workspace.ONE_SHOT_BYTES[world] >> 10) + " << 10" in cut
    binding = (ROOT / "csrc/comm/allreduce_fusion_binding.cc").read_text(encoding="utf-8")
    block = binding[binding.index("struct WorkspaceBlock") :]
    fields = re.findall(r"(\w+)(?:\[\w+\])?[,;]", block[: block.index("};")])
    assert fields == [
        "rank", "world", "region_bytes", "timeout_nanoseconds", "report", "checks_signatures",
        "one_shot_bytes", "threads", "vecs", "cluster", "ctas", "buffers",
    ]  # fmt: skip


def test_ranks_agree_on_what_stands_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "a"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device = torch.device("cuda", 0)
    own = peer_buffers.host_name()

    def told(*others: Any) -> Any:
        def exchange(item: Any) -> tuple[Any, ...]:
            return (item, *others) if isinstance(item, tuple) else (item, None)

        return exchange

    assert peer_buffers.obstacle(told((own, "b", None)), device) is None
    assert peer_buffers.obstacle(told((own, "a", None)), device) == "two ranks share a GPU"
    assert "another host" in str(peer_buffers.obstacle(told(("x", "b", None)), device))
    assert peer_buffers.obstacle(told((own, "b", "no")), device) == "rank 1: no"
    assert peer_buffers.obstacle(told((own, "b", None)), device, "3 ranks") == "rank 0: 3 ranks"


def test_the_older_names(single: Any) -> None:
    with pytest.raises(ValueError, match="use_symm_dev_mem=True needs create_metadata=True"):
        trtllm_create_ipc_workspace_for_all_reduce_fusion(0, 1, 4, 8, use_symm_dev_mem=True)
    with pytest.raises(RuntimeError, match="create_allreduce_fusion_workspace"):
        trtllm_create_ipc_workspace_for_all_reduce_fusion(0, 1, 4, 8)
    nothing: list[Any] = [None] * 10
    with pytest.raises(ValueError, match="workspace_ptrs must be the tensor of a workspace"):
        trtllm_allreduce_fusion(
            torch.ones(8), 1, 0, 1, 8, torch.zeros(2), True, True, True, 0, None,
            torch.ones(8), *nothing,
        )  # fmt: skip


def test_processes_of_a_gloo_group(tmp_path: Path) -> None:
    """Four processes in two groups: each reduces in the group given, never in the world."""
    script = tmp_path / "ranks.py"
    script.write_text(
        """
import sys
import torch, precast
import torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=4)
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
group = groups[rank // 2]
from precast.comm import TorchDistBackend, allreduce_fusion, create_allreduce_fusion_workspace
for options in ({"group": group}, {"comm_backend": TorchDistBackend(group)}):
    ws = create_allreduce_fusion_workspace("auto", 2, rank % 2, 8, 4, torch.bfloat16, **options)
    assert ws.backend == "gloo", ws.backend
    x = torch.full((2, 4), rank + 1.0).bfloat16()
    total = 3.0 if rank < 2 else 7.0
    assert (allreduce_fusion(x, ws, 0) == total).all()
    residual = torch.ones(2, 4).bfloat16()
    y = allreduce_fusion(x, ws, 1, residual_in=residual, residual_out=residual,
                         rms_gamma=torch.full((4,), 2.0).bfloat16())
    assert (residual == total + 1).all() and (y == 2).all()
    ws.destroy()
ws = create_allreduce_fusion_workspace(
    "auto", 4, rank, 8, 4, torch.bfloat16, comm_backend=TorchDistBackend()
)
assert (allreduce_fusion(torch.full((2, 4), rank + 1.0).bfloat16(), ws, 0) == 10).all()
ws.destroy()
try:
    create_allreduce_fusion_workspace("auto", 4, rank, 8, 4, torch.bfloat16, group=group)
except ValueError as error:
    assert "must be those of group, 2 and" in str(error)
else:
    raise AssertionError
print("fine")
""",
        encoding="utf-8",
    )
    environment = {**os.environ, "PRECAST_REFERENCE": "1", "PYTHONPATH": str(ROOT / "python")}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(4)
    ]
    for process in ranks:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        assert "fine" in said


def test_the_import_makes_no_cuda_context_and_a_fork_works() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys, precast.comm as c; c.allreduce_fusion\n"
            "pid = os.fork()\n"
            "import torch, precast\n"
            "with precast.reference_mode():\n"
            "    w = c.create_allreduce_fusion_workspace('auto', 1, 0, 4, 8, torch.float16)\n"
            "    assert c.allreduce_fusion(torch.ones(8).half(), w, 0).sum() == 8\n"
            "    w.destroy()\n"
            "assert not torch.cuda.is_initialized()\n"
            "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid else 0)\n",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        check=False,
    )
    assert done.returncode == 0


def test_patterns_have_flashinfers_values() -> None:
    values = {k: v for k, v in vars(AllReduceFusionPattern).items() if k.startswith("k")}
    assert sorted(values.values()) == list(range(13))
    assert values["kARResidualRMSNormOutDynamicFP8Quant"] == 11
