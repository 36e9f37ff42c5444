# SPDX-License-Identifier: Apache-2.0
"""precast doctor: what it finds, and when it fails."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import PACKAGES, core_specs, edit_manifest, run, write_provider

from precast._plan.install_hint import modules_command
from precast._runtime import cudart
from precast._runtime.loader import loader
from precast.cli import _environment, _gpus, _state, main
from precast.cli.doctor import _unserved


def doctor(*argv: str, **environment: str) -> tuple[int, dict]:
    done = run("doctor", "--json", *argv, **environment)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_a_complete_profile_passes(tmp_path):
    root = write_provider(tmp_path, core_specs("sm90a"))
    env = {"PRECAST_PROVIDER_PATH": str(root), "PRECAST_JIT": "error"}
    code, report = doctor("--profile", "core", "--arch", "9.0", **env)
    assert (code, report["ok"], report["fixes"], report["problems"]) == (0, True, [], [])
    (target,) = report["targets"]
    assert {m["module"] for m in target["modules"]} == {s.name for s in core_specs("sm90a")}
    assert {m["state"] for m in target["modules"]} == {"prebuilt"}
    (provider,) = report["providers"]
    assert provider["manifest"]["archs"] == ["sm90a"]
    assert provider["manifest"]["modules"] == len(core_specs("sm90a"))
    text = run("doctor", "--profile", "core", "--arch", "9.0", **env)
    assert text.returncode == 0
    assert text.stdout.endswith("ok: profile core\n")
    count = sum(spec.op == "norm" for spec in core_specs("sm90a"))
    assert re.search(rf"norm +{count} prebuilt", text.stdout)


@pytest.mark.parametrize("policy", ["auto", "error"])
def test_one_module_that_is_missing_fails_and_names_the_one_command(tmp_path, policy):
    root = write_provider(tmp_path / "p", core_specs("sm90a")[1:])
    absent = core_specs("sm90a")[0].name
    env = {
        "PRECAST_PROVIDER_PATH": str(root),
        "PRECAST_JIT": policy,
        "PRECAST_CACHE_DIR": str(tmp_path / "c"),
    }
    code, report = doctor("--profile", "core", "--arch", "9.0", **env)
    assert (code, report["ok"]) == (1, False)
    unready = [m for m in report["targets"][0]["modules"] if m["state"] != "prebuilt"]
    assert [m["module"] for m in unready] == [absent]
    assert f"does not hold {absent}" in unready[0]["reason"]
    fix = modules_command({(13, "sm90a"): "9.0a"})
    assert report["fixes"] == [fix]
    text = run("doctor", "--profile", "core", "--arch", "9.0", **env)
    assert text.returncode == 1
    assert f"Fix:\n  {fix}\n" in text.stdout
    assert text.stdout.endswith("failed: profile core\n")
    # Without --profile it only reports.
    assert doctor("--arch", "9.0", **env)[0] == 0


def test_a_machine_whose_gpus_no_target_serves_has_a_problem():
    old, hopper = _state.Target("7.5", "cuda:0 (T4, 7.5)"), _state.Target("9.0", "cuda:1 (H200)")
    (problem,) = _unserved([old])
    assert problem.startswith("no target of precast serves cuda:0 (T4, 7.5); legal: 8.0, 8.6, ")
    assert "Fix: " in problem
    assert _unserved([old, hopper]) == _unserved([]) == []


def test_two_targets_need_one_command(tmp_path):
    code, report = doctor("--profile", "core", "--arch", "8.0 9.0a", PRECAST_JIT="error")
    assert code == 1
    both = {(13, "sm80"): "8.0", (13, "sm90a"): "9.0a"}
    assert report["fixes"] == [modules_command(both)]
    assert [t["capability"] for t in report["targets"]] == ["8.0", "9.0"]


def test_the_fix_of_a_changed_file_is_the_one_of_the_loader(tmp_path):
    root = write_provider(tmp_path, core_specs("sm90a"))
    edit_manifest(root, "norm__dtype_bf16", sha256="0" * 64)
    code, report = doctor(
        "--profile", "core", "--arch", "9.0", PRECAST_PROVIDER_PATH=str(root), PRECAST_JIT="error"
    )
    assert code == 1
    assert report["fixes"] == [f"build or unpack {root} again"]


def test_what_is_wrong_with_a_provider_is_a_problem(tmp_path):
    limits = {"tvm_ffi_min": "9.0", "tvm_ffi_max_exclusive": "9.1"}
    root = write_provider(tmp_path, core_specs("sm90a"), **limits)
    code, report = doctor("--arch", "9.0", PRECAST_PROVIDER_PATH=str(root))
    assert code == 1
    assert 'Fix: pip install "apache-tvm-ffi>=9.0,<9.1"' in report["problems"][0]
    (root / "manifest.json").write_text("[]")
    text = run("doctor", PRECAST_PROVIDER_PATH=str(root))
    assert text.returncode == 1
    problem = r"^Problem: .*manifest.json has schema None, this precast reads 1"
    assert re.search(problem, text.stdout, re.MULTILINE)


def test_a_profile_cannot_be_checked_without_a_target():
    done = run("doctor", "--profile", "core", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr.endswith("Fix: name a compute capability, for example --arch 9.0\n")


def test_rejected_compilers_are_shown_with_the_reason(tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.89'\n")
    nvcc.chmod(0o755)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 12040\n")
    _, report = doctor(PRECAST_CUDA_HOME=str(tmp_path), CXX="no-such-compiler")
    first = report["compilers"][0]
    assert (first["version"], first["origin"]) == ("12.8", "PRECAST_CUDA_HOME")
    assert not first["accepted"]
    assert "are CUDA 12.4: compiler and headers do not agree" in first["reason"]
    last = report["compilers"][-1]
    assert not last["accepted"]
    assert "CXX=no-such-compiler" in last["reason"]


def test_policy_and_cache_are_shown(tmp_path):
    _, report = doctor(PRECAST_JIT="error", PRECAST_CACHE_DIR=str(tmp_path))
    assert report["jit"]["policy"] == "error"
    assert Path(report["jit"]["cache_dir"]).parent == tmp_path
    assert report["jit"]["cache_writable"] is True
    (tmp_path / "file").touch()
    _, report = doctor(PRECAST_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert report["jit"]["cache_writable"] is False


# -- the driver -----------------------------------------------------------------------------------


class _Driver:
    """libcuda with two GPUs, or one that does not start."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def cuInit(self, flags):
        return self.code

    def cuGetErrorString(self, code, text):
        text._obj.value = b"system not yet initialized"

    def cuDeviceGetCount(self, count):
        count._obj.value = 2

    def cuDeviceGet(self, device, index):
        device._obj.value = index + 40

    def cuDeviceGetName(self, name, size, device):
        name.value = {40: b"NVIDIA H200", 41: b"NVIDIA A100"}[device.value]

    def cuDeviceTotalMem_v2(self, memory, device):
        memory._obj.value = 150 * 10**9

    def cuDeviceGetAttribute(self, value, attribute, device):
        value._obj.value = {(40, 75): 9, (40, 76): 0, (41, 75): 8, (41, 76): 0}[
            device.value, attribute
        ]


def test_gpus_come_from_the_driver(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Driver())
    gpus, problem = _gpus.find_gpus()
    assert problem is None
    assert [g.label for g in gpus] == ["cuda:0 (NVIDIA H200, 9.0)", "cuda:1 (NVIDIA A100, 8.0)"]
    assert gpus[0].memory == 150 * 10**9


def test_a_driver_that_does_not_start_says_why(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Driver(802))
    assert _gpus.find_gpus() == (
        [],
        "the driver does not start: system not yet initialized (error 802)",
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _Driver(100))
    assert _gpus.find_gpus() == ([], "the driver sees no GPU")


# -- what a profile needs besides its modules -----------------------------------------------------


def gate(monkeypatch, tmp_path, capsys) -> tuple[int, list[str]]:
    """``doctor --profile core`` in this process where every module is prebuilt."""
    root = write_provider(tmp_path / "p", core_specs("sm90a"))
    monkeypatch.setenv("PRECAST_PROVIDER_PATH", str(root))
    loader.bind()
    code = main(["doctor", "--profile", "core", "--arch", "9.0", "--json"])
    return code, json.loads(capsys.readouterr().out)["problems"]


@pytest.fixture
def fresh():
    """What is read once a process is read again."""
    caches = (_environment._required, cudart.open_cudart)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    loader.bind()


def test_without_the_cuda_runtime_no_module_loads(monkeypatch, tmp_path, capsys, fresh):
    real = ctypes.CDLL

    def missing(name, mode=0):
        if "cudart" in str(name):
            raise OSError(f"{name}: cannot open shared object file")
        return real(name, mode)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(cudart, "_in_wheel", lambda *args: iter(()))
    monkeypatch.setattr(cudart, "Path", lambda place: tmp_path / "no-cuda")
    code, problems = gate(monkeypatch, tmp_path, capsys)
    assert code == 1
    (problem,) = (p for p in problems if "libcudart" in p)
    assert problem.startswith("libcudart.so.13 was not found in ")
    assert problem.endswith('Fix: pip install "nvidia-cuda-runtime==13.*"')


@pytest.mark.parametrize(
    ("name", "version", "problem"),
    [
        ("torch", "2.4.0", 'torch 2.4.0 does not satisfy >=2.10. Fix: pip install "torch>=2.10"'),
        ("filelock", "3.1", "filelock 3.1 does not satisfy >=3.30. Fix: pip install"),
        ("platformdirs", None, "platformdirs is not installed. Fix: pip install"),
        ("apache-tvm-ffi", "0.0.1", "apache-tvm-ffi 0.0.1 does not satisfy <"),
    ],
)
def test_a_requirement_that_is_missing_or_too_old(
    monkeypatch, tmp_path, capsys, fresh, name, version, problem
):
    real = importlib.metadata.version

    def of(package):
        if package != name:
            return real(package)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    lines = ["torch>=2.10", "filelock>=3.30", "packaging>=23.1", "platformdirs>=4"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda package: lines)
    monkeypatch.setattr(importlib.metadata, "version", of)
    code, problems = gate(monkeypatch, tmp_path, capsys)
    assert code == 1
    assert [text for text in problems if text.startswith(problem)], problems


def test_without_packaging_the_reason_is_told(tmp_path):
    script = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n.startswith('packaging') else real(n, *a)\n"
        "sys.modules['packaging'] = sys.modules['packaging.requirements'] = None\n"
        "from precast.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    root = write_provider(tmp_path / "p", core_specs("sm90a"))
    done = subprocess.run(
        [sys.executable, "-c", script, "doctor", "--profile", "core", "--arch", "9.0"],
        env={**os.environ, "PYTHONPATH": PACKAGES, "PRECAST_PROVIDER_PATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert 'packaging is not installed. Fix: pip install "packaging' in done.stdout
    assert "Traceback" not in done.stderr


def test_a_module_in_a_path_that_is_not_utf_8_is_not_prebuilt(tmp_path):
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xe9"))
    write_provider(root, core_specs("sm90a"))
    done = run(
        "doctor", "--profile", "core", "--arch", "9.0",
        PRECAST_PROVIDER_PATH=str(root), PRECAST_JIT="error",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "is not UTF-8, so tvm-ffi cannot open it" in done.stdout
