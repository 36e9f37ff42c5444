# SPDX-License-Identifier: Apache-2.0
"""Errors of the command line: the message, its fix, and the documented exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import PACKAGES, core_specs, edit_manifest, run, write_provider
from small_wheels import ALONE, PLAN, core_plan, make_provider, make_wheel

import precast.cli
from precast.cli import _main, _parser

#: Words after ``precast``, and the environment. FULL is a standard output that takes nothing.
Case = tuple[list[str], dict[str, str]]
FULL = {"STDOUT": "/dev/full"}
DIMS = ["head_dim_qk=64", "head_dim_vo=64"]


def cases(folder: Path) -> dict[tuple[str, int], Case]:
    """A command line for each exit code that each command can give."""
    good = write_provider(folder / "good", core_specs("sm90a"))
    changed = write_provider(folder / "changed", core_specs("sm90a"))
    edit_manifest(changed, "norm__dtype_bf16", sha256="0" * 64)
    (folder / "links").mkdir()
    here = {"PRECAST_PROVIDER_PATH": str(good), "PRECAST_JIT": "error"}
    no_jit = {"PRECAST_JIT": "error"}
    compilers = fake_compilers(folder)
    build = ["build", "--arch", "9.0", "--profile", "ci", "-o"]
    bundle = ["bundle", "-o", str(folder / "b"), "--no-index", "--find-links"]
    explain = ["explain", "norm", "dtype=bf16", "--arch"]
    replay = ["replay", dump(folder), "--import", "logged_ops", "--device"]
    ours = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), PACKAGES])}
    return {
        ("build", 0): ([*build, str(folder / "o"), "--dry-run"], compilers),
        ("build", 1): ([*build, str(good)], compilers),
        ("build", 2): (["build", "--profile", "croe", "--arch", "9.0"], compilers),
        ("build", 3): ([*build, str(folder / "o")], {"CXX": "no-such-compiler"}),
        ("bundle", 0): ([*bundle, str(wheels(folder)), "--arch", "9.0"], ALONE),
        ("bundle", 2): ([*bundle, str(folder / "links"), "--arch", "x"], {}),
        ("bundle", 3): ([*bundle, str(folder / "links"), "--arch", "9.0"], ALONE),
        ("cache", 0): (["cache", "clear", "--yes"], {}),
        ("cache", 2): (["cache", "prune", "--max-size", "big"], {}),
        ("cache", 3): (["cache", "info"], FULL),
        ("collect-env", 0): (["collect-env"], {}),
        ("collect-env", 2): (["collect-env", "--jsn"], {}),
        ("collect-env", 3): (["collect-env"], FULL),
        ("completion", 0): (["completion", "bash"], {}),
        ("completion", 2): (["completion", "tcsh"], {}),
        ("completion", 3): (["completion", "zsh"], {"PYTHONPATH": without(folder, "argcomplete")}),
        ("doctor", 0): (["doctor", "--profile", "core", "--arch", "9.0"], here),
        ("doctor", 1): (["doctor", "--profile", "core", "--arch", "8.0"], no_jit),
        ("doctor", 2): (["doctor", "--profile", "big", "--arch", "8.0"], {}),
        ("doctor", 3): (["doctor"], {"PRECAST_CUDA_HOME": str(folder / "nowhere")}),
        ("explain", 0): ([*explain, "9.0"], here),
        ("explain", 1): ([*explain, "8.0"], no_jit),
        ("explain", 2): (["explain", "norm", "dtype=e4m3", "--arch", "9.0"], {}),
        ("explain", 3): ([*explain, "9.0"], FULL),
        ("install", 0): (["install", "--arch", "9.0"], here),
        ("install", 1): (["install", "--arch", "8.0"], {**no_jit, **fake_pip(folder)}),
        ("install", 2): (["install", "--arch", "9.0", "--cuda", "11"], {}),
        ("install", 3): (["install", "--arch", "9.0"], {**here, **FULL}),
        ("list", 0): (["list", "--arch", "9.0"], here),
        ("list", 2): (["list", "--op", "nrom"], {}),
        ("list", 3): (["list"], FULL),
        ("replay", 0): ([*replay, "cpu"], ours),
        ("replay", 1): ([*replay, "cpu"], {**ours, "FAULT": "1"}),
        ("replay", 2): ([*replay, "tpu"], ours),
        ("replay", 3): ([*replay, "cuda"], ours),
        ("shim", 0): (["shim", "wheel", "-o", str(folder / "shim")], {}),
        ("shim", 1): (["shim", "status"], {}),
        ("shim", 2): (["shim", "wheel", "-o", str(folder), "--for", "no-engine"], {}),
        ("shim", 3): (["shim", "uninstall"], {}),
        ("tune", 2): (["tune", "gemm", "--shapes", str(folder / "none"), "--out", "table"], {}),
        ("tune", 3): (["tune", "gemm", "--shapes", shapes(folder), "--out", "table"], {}),
        ("verify", 0): (["verify", str(good)], fake_cuobjdump(folder)),
        ("verify", 1): (["verify", str(changed)], {}),
        ("verify", 2): (["verify", "--strictly"], {}),
        ("verify", 3): (["verify", str(changed)], FULL),
    }


def shapes(folder: Path) -> str:
    """A file of products to be measured."""
    made = folder / "shapes"
    made.write_text("m=1 n=256 k=512\n")
    return str(made)


def dump(folder: Path) -> str:
    """The folder of one dumped call."""
    made = folder / "dumps"
    code = "import logged_ops, torch; logged_ops.plain(torch.ones(2))"
    env = {**os.environ, "PRECAST_LOGLEVEL": "10", "PRECAST_LOGDEST": str(folder / "log")}
    env |= {"PRECAST_DUMP_DIR": str(made), "PRECAST_REFERENCE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), PACKAGES])
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)
    return str(made)


def fake_compilers(folder: Path) -> dict[str, str]:
    """The settings for an nvcc and a host compiler that know only their versions."""
    home = folder / "cuda"
    for path in ("bin", "include", "lib64"):
        (home / path).mkdir(parents=True, exist_ok=True)
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    cxx = home / "bin" / "g++"
    cxx.write_text("#!/bin/sh\necho 'g++ (made up) 12.2.0'\n")
    for tool in (nvcc, cxx):
        tool.chmod(0o755)
    (home / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 13000\n")
    (home / "lib64" / "libcudart.so.13").touch()
    return {"PRECAST_CUDA_HOME": str(home), "CXX": str(cxx)}


def without(folder: Path, package: str) -> str:
    """A path on which this package cannot be imported."""
    hidden = folder / f"without-{package}"
    hidden.mkdir()
    (hidden / f"{package}.py").write_text(f"raise ImportError('no {package} here')\n")
    return os.pathsep.join([str(hidden), PACKAGES])


def fake_cuobjdump(folder: Path) -> dict[str, str]:
    """A cuobjdump that finds what is planned, and no pyelftools."""
    path = without(folder, "elftools")
    tool = folder / "without-elftools" / "nvidia" / "cu13" / "bin" / "cuobjdump"
    tool.parent.mkdir(parents=True)
    (folder / "without-elftools" / "nvidia" / "__init__.py").touch()
    tool.write_text("#!/bin/sh\nprintf 'Fatbin elf code:\\n====\\narch = sm_90a\\n'\n")
    tool.chmod(0o755)
    return {"PYTHONPATH": path}


def fake_pip(folder: Path, code: int = 0) -> dict[str, str]:
    """A pip that says what it is asked to do, does nothing, and is content."""
    package = folder / "pip-of-this-test" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        f"import sys; print('pip', *sys.argv[1:]); raise SystemExit({code})\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), PACKAGES]), "PATH": "", "UV": ""}


def wheels(folder: Path) -> Path:
    """All that a bundle for sm90a needs, as its own index."""
    dist = folder / "dist"
    core = 'precast-jit-cache-cu13-sm90a==0.1.0; extra == "cu13-sm90a"'
    plan = {PLAN: json.dumps(core_plan())}
    make_wheel(
        dist, "precast", "0.1.0", (core,), files=plan, metadata="Provides-Extra: cu13-sm90a\n"
    )
    make_provider(dist, folder)
    make_wheel(dist, "apache_tvm_ffi", "0.1.15")
    make_wheel(dist, "nvidia_cuda_runtime", "13.0")
    return dist


#: test_gpu_cli.py has these.
ON_A_GPU = {("tune", 0)}
DECLARED = [
    (name, code)
    for name in _parser.command_names()
    for code in getattr(_parser.command_module(name), "EXIT_CODES", ())
    if (name, code) not in ON_A_GPU
]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> dict[tuple[str, int], Case]:
    return cases(tmp_path_factory.mktemp("cases"))


def test_each_command_declares_the_exit_codes_that_are_tried_here(table):
    assert {command for command, _ in table} <= set(_parser.command_names())
    assert set(DECLARED) == set(table)
    assert {code for _, code in table} <= set(_parser.EXIT_CODES)


@pytest.mark.parametrize(("command", "code"), DECLARED)
def test_exit_code(table, tmp_path, command, code):
    words, environment = table[command, code]
    environment = {"PRECAST_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", **environment}
    stdout = environment.pop("STDOUT", None)
    if stdout is None:
        done = run(*words, **environment)
    else:
        with Path(stdout).open("w") as full:
            done = run(*words, stdout=full, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if code in (2, 3):
        # One message with one fix, and no output that a program could take for a result.
        assert done.stderr.splitlines()[-1].count("Fix: ") == 1 or "\nFix: " in done.stderr
        assert not done.stdout


#: They import torch, which takes as long as three other commands.
IMPORT_TORCH = {("replay", 3), ("tune", 3)}
WITH_JSON = [row for row in DECLARED if row[1] in (2, 3) and row not in IMPORT_TORCH]


@pytest.mark.parametrize(("command", "code"), WITH_JSON)
def test_with_json_an_error_is_one_object_with_the_same_exit_code(table, tmp_path, command, code):
    words, environment = table[command, code]
    if environment.get("STDOUT"):
        pytest.skip("no object can be written where standard output takes nothing")
    environment = {"PRECAST_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", **environment}
    done = run(*words, "--json", **environment)
    document = json.loads(done.stdout)
    # `completion` has no option --json, which is a usage error of its own.
    assert done.returncode == (2 if command == "completion" else code), done.stderr
    assert document.keys() == {"schema", "error", "fix", "exit_code"}
    assert document["exit_code"] == done.returncode
    assert document["error"]
    assert document["fix"]
    assert "Fix:" not in document["error"]
    assert f"error: {document['error']}" in done.stderr
    assert document["fix"] in done.stderr


@pytest.mark.parametrize("words", [["--json"], ["lst", "--json"], ["list", "--jsn", "--json"]])
def test_with_json_a_line_that_no_command_reads_is_an_object(words, capsys):
    assert precast.cli.main(words) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_behind_two_dashes_json_is_no_option(capsys):
    assert precast.cli.main(["explain", "--", "nrom", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_with_json_a_bug_and_an_interrupt_are_objects(monkeypatch, capsys):
    from precast.cli import list as command

    def stopped_by(error):
        def stopped(args):
            raise error

        monkeypatch.setattr(command, "run", stopped)
        code = precast.cli.main(["list", "--json"])
        captured = capsys.readouterr()
        document = json.loads(captured.out)
        assert document["exit_code"] == code
        return document, captured.err

    document, err = stopped_by(ZeroDivisionError("by design"))
    assert document["exit_code"] == 70
    assert document["error"] == "this is a bug in precast: ZeroDivisionError: by design"
    assert document["fix"].endswith("precast collect-env")
    assert "Traceback" in err
    document, err = stopped_by(KeyboardInterrupt())
    assert (document["exit_code"], document["error"]) == (130, "interrupted")
    assert document["fix"] is None
    assert err == "error: interrupted\n"


def test_an_object_that_was_printed_stays_the_only_one(monkeypatch, capsys):
    from precast.cli import _output
    from precast.cli import list as command

    def late(args):
        _output.print_json({"modules": []})
        raise ValueError("after the result")

    monkeypatch.setattr(command, "run", late)
    assert precast.cli.main(["list", "--json"]) == 70
    assert json.loads(capsys.readouterr().out)["modules"] == []


def test_a_bug_has_an_exit_code_of_its_own(monkeypatch, capsys):
    from precast.cli import list as command

    def broken(args):
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(command, "run", broken)
    assert precast.cli.main(["list"]) == 70
    err = capsys.readouterr().err
    assert "ZeroDivisionError: by design" in err
    assert err.splitlines()[-1].endswith("the output of: precast collect-env")


@pytest.mark.parametrize(
    ("package", "argv"),
    [
        ("packaging", ["bundle", "-o", "out", "--arch", "9.0a", "--no-index"]),
        ("packaging", ["install", "--arch", "9.0", "--dry-run"]),
        ("packaging", ["collect-env"]),
        ("platformdirs", ["cache", "info"]),
        ("torch", ["replay", "DUMP", "--device", "cuda:0"]),
    ],
)
def test_a_requirement_that_is_missing_is_no_bug(tmp_path, package, argv):
    blocker = "import sys; sys.modules[sys.argv.pop(1)] = None; from precast.cli import main; "
    argv = [sys.executable, "-c", f"{blocker}sys.exit(main())", package, *argv]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PRECAST_")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert "Traceback" not in done.stderr
    if done.returncode != 0:
        assert done.returncode == 3
        assert f"error: {package} is missing, too old or damaged (" in done.stderr
        assert f"Fix: pip install {package}" in done.stderr
    assert (done.returncode == 0) == (argv[-1] == "collect-env")


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    from precast.cli import list as command

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert precast.cli.main(["list"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["lst"], "precast list"),
        (["docter", "--arch", "9.0"], "precast doctor --arch 9.0"),
        (["colect-env"], "precast collect-env"),
        (["cache", "prunne"], "precast cache prune"),
        (["list", "--op", "nrom"], "precast list --op norm"),
        (["list", "--op=nrom", "--json"], "precast list --op=norm --json"),
        (["doctor", "--op", "rmsnom"], "precast doctor --op rmsnorm"),
        (
            ["explain", "BatchDecodeWithPagedKVCacheWraper", "dtype=bf16"],
            "precast explain BatchDecodeWithPagedKVCacheWrapper dtype=bf16",
        ),
        (
            ["explain", "precast.top_k_sampling_from_prob"],
            "precast explain top_k_sampling_from_probs",
        ),
        (["list", "--profile", "croe"], "precast list --profile core"),
        (["list", "--sorce", "JIT"], "precast list --source JIT"),
        (["list", "--source=prebuild"], "precast list --source=prebuilt"),
        (["explain", "rmsnrm", "dtype=bf16"], "precast explain rmsnorm dtype=bf16"),
        (
            ["explain", "norm", "dtype=bf61", "--arch=9.0"],
            "precast explain norm dtype=bf16 --arch=9.0",
        ),
        (
            ["explain", "norm", "dtyp=bf16", "--arch=9.0"],
            "precast explain norm dtype=bf16 --arch=9.0",
        ),
        (
            ["explain", "attention", "dtype_q=f16", "dtype_kv=e4m4", *DIMS, "--arch=9.0"],
            f"precast explain attention dtype_q=f16 dtype_kv=e4m3 {' '.join(DIMS)} --arch=9.0",
        ),
        (["completion", "bsh"], "precast completion bash"),
        (["list", "something"], "precast list --help"),
        (["qqq"], "precast --help"),
        (["cache"], "precast cache --help"),
        (["cache", "prune", "--max-size", "big"], "precast cache prune --help"),
        (["list", "--arc", "9.0"], "precast list --arch 9.0"),
    ],
)
def test_the_fix_of_a_typing_error_is_the_corrected_line(words, fix, capsys):
    assert precast.cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == f"Fix: {fix}"
    if "--json" in words:
        assert json.loads(captured.out)["fix"] == fix
    else:
        assert captured.out == ""


def test_every_way_to_be_wrong_has_a_last_resort():
    for _, (code, fix) in _main._ERRORS.items():
        assert code in _parser.EXIT_CODES
        assert "Fix" not in fix
        assert fix.format(help="precast x --help", variable="PRECAST_JIT")


def test_a_wrong_variable_is_named_in_the_fix(monkeypatch, capsys):
    monkeypatch.setenv("PRECAST_JIT", "never")
    assert precast.cli.main(["doctor"]) == 2
    assert capsys.readouterr().err.endswith("Fix: unset PRECAST_JIT, or set it to a legal value\n")
