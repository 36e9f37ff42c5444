# SPDX-License-Identifier: Apache-2.0
"""precast collect-env: complete, free of secrets, and never stopped by what is broken."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

import pytest
from cli_support import core_specs, run, write_provider

import precast
from precast._runtime.loader import loader
from precast.cli import _machine


def collect(*words: str, **environment: str) -> dict:
    done = run("collect-env", "--json", *words, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_prints_what_a_bug_report_needs(tmp_path):
    root = write_provider(tmp_path / "p", core_specs("sm90a"))
    report = collect(PRECAST_PROVIDER_PATH=str(root), PRECAST_CACHE_DIR=str(tmp_path / "c"))
    assert report["precast"]["version"] == precast.__version__
    text = json.dumps(loader.document, sort_keys=True, separators=(",", ":"))
    assert report["precast"]["plan_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    versions = {row["name"]: row["version"] for row in report["packages"]}
    assert versions["python"] == platform.python_version()
    assert {"torch", "apache-tvm-ffi", "filelock"} <= set(versions)
    assert report["system"]["machine"] == platform.machine()
    assert report["system"]["cores"] >= report["system"]["cores_available"] >= 1
    assert report["system"]["memory"] >= 10**8
    (provider,) = report["providers"]
    assert provider["manifest"]["version"] == precast.__version__
    assert provider["manifest"]["archs"] == ["sm90a"]
    assert report["cache"]["builds"] == 0
    assert report["jit"]["policy"] == "auto"
    text = run("collect-env", PRECAST_PROVIDER_PATH=str(root)).stdout
    for heading in ("precast", "System", "Packages", "GPUs", "Compilers", "Cache", "Variables"):
        assert f"\n{heading}\n" in f"\n{text}"
    assert report["precast"]["plan_sha256"] in text


def test_only_named_variables_are_shown():
    settings = {
        "PRECAST_JIT": "warn",
        "MAX_JOBS": "3",
        "CUDA_VISIBLE_DEVICES": "1",
        "AWS_SECRET_ACCESS_KEY": "hush-1",
        "CUDA_TOKEN": "hush-2",
        "HF_TOKEN": "hush-3",
        "PRECAST_UPLOAD_TOKEN": "hush-5",
        "PIP_INDEX_URL": "https://me:hush-4@example.org",
    }
    report = collect(**settings)
    shown = {name: settings[name] for name in ("PRECAST_JIT", "MAX_JOBS", "CUDA_VISIBLE_DEVICES")}
    assert shown.items() <= report["variables"].items()
    assert "hush" not in json.dumps(report)
    assert "hush" not in run("collect-env", **settings).stdout


def test_the_home_directory_is_a_tilde(tmp_path):
    home = tmp_path / "someone"
    (home / "cache").mkdir(parents=True)
    settings = {"HOME": str(home), "PRECAST_CACHE_DIR": f"{home}/cache"}
    report = collect(**settings)
    assert report["variables"]["PRECAST_CACHE_DIR"] == "~/cache"
    assert report["cache"]["directory"].startswith("~/cache/")
    assert "someone" not in json.dumps(report)
    assert "someone" not in run("collect-env", **settings).stdout


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann", "~"),
        ("/home/ann/x", "~/x"),
        ("/a:/home/ann/b:/home/ann/c", "/a:~/b:~/c"),
        ("(/home/ann/x)", "(~/x)"),
        ("/home/anna/x", "/home/anna/x"),
        ("/data/home/ann/x", "/data/home/ann/x"),
    ],
)
def test_where_the_home_directory_stands_in_a_text(monkeypatch, text, shown):
    monkeypatch.setenv("HOME", "/home/ann")
    assert _machine.without_home({"a": [text, 1, None]}) == {"a": [shown, 1, None]}


def test_a_root_home_hides_nothing(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert _machine.without_home("/usr/lib") == "/usr/lib"


def test_a_part_that_fails_is_reported_and_the_others_are_complete(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "manifest.json").write_text("{")
    settings = {
        "PRECAST_JIT": "never",
        "PRECAST_CUDA_HOME": str(tmp_path / "nowhere"),
        "PRECAST_PROVIDER_PATH": str(tmp_path / "bad"),
    }
    report = collect(**settings)
    assert "PRECAST_JIT='never' is unknown" in report["jit"]["error"]
    assert "has no bin/nvcc" in report["compilers"]["error"]
    assert any("is damaged" in problem for problem in report["problems"])
    assert report["precast"]["version"] == precast.__version__
    done = run("collect-env", **settings)
    assert done.returncode == 0
    assert "EnvironmentVariableError: PRECAST_JIT='never' is unknown" in done.stdout


def test_a_variable_that_nothing_reads_is_pointed_out():
    report = collect(PRECAST_JTI="error", PRECAST_SOMETHING_ELSE="1")
    assert [problem for problem in report["problems"] if "PRECAST_" in problem] == [
        "PRECAST_JTI is not a variable of precast: it has no effect. Fix: set PRECAST_JIT instead",
        "PRECAST_SOMETHING_ELSE is not a variable of precast: it has no effect. Fix: unset "
        "PRECAST_SOMETHING_ELSE",
    ]
