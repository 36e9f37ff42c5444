# SPDX-License-Identifier: Apache-2.0
"""precast verify: each way in which a file can differ from what the manifest and the plan say."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile

import pytest
from cli_support import PACKAGES, core_specs, edit_manifest, fake_library, run, write_provider
from small_wheels import make_provider

from precast._base.shared_object import EXPORT_PREFIX
from precast._runtime import elf
from precast._runtime.loader import loader
from precast.cli import main
from precast.errors import ToolchainError

NAME = "norm__dtype_bf16"


@pytest.fixture
def provider(tmp_path, monkeypatch):
    """A provider whose files read back exactly as planned."""
    specs = core_specs("sm90a")
    root = write_provider(tmp_path / "p", specs)
    by_file = {root / spec.file_name: spec for spec in specs}

    def symbols(path):
        spec = by_file[path]
        defined = tuple(sorted(EXPORT_PREFIX + name for name in spec.exports))
        needed = ("libc.so.6", spec.cudart, "libtvm_ffi.so")
        return elf.Symbols(defined, (), needed, (), {"GLIBC": "2.17"})

    monkeypatch.setattr(elf, "read_symbols", symbols)
    monkeypatch.setattr(elf, "read_machine_code", lambda path: elf.MachineCode(("sm_90a",), ()))
    monkeypatch.setattr(elf, "find_cuobjdump", lambda: "cuobjdump")
    monkeypatch.setenv("PRECAST_PROVIDER_PATH", str(root))
    loader.bind()
    yield root
    monkeypatch.undo()
    loader.bind()


def verify(capsys, *argv: str) -> tuple[int, list[str]]:
    code = main(["verify", "--json", *argv])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    problems = [problem for row in report["providers"] for problem in row["problems"]]
    return code, [f"{p['file']}: {p['problem']}" for p in problems]


def test_an_intact_provider_passes(provider, capsys):
    assert verify(capsys) == (0, [])
    assert main(["verify"]) == 0
    count = len(core_specs("sm90a"))
    assert f"({provider}): {count} modules OK" in capsys.readouterr().out


def test_a_folder_can_be_named(provider, capsys, tmp_path):
    assert verify(capsys, str(provider)) == (0, [])
    code, problems = verify(capsys, str(tmp_path))
    assert code == 1
    assert "manifest.json cannot be read" in problems[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 3}, "bytes instead of 3: truncated. Fix: build or unpack"),
        ({"sha256": "0" * 64}, "was changed after it was built (sha256 differs)"),
        ({"fingerprint": "0" * 64}, "fingerprint 000000000000 is not the"),
        ({"exports": ["rmsnorm"]}, "expected rmsnorm"),
        ({"needed": ["libc.so.6"]}, "libraries: libc.so.6, libcudart.so.13, libtvm_ffi.so; "),
        ({"sass": ["sm_90a", "sm_80"]}, "machine code: sm_90a; expected sm_80, sm_90a"),
    ],
)
def test_a_manifest_that_differs_from_the_file(provider, capsys, changes, message):
    edit_manifest(provider, NAME, **changes)
    loader.bind()
    code, problems = verify(capsys)
    assert code == 1
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"sm90a/{NAME}.so: ")
    assert message in problems[0]


def test_a_module_that_is_not_planned(provider, capsys, monkeypatch):
    library, file = provider / f"sm90a/{NAME}.so", "sm90a/norm__dtype_f64.so"
    symbols = elf.read_symbols(library)
    read = elf.read_symbols
    library.rename(provider / file)
    edit_manifest(provider, NAME, name="norm__dtype_f64", file=file)
    monkeypatch.setattr(
        elf, "read_symbols", lambda path: symbols if path == provider / file else read(path)
    )
    loader.bind()
    (problem,) = verify(capsys)[1]
    assert problem.startswith(f"{file}: ")
    assert "does not plan norm__dtype_f64 for sm90a: never loaded" in problem


@pytest.mark.parametrize(
    ("reader", "result", "messages"),
    [
        (
            "read_symbols",
            elf.Symbols((EXPORT_PREFIX + "other",), (), ("libtorch.so",), ("/opt",), {}),
            ["exports: other; expected", "needed libraries: libtorch.so; ", "a run path (/opt)"],
        ),
        (
            "read_machine_code",
            elf.MachineCode(("sm_80",), ("sm_80",)),
            ["machine code: sm_80; expected sm_90a", "it holds PTX (sm_80)"],
        ),
    ],
)
def test_a_file_that_differs_from_its_manifest(
    provider, capsys, monkeypatch, reader, result, messages
):
    original = getattr(elf, reader)
    wrong = provider / "sm90a" / f"{NAME}.so"
    monkeypatch.setattr(elf, reader, lambda path: result if path == wrong else original(path))
    code, problems = verify(capsys)
    assert code == 1
    assert all(p.startswith(f"sm90a/{NAME}.so: ") for p in problems)
    for message in messages:
        assert any(message in p for p in problems), message


def test_a_file_that_the_manifest_does_not_know(provider, capsys):
    (provider / "sm90a" / "extra.so").write_bytes(b"")
    assert verify(capsys) == (1, ["sm90a/extra.so: is not in the manifest"])


def test_a_missing_tool_is_said_and_fails_only_on_request(provider, capsys, monkeypatch):
    def missing():
        raise ToolchainError(f"no cuobjdump was found. Fix: {elf.INSTALL_HINT}")

    monkeypatch.setattr(elf, "find_cuobjdump", missing)
    assert main(["verify"]) == 0
    out = capsys.readouterr().out
    assert f"Not checked: machine code (no cuobjdump was found. Fix: {elf.INSTALL_HINT})" in out
    assert main(["verify", "--strict"]) == 1


def test_nothing_to_verify_fails(tmp_path):
    done = run("verify", PRECAST_PROVIDER_PATH="")
    if "no prebuilt modules are installed" not in done.stdout:
        pytest.skip("a provider is installed in this environment")
    assert done.returncode == 1


def test_a_file_that_is_no_library_is_reported(tmp_path):
    specs = core_specs("sm90a")[:1]
    root = write_provider(tmp_path, specs)
    data = b"#!/bin/sh\n" * 20
    (root / specs[0].file_name).write_bytes(data)
    edit_manifest(root, specs[0].name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    done = run("verify", str(root))
    assert done.returncode == 1
    assert f"{specs[0].name}.so is not a 64-bit shared library" in done.stdout


def test_an_installed_provider_is_compared_with_its_record(tmp_path):
    """pip's RECORD tells that both the module and the manifest were exchanged."""
    wheel = make_provider(tmp_path / "dist", tmp_path)
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    before = run("verify", "--json", PYTHONPATH=f"{PACKAGES}:{site}")
    assert not of_record(before.stdout)
    specs = core_specs("sm90a")
    root = site / "precast_jit_cache_cu13_sm90a"
    file = root / specs[0].file_name
    data = fake_library("another", specs[0].exports)
    file.write_bytes(data)
    edit_manifest(root, specs[0].name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (root / specs[1].file_name).unlink()
    os.mkfifo(root / specs[1].file_name)  # It is not waited for.
    done = run("verify", "--json", PYTHONPATH=f"{PACKAGES}:{site}")
    assert done.returncode == 1
    fix_hint = "Fix: pip install --force-reinstall --no-deps precast-jit-cache-cu13-sm90a"
    differs = f"is not what pip's RECORD says. {fix_hint}"
    missing = f"is in pip's RECORD and missing. {fix_hint}"
    assert of_record(done.stdout) == {
        "manifest.json": differs,
        specs[0].file_name: differs,
        specs[1].file_name: missing,
    }


def of_record(output: str) -> dict[str, str]:
    (report,) = json.loads(output)["providers"]
    return {p["file"]: p["problem"] for p in report["problems"] if "RECORD" in p["problem"]}
