# SPDX-License-Identifier: Apache-2.0
"""The package named flashinfer: what engines ask of it, from the wheel that is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import precast
from precast.cli._main import main
from precast.shim import ENGINES, MODULES, make_wheel, modules, shim_version

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the path in which pip would have unpacked the wheel for vLLM."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(make_wheel(folder / "dist")).extractall(folder)
    return folder


@pytest.fixture(scope="session")
def sglang_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for SGLang."""
    folder = tmp_path_factory.mktemp("sglang_site")
    zipfile.ZipFile(make_wheel(folder / "dist", "sglang")).extractall(folder)
    return folder


def answer(site: Path, code: str) -> str:
    """What a fresh process prints that has the package on its path."""
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'python'}"}
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("engine", ENGINES)
def test_every_module_stands_for_one_that_exists(engine):
    for homes in modules(engine).values():
        for home in homes:
            assert importlib.util.find_spec(home) is not None, home


def test_every_public_module_is_served_but_those_of_precast_alone():
    own = {"aot", "api_logging", "bundle", "cli", "decorators", "errors", "flashinfer", "loader"}
    own |= {"shim", "trace"}
    public = {m.name for m in pkgutil.iter_modules(precast.__path__) if m.name[0] != "_"}
    served = {home.split(".")[1] for homes in MODULES.values() for home in homes if "." in home}
    assert served - {"shim"} == public - own


def test_names_are_those_of_precast(site):
    code = """
import flashinfer, precast
from flashinfer import rmsnorm, BatchDecodeWithPagedKVCacheWrapper, ActivationType, autotuner
from flashinfer.decode import fast_decode_plan
from flashinfer.quantization.fp4_quantization import block_scale_interleave
import flashinfer.jit.env
assert rmsnorm is precast.rmsnorm and flashinfer.norm.rmsnorm is precast.rmsnorm
assert BatchDecodeWithPagedKVCacheWrapper is precast.BatchDecodeWithPagedKVCacheWrapper
assert fast_decode_plan is precast.fast_decode_plan
assert block_scale_interleave is precast.block_scale_interleave
assert "rmsnorm" in dir(flashinfer) and "norm" in dir(flashinfer)
assert "core" in dir(flashinfer.jit)
from flashinfer.utils import _cache_buf, _get_range_buf
print(_get_range_buf(5, "cpu").tolist(), ("range_8", "cpu") in _cache_buf)
"""
    assert answer(site, code) == "[0, 1, 2, 3, 4] True"


def test_what_precast_lacks_is_missing(site):
    """So that an engine takes its other path."""
    code = """
import importlib.util
import flashinfer
assert not hasattr(flashinfer, "trtllm_bf16_moe") and not hasattr(flashinfer, "__wrapped__")
import flashinfer.gemm
assert not hasattr(flashinfer.gemm, "mm_mxfp8")
for name in ("cute_dsl", "gdn_prefill", "comm.trtllm_alltoall", "comm.trtllm_moe_alltoall"):
    assert importlib.util.find_spec(f"flashinfer.{name}") is None, name
try:
    from flashinfer import mm_fp4
except ImportError as error:
    print(error)
"""
    assert answer(site, code).startswith("cannot import name 'mm_fp4' from 'flashinfer'")


def test_an_engine_gets_names_of_its_own(site, sglang_site):
    code = """
import flashinfer, flashinfer.utils, precast
for path in ("comm.mnnvl", "gemm", "fused_moe.core"):
    try:
        __import__(f"flashinfer.{path}")
        print(path)
    except ImportError:
        pass
print("mm_mxfp8" if hasattr(flashinfer, "mm_mxfp8") else "-")
assert not hasattr(precast, "mm_mxfp8")
"""
    assert answer(site, code).split() == ["comm.mnnvl", "gemm", "fused_moe.core", "-"]
    every = ["comm.mnnvl", "gemm", "fused_moe.core", "mm_mxfp8"]
    assert answer(sglang_site, code).split() == every


def test_a_missing_name_says_who_answers(site):
    code = """
import flashinfer.norm
try:
    flashinfer.norm.no_such_norm
except AttributeError as error:
    print(error)
"""
    words = "precast stands in for FlashInfer here, and there is none in precast.norm"
    assert words in answer(site, code)


def test_probes_of_engines(site):
    code = """
import importlib.metadata, importlib.util
from packaging.version import Version
print(importlib.metadata.version("flashinfer_python"))
print(Version(importlib.metadata.version("flashinfer-python")).public)
spec = importlib.util.find_spec("flashinfer")
print(spec.origin.endswith("flashinfer/__init__.py"))
import sys
print("torch" in sys.modules)
import flashinfer
print(flashinfer.__version__ == importlib.metadata.version("flashinfer-python"))
"""
    version = shim_version("vllm")
    assert answer(site, code).split() == [version, "0.7.2.post1", "True", "False", "True"]


def test_the_autotuner_tunes_nothing(site):
    code = """
from flashinfer.autotuner import AutoTuner, autotune, set_autotune_process_group
from flashinfer.autotuner import _collect_metadata, get_autotune_process_group
tuner = AutoTuner.get()
assert tuner is AutoTuner.get() and tuner.load_configs("/nowhere") is False and not tuner._dirty
tuner.save_configs("/nowhere")
tuner.clear_cache()
with autotune(True, skip_ops={"op"}, tuning_buckets=(1, 2)):
    pass
set_autotune_process_group("group")
assert get_autotune_process_group() == "group"
assert all(isinstance(value, str) for value in _collect_metadata().values())
"""
    assert answer(site, code) == ""


def test_paths_and_loggers_that_engines_read(site):
    code = """
from flashinfer.jit import env
from flashinfer.jit.core import logger
print(env.FLASHINFER_WORKSPACE_DIR.parent.name, env.FLASHINFER_WORKSPACE_DIR.name, logger.name)
"""
    assert answer(site, code).split() == [precast.__version__, "none", "precast"]


def test_check_cuda_arch_asks_for_a_target(monkeypatch):
    from precast.jit.core import check_cuda_arch

    monkeypatch.setenv("PRECAST_CUDA_ARCH_LIST", "9.0")
    check_cuda_arch()
    monkeypatch.setenv("PRECAST_CUDA_ARCH_LIST", "7.5")
    with pytest.raises(RuntimeError, match=r"7\.5"):
        check_cuda_arch()


def test_its_command_downloads_nothing(site):
    argv = [sys.executable, "-m", "flashinfer", "download-kernels", "--dry-run"]
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT / 'python'}"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "nothing is downloaded" in done.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_pip_installs_the_wheel_and_the_same_contents_give_the_same_wheel(engine, tmp_path):
    wheel = make_wheel(tmp_path, engine)
    contents = wheel.read_bytes()
    assert make_wheel(tmp_path, engine).read_bytes() == contents
    assert wheel.name == f"flashinfer_python-{shim_version(engine)}-py3-none-any.whl"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", tmp_path / "site", wheel], check=True)
    installed = {p.name for p in (tmp_path / "site" / "flashinfer").iterdir()}
    assert {"__init__.py", "__main__.py", "jit", "norm.py"} <= installed


def test_an_unknown_engine():
    with pytest.raises(ValueError, match="unknown engine 'trt'; legal: vllm, sglang"):
        shim_version("trt")


def test_the_command_writes_a_wheel(tmp_path, capsys):
    assert main(["shim", "wheel", "-o", str(tmp_path), "--for", "sglang", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert Path(report["wheel"]).is_file()
    assert re.fullmatch(r"0\.7\.2\+precast\.[a-z0-9.]+", report["version"])


@pytest.mark.parametrize("action", ["wheel", "install"])
def test_the_version_that_an_older_engine_pins(action, monkeypatch, tmp_path, capsys):
    ran: list[list[str]] = []
    monkeypatch.setattr("precast.cli._installer.execute", lambda command: ran.append(list(command)))
    output = ["-o", str(tmp_path)] if action == "wheel" else []
    assert main(["shim", action, *output, "--version", "0.6.13", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["version"] == f"0.6.13+precast.{precast.__version__}"
    wheel = report["wheel"] if action == "wheel" else ran[0][-1]
    assert Path(wheel).name.startswith("flashinfer_python-0.6.13+precast.")
    if action == "wheel":
        with zipfile.ZipFile(wheel) as archive:
            assert '__version__ = "0.6.13+' in archive.read("flashinfer/__init__.py").decode()
            assert "flashinfer-python==0.6.13" in archive.read("flashinfer/__main__.py").decode()


@pytest.mark.parametrize(
    ("version", "words"),
    [("new", "'new' is not a version"), ("0.6.13+cu13", "has a local part; legal: what the eng")],
)
def test_a_version_that_no_engine_pins(version, words, tmp_path, capsys):
    assert main(["shim", "wheel", "-o", str(tmp_path), "--version", version]) == 2
    assert f"argument --version: {version!r}" in capsys.readouterr().err.replace("the version ", "")
    with pytest.raises(ValueError, match=words):
        shim_version("vllm", version)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("version", "code", "words"),
    [
        (None, 1, "flashinfer-python is not installed. Fix: precast shim install"),
        ("0.7.2.post1", 1, "flashinfer-python 0.7.2.post1: FlashInfer itself"),
        ("0.7.2+precast.0.1", 0, "flashinfer-python 0.7.2+precast.0.1: precast"),
    ],
)
def test_status_says_who_serves(monkeypatch, capsys, version, code, words):
    monkeypatch.setattr("precast.cli._installer.installed_version", lambda name: version)
    assert main(["shim", "status"]) == code
    assert capsys.readouterr().out.strip() == words


def test_install_and_uninstall_run_the_installer(monkeypatch, capsys):
    ran: list[list[str]] = []
    installed: list[str | None] = [None]
    monkeypatch.setattr("precast.cli._installer.execute", lambda command: ran.append(list(command)))
    monkeypatch.setattr("precast.cli._installer.installed_version", lambda name: installed[0])
    assert main(["shim", "install", "--for", "vllm"]) == 0
    assert ran[0][-1].endswith(".whl") and "--no-index" in ran[0]
    for other in (None, "0.7.2.post1"):
        installed[0] = other
        assert main(["shim", "uninstall"]) == 3
        assert "nothing was removed" in capsys.readouterr().err
    assert len(ran) == 1
    installed[0] = shim_version("vllm")
    assert main(["shim", "uninstall"]) == 0
    assert ran[1][-1] == "flashinfer-python" and "uninstall" in ran[1]
