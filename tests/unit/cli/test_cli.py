# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole, and the commands list and explain."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import PACKAGES, core_specs, edit_manifest, run, write_provider

import precast
import precast.cli
from precast._jit.env import cache_dir
from precast._plan.installed import plan

COMMANDS = [
    "build",
    "bundle",
    "cache",
    "collect-env",
    "completion",
    "doctor",
    "explain",
    "install",
    "list",
    "replay",
    "verify",
]
DIMS = ["head_dim_qk=64", "head_dim_vo=128"]


def test_help_lists_every_command_and_every_exit_code():
    done = run("--help")
    assert done.returncode == 0
    listed = re.findall(r"^    ([a-z-]+) {2,}", done.stdout, re.MULTILINE)
    assert set(COMMANDS) <= set(listed)
    found = {i.name for i in pkgutil.iter_modules(precast.cli.__path__)}
    assert {name.replace("-", "_") for name in listed} == {n for n in found if n[0] != "_"}
    for code in ("0", "1", "2", "3", "70", "130", "141"):
        assert re.search(rf"^  {code} +\S", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command):
    done = run(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: precast {command}")


def test_a_new_file_is_a_new_command(tmp_path):
    # No list names the commands: a file in the folder is enough.
    (tmp_path / "say_hello.py").write_text(
        '"""Say hello."""\n'
        "def add_arguments(parser): parser.add_argument('name')\n"
        "def run(args): print('hello', args.name); return 7\n"
    )
    script = (
        f"import precast.cli, sys; precast.cli.__path__.append({str(tmp_path)!r});"
        "sys.exit(precast.cli.main(['say-hello', 'you']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": PACKAGES}
    )
    assert (done.stdout, done.returncode) == ("hello you\n", 7)


def test_version():
    done = run("--version")
    assert (done.stdout, done.returncode) == (f"precast {precast.__version__}\n", 0)


def test_no_command_prints_the_help_and_is_a_usage_error():
    done = run()
    assert done.returncode == 2
    assert done.stderr.startswith("usage: precast")


def test_list_imports_neither_torch_nor_tvm_ffi():
    script = (
        "import precast.cli, sys; code = precast.cli.main(['list', '--json']);"
        "print(sorted({'torch', 'tvm_ffi', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": PACKAGES}
    )
    assert done.stderr == "[]\n"


@pytest.mark.parametrize(
    ("argv", "environment", "message"),
    [
        (["list", "--op", "nrom"], {}, "error: unknown op 'nrom'; legal: activation, "),
        (["list", "--profile", "big"], {}, "error: unknown profile 'big'; legal: ci, core, full"),
        (["list", "--arch", "9.x"], {}, "'9.x' is not a CUDA target; legal: sm80, sm86, "),
        (
            ["list", "--arch", "9.1"],
            {},
            "'9.1': no target of precast serves compute capability 9.1",
        ),
        (["list", "--arch", "10.0a"], {}, "'10.0a': precast has no target 10.0a; legal: 8.0, 8.6,"),
        (["doctor", "--arch", "7.5"], {}, "serves compute capability 7.5; legal: 8.0, 8.6, 8.7"),
        (["build", "--arch", "12.0a"], {}, "'12.0a': precast has no target 12.0a; legal: 8.0, "),
        (["bundle", "-o", "b", "--arch", "99.9"], {}, "serves compute capability 99.9; legal: 8.0"),
        (["explain", "nrom"], {}, "error: unknown op 'nrom'; legal: activation, "),
        (["explain", "norm", "bf16", "--arch", "9.0"], {}, "error: 'bf16' is not KEY=VALUE"),
        (["explain", "norm", "--arch", "9.0"], {}, "error: norm: axis 'dtype' is missing; legal:"),
        (["explain", "norm", "dtype=e4m3", "--arch", "9.0"], {}, "norm: dtype=e4m3 is not supp"),
        (["explain", "norm", "size=3", "--arch", "9.0"], {}, "error: norm has no axis 'size'"),
        (
            ["explain", "attention", "dtype_q=f16", "dtype_kv=bf16", *DIMS, "--arch", "9.0"],
            {},
            "attention: dtype_q,dtype_kv=f16,bf16 is not supported; legal: f16,f16 or f16,e4m3 or",
        ),
        (
            ["explain", "attention", "bf16", "--arch", "9.0"],
            {},
            "legal: dtype_q=f16 dtype_kv=f16 head_dim_qk=64 head_dim_vo=64",
        ),
        (["doctor"], {"PRECAST_JIT": "never"}, "error: PRECAST_JIT='never' is unknown; legal:"),
        (["cache", "clear"], {}, None),
        (["frobnicate"], {}, "error: unknown command 'frobnicate'; legal: build, bundle, cache,"),
    ],
)
def test_a_wrong_request_is_one_message_and_exit_code_2(tmp_path, argv, environment, message):
    if message is None:  # A cache with a build in it, and standard input that is no terminal.
        folder = (
            tmp_path / cache_dir().name / "cu13-x86_64" / "sm90a" / f"norm__dtype_bf16-{0:016x}"
        )
        folder.mkdir(parents=True)
        environment = {"PRECAST_CACHE_DIR": str(tmp_path)}
        message = (
            "error: standard input is no terminal, so nobody can confirm. "
            "Fix: precast cache clear --yes"
        )
    done = run(*argv, **environment)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_a_reader_that_has_left_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "precast", "list"],
            stdout=out,
            stderr=subprocess.PIPE,
            env={"PYTHONPATH": PACKAGES},
        )
    assert (done.returncode, done.stderr) == (141, b"")


# -- list -----------------------------------------------------------------------------------------


def listed(*argv: str, **environment: str) -> list[dict]:
    done = run("list", "--json", *argv, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["modules"]


def test_list_has_every_planned_module_of_every_target(tmp_path):
    rows = listed(PRECAST_CACHE_DIR=str(tmp_path))
    planned = {(spec.name, spec.arch.name) for spec in plan().modules()}
    assert {(row["module"], row["arch"]) for row in rows} == planned
    assert {row["state"] for row in rows} <= {"JIT", "missing"}


def test_list_filters_by_op_arch_profile_and_source(tmp_path):
    root = write_provider(tmp_path / "p", core_specs("sm80")[:1])
    env = {"PRECAST_PROVIDER_PATH": str(root), "PRECAST_CACHE_DIR": str(tmp_path / "c")}
    name = core_specs("sm80")[0].name
    rows = listed("--arch", "8.0", "9.0a", "--op", name.partition("__")[0], **env)
    assert {row["capability"] for row in rows} == {"8.0", "9.0"}
    assert {row["op"] for row in rows} == {name.partition("__")[0]}
    assert next((row["module"], row["state"], row["arch"]) for row in rows) == (
        name,
        "prebuilt",
        "sm80",
    )
    # sm80 code also serves 8.6, where nothing nearer is installed; it does not serve 9.0.
    only = listed("--arch", "8.6,9.0", "--source", "prebuilt", **env)
    assert [(row["module"], row["capability"], row["arch"]) for row in only] == [
        (name, "8.6", "sm80")
    ]
    small = {row["module"] for row in listed("--profile", "ci", "--arch", "9.0", **env)}
    assert small == {spec.name for spec in plan().modules("ci", plan().archs("9.0a"))}


def test_list_as_text_is_aligned_and_summed_up(tmp_path):
    root = write_provider(tmp_path / "p", core_specs("sm90a")[:1])
    env = {"PRECAST_PROVIDER_PATH": str(root), "PRECAST_JIT": "error"}
    done = run("list", "--arch", "9.0", PRECAST_CACHE_DIR=str(tmp_path / "empty"), **env)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["op", "module", "GPU", "target", "source", "from"]
    column = lines[0].index("source")
    states = [line[column:].split()[0] for line in lines[1:-1]]
    assert states.count("prebuilt") == 1
    assert set(states) == {"prebuilt", "missing"}
    assert lines[-1] == f"{len(states)} modules: 1 prebuilt, {len(states) - 1} missing"


# -- explain --------------------------------------------------------------------------------------


def test_no_compiler_is_started_where_compiling_is_forbidden(tmp_path):
    nvcc, log = tmp_path / "nvcc", tmp_path / "log"
    nvcc.write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    nvcc.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    settings = {"PRECAST_PROVIDER_PATH": "", "PRECAST_CACHE_DIR": str(tmp_path / "cache")}
    argv = ["explain", "norm", "dtype=bf16", "--arch", "9.0"]
    assert run(*argv, PATH=path, PRECAST_JIT="error", **settings).returncode == 1
    assert not log.exists()
    for command in (["doctor", "--profile", "ci", "--arch", "9.0"], ["collect-env"]):
        done = run(*command, PATH=path, PRECAST_JIT="error", **settings)
        assert "not started, because PRECAST_JIT=error forbids compiling" in done.stdout
    assert not log.exists()
    run(*argv, PATH=path, **settings)
    assert log.exists(), "it is the one that would be started"


def test_explain_shows_each_candidate_with_its_reason(tmp_path):
    specs = core_specs("sm90a")
    good = write_provider(tmp_path / "good", specs)
    old = write_provider(tmp_path / "old", specs, version="0.0.9")
    edit_manifest(old, "norm__dtype_bf16", fingerprint="f" * 64)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    done = run(
        "explain", "rmsnorm", "dtype=bf16", "--arch", "sm90a",
        PRECAST_PROVIDER_PATH=f"{old}:{broken}:{good}",
    )  # fmt: skip
    assert done.returncode == 0
    assert "norm__dtype_bf16 on compute capability 9.0" in done.stdout
    assert re.search(r"accepted +PRECAST_PROVIDER_PATH: .*sm90a/norm__dtype_bf16.so", done.stdout)
    assert f"Result: prebuilt: {good}/sm90a/norm__dtype_bf16.so" in done.stdout

    library = good / "sm90a" / "norm__dtype_bf16.so"
    library.write_bytes(library.read_bytes().replace(b"module", b"MODULE"))
    done = run(
        "explain", "norm", "dtype=bf16", "--arch", "9.0", "--json",
        PRECAST_PROVIDER_PATH=f"{old}:{broken}:{good}", PRECAST_JIT="error",
    )  # fmt: skip
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)["modules"]
    assert row["state"] == "missing"
    assert row["path"] is None
    reasons = " | ".join(step["reason"] for step in row["steps"])
    assert "was changed after it was built (sha256 differs)" in reasons
    assert "its fingerprint ffffffffffff is not the" in reasons
    assert "is damaged (not JSON)" in reasons
    assert "compiling is forbidden (PRECAST_JIT=error)" in reasons
    assert not any(step["accepted"] for step in row["steps"])


ATTENTION = ["attention__dtype_q_bf16__dtype_kv_bf16__head_dim_qk_128__head_dim_vo_128"]
ATTENTION += ["attention_sm90__dtype_q_bf16__dtype_kv_bf16__head_dim_qk_128__head_dim_vo_128"]
ATTENTION += ["attention_plan"]
NVFP4 = ["attention_nvfp4__dtype_q_bf16__head_dim_qk_128__head_dim_vo_128", "attention_plan"]
OF_80 = ["attention__dtype_q_bf16__dtype_kv_bf16__head_dim_qk_80__head_dim_vo_80", "attention_plan"]
OF_FP8 = ["attention__dtype_q_bf16__dtype_kv_e4m3__head_dim_qk_128__head_dim_vo_128"]
OF_FP8 += ["attention_sm90__dtype_q_bf16__dtype_kv_e4m3__head_dim_qk_128__head_dim_vo_128"]
OF_FP8 += ["attention_plan"]
#: Queries of 8 bits, too, which are multiplied as they are or converted.
ALL_FP8 = [*OF_FP8, "attention_sm90_fp8__dtype_o_bf16__head_dim_qk_128__head_dim_vo_128"]
WRAPPER = "BatchDecodeWithPagedKVCacheWrapper"


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        (["rmsnorm", "dtype=bf16"], ["norm__dtype_bf16"]),
        (["precast.rmsnorm", "dtype=torch.bfloat16"], ["norm__dtype_bf16"]),
        (["precast.norm.rmsnorm", "dtype=float16"], ["norm__dtype_f16"]),
        (["flashinfer.sampling.sampling_from_probs", "dtype=f32"], ["sampling__dtype_f32"]),
        (["per_token_cast_to_fp8", "dtype=bf16", "out_dtype=float8_e4m3fn"], None),
        ([WRAPPER, "dtype=bf16", "head_dim=128"], ATTENTION),
        # Which no cache in NVFP4 has, and no kernel for Hopper.
        ([WRAPPER, "dtype=bf16", "head_dim=80"], OF_80),
        ([WRAPPER, "q_data_type=bf16", "kv_data_type=e4m3", "head_dim=128"], OF_FP8),
        (
            [WRAPPER, "q_data_type=float8_e4m3fn", "o_data_type=bf16", "head_dim=128"],
            ALL_FP8,
        ),
        (
            [WRAPPER, "q_data_type=e5m2", "kv_data_type=e4m3", "o_data_type=bf16", "head_dim=128"],
            OF_FP8,
        ),
        ([WRAPPER, "q_data_type=bf16", "kv_data_type=torch.uint8", "head_dim=128"], NVFP4),
        (["single_prefill_with_kv_cache", "q_data_type=bf16", "head_dim=128"], ATTENTION),
        (
            [
                "precast.prefill.BatchPrefillWithPagedKVCacheWrapper.plan",
                "head_dim=64",
                "dtype=f16",
            ],
            None,
        ),
        (
            ["MultiLevelCascadeAttentionWrapper", "dtype=bf16", "head_dim=128"],
            [*ATTENTION, "merge_state__dtype_bf16"],
        ),
    ],
)
def test_explain_knows_what_users_import(words, modules, clean_environment, capsys):
    assert precast.cli.main(["explain", *words, "--arch", "9.0", "--json"]) in (0, 1)
    found = [row["module"] for row in json.loads(capsys.readouterr().out)["modules"]]
    if modules is not None:
        assert found == modules
    else:
        assert found[0].startswith(("quantize__", "attention__dtype_q_f16__dtype_kv_f16"))


def test_every_public_name_of_an_op_has_its_op_or_runs_no_kernel():
    from precast._op.dispatch import kernels
    from precast.cli import _names
    from precast.cli._output import UsageError

    without = []
    for name in _names._public():
        try:
            ops = _names.ops_of(name)
        except UsageError as error:
            assert "runs no kernel of precast" in str(error)
            without.append(name)
            continue
        assert set(ops) <= set(plan().config.ops)
    assert not {kernel.function for kernel in kernels().values()} & set(without)
    assert not [name for name in without if name.endswith(("Wrapper", "_plan"))]


def test_doctor_and_list_select_by_public_names(clean_environment, capsys):
    for words in (["doctor", "--profile", "core"], ["list"]):
        precast.cli.main([*words, "--op", "BatchAttention", "--arch", "9.0", "--json"])
        document = json.loads(capsys.readouterr().out)
        rows = document["targets"][0]["modules"] if words[0] == "doctor" else document["modules"]
        names = {"attention", "attention_nvfp4", "attention_plan", "attention_sm90"}
        names.add("attention_sm90_fp8")
        assert {row["op"] for row in rows} == names


def test_explain_without_a_gpu_says_which_option_is_needed():
    done = run("explain", "norm", "dtype=bf16", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert "Fix: name a compute capability, for example --arch 9.0" in done.stderr


def test_nothing_is_written_by_looking(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    for argv in (["doctor"], ["list"], ["cache", "info"], ["verify"], ["collect-env"]):
        run(*argv, HOME=str(home), XDG_CACHE_HOME=str(home / "cache"))
    assert list(Path(home).rglob("*")) == []


@pytest.mark.parametrize("command", [["--help"], ["list", "--arch", "9.0"], ["cache", "info"]])
def test_commands_work_without_docstrings_and_assertions(command, tmp_path):
    done = run(*command, PYTHONOPTIMIZE="2", PRECAST_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout
