# SPDX-License-Identifier: Apache-2.0
"""The script that reads what an engine asks of FlashInfer, on an engine made up here."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ci_support import script

contract = script("engine_contract")

FLASHINFER = ("__init__", "norm/__init__", "decode", "comm/__init__", "comm/mnnvl", "fused_moe")
FILES = {
    "requirements/cuda.txt": "torch\nflashinfer-python==0.6.13\nflashinfer-cubin==0.6.13\n",
    "vllm/at_import.py": """
from flashinfer.norm import rmsnorm as norm
from flashinfer.decode import BatchDecode
if CUDA:
    from flashinfer import bmm_fp8
try:
    import flashinfer.comm as fi_comm
    from flashinfer.comm.mnnvl import Backend
except ImportError:
    fi_comm = None
if TYPE_CHECKING:
    from flashinfer.decode import Other
def run(x, out):
    norm(x, x, out=out)
    norm(*x, eps=1)
    fi_comm.all_reduce(x, **out)
    fi_comm.Pattern.kAll
    return hasattr(fi_comm, "fuse")
def shadowed(norm):
    norm(1, 2, 3, 4)
""",
    "vllm/lazy.py": """
softmax = lazy_import("flashinfer.norm", "softmax")
NEEDED = [("flashinfer.fused_moe", "cutlass"), ("other", "name")]
def probe():
    module = get_module("flashinfer.fused_moe")
    if any(hasattr(module, name) for name in ("one", "two")):
        find_spec("flashinfer.comm")
    importlib.util.find_spec("flashinfer")
    return getattr(module, "three", None)
def log():
    warn("flashinfer.norm is not there", "softmax")
    choose("flashinfer", "fa3")
""",
    "vllm/sub/__init__.py": "from ..lazy import softmax\n",
    "vllm/sub/user.py": """
import functools
import flashinfer
from . import softmax as soft
from vllm.at_import import BatchDecode
class Attention:
    wrappers: dict[int, BatchDecode]
    def __init__(self):
        self.wrapper: BatchDecode | None = None
        self.later = BatchDecode(1, backend="x")
        self.partial = functools.partial(flashinfer.norm.rmsnorm, 1, eps=2)
    def get(self) -> "BatchDecode":
        return self.wrapper
    def run(self, q, other, plain: BatchDecode):
        self.wrapper.plan(q, sm_scale=1.0)
        self.later.run(q)
        self.get().run(q, q)
        self.wrappers[0].end()
        self.wrappers.get(0, None)
        self.wrapper._buffer.copy_(q)
        plain(q)
        assert isinstance(other, BatchDecode)
        other.run(q, out=q)
        soft(q)
""",
    "vllm/test_more.py": "from flashinfer import test_only\n",
    "vllm/tests/more.py": "from flashinfer import test_only\n",
    "benchmarks/more.py": "from flashinfer import benchmark_only\n",
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The file of facts after the script ran on an sdist and on a wheel."""
    folder = tmp_path_factory.mktemp("engines")
    with zipfile.ZipFile(folder / "flashinfer_python-0.6.13-py3-none-any.whl", "w") as wheel:
        for module in FLASHINFER:
            wheel.writestr(f"flashinfer/{module}.py", "raise RuntimeError('imported')\n")
    sdist = folder / "vllm-0.25.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name, text in FILES.items():
            entry = tarfile.TarInfo(f"vllm-0.25.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    other = folder / "sglang-0.5.23-py3-none-any.whl"
    with zipfile.ZipFile(other, "w") as wheel:
        wheel.writestr("sglang/run.py", "from flashinfer import rmsnorm\n")
        requires = "Requires-Dist: flashinfer_python[cu13]==0.7.2\n"
        wheel.writestr("sglang-0.5.23.dist-info/METADATA", requires)
    output = folder / "facts.json"
    output.write_text(json.dumps({"vllm 0.1": {"pins": "0.1", "modules": {}, "names": {}}}))
    peer = ["--flashinfer", str(next(folder.glob("flashinfer*"))), "-o", str(output)]
    assert contract.main([*peer, str(sdist), str(other)]) == 0
    return json.loads(output.read_text())


def test_a_section_for_each_version(facts):
    assert [*facts] == ["sglang 0.5.23", "vllm 0.1", "vllm 0.25.0"]
    assert [section["pins"] for section in facts.values()] == ["0.7.2", "0.1", "0.6.13"]


def test_how_an_engine_reaches_a_name(facts):
    names = {name: fact.get("how") for name, fact in facts["vllm 0.25.0"]["names"].items()}
    assert names == {
        "bmm_fp8": ["conditional"],
        "comm.Pattern": ["function"],
        "comm.all_reduce": ["function"],
        "comm.fuse": ["probed"],
        "comm.mnnvl.Backend": ["guarded"],
        "decode.BatchDecode": ["module"],
        "fused_moe.cutlass": ["probed"],
        "fused_moe.one": ["probed"],
        "fused_moe.three": ["probed"],
        "fused_moe.two": ["probed"],
        "norm.rmsnorm": ["function", "module"],
        "norm.softmax": ["lazy"],
    }
    assert facts["vllm 0.25.0"]["modules"] == {
        "comm": ["guarded", "probed"],
        "flashinfer": ["module", "probed"],
        "fused_moe": ["function"],
    }
    assert facts["vllm 0.25.0"]["names"]["bmm_fp8"]["files"] == ["vllm/at_import.py"]


def test_calls(facts):
    names = facts["vllm 0.25.0"]["names"]
    assert names["norm.rmsnorm"]["calls"] == [[0, "eps", "*"], [1, "eps", "*"], [2, "out"]]
    assert names["norm.softmax"]["calls"] == [[1]]  # Through two modules of the engine.
    assert names["comm.all_reduce"]["calls"] == [[1, "*"]]
    assert names["comm.Pattern"]["members"] == {"kAll": []}
    assert "calls" not in names["bmm_fp8"]


def test_calls_of_methods(facts):
    fact = facts["vllm 0.25.0"]["names"]["decode.BatchDecode"]
    assert fact["calls"] == [[1, "backend"]]
    assert fact["methods"] == {
        "__call__": [[1]],
        "end": [[0]],
        "plan": [[1, "sm_scale"]],
        "run": [[1], [1, "out"], [2]],
    }


def test_the_command_replaces_its_section(facts, tmp_path: Path):
    """Facts are in order, so that the same archives give the same file."""
    path = tmp_path / "facts.json"
    contract.write(facts, path)
    assert json.loads(path.read_text()) == facts
    text = path.read_text()
    contract.write(dict(reversed(facts.items())), path)
    assert path.read_text() == text
