# SPDX-License-Identifier: Apache-2.0
"""What continuous integration runs: the matrix, its pins, and that it runs what a person types."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import run_times
from ci_support import ROOT, script

from precast._plan.planner import Plan

images = script("images")
matrix = script("matrix")
make_provider = script("make_provider")
pins = script("pins")

PLAN = Plan.load(ROOT)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


# -- matrix ---------------------------------------------------------------------------------------


def test_the_matrix_is_every_extra_of_the_core_for_every_machine() -> None:
    rows = matrix.rows(PLAN)
    got = {(row["distribution"], row["machine"]) for row in rows}
    assert len(got) == len(rows)
    extras = {
        f"precast-jit-cache-cu{major}-{arch.name}"
        for major in PLAN.build.cuda
        for arch in PLAN.build.archs.values()
        if arch.cuda[0] <= major
    }
    assert got == {(name, machine) for name in extras for machine in ("x86_64", "aarch64")}
    assert ("precast-jit-cache-cu12-sm110a", "aarch64") not in got
    assert ("precast-jit-cache-cu13-sm110a", "aarch64") in got


def test_the_matrix_can_be_narrowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--cuda", "13", "--machine", "x86_64", "--arch", "sm80 sm90a"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(r["cuda"], r["arch"], r["runner"]) for r in document["include"]] == [
        ("13", "sm80", "ubuntu-24.04"),
        ("13", "sm90a", "ubuntu-24.04"),
    ]


def test_the_newest_cuda_major_needs_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--newest"]) == 0
    newest = capsys.readouterr().out.strip()
    assert newest == str(max(PLAN.build.cuda))
    assert matrix.main(["--cuda", "newest", "--machine", "x86_64", "--arch", "sm90a"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["include"]
    assert row["cuda"] == newest


def test_compilers_come_from_where_the_plan_says() -> None:
    """What PyPI has no compiler for has packages; the image is by default for the newest CUDA."""
    for major, row in PLAN.build.cuda.items():
        assert ("packages" in images.toolkit(major)) != row.toolkit_on_pypi
    text = (ROOT / "docker" / "build.Dockerfile").read_text()
    assert re.findall(r"^ARG CUDA=(.*)$", text, re.M) == [str(PLAN.build.newest_cuda)]
    assert f'CMD ["{PLAN.build.newest_cuda}", ' in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--cuda", "11"], "11 is not a CUDA major; legal: 12, 13"),
        (["--machine", "riscv"], "riscv is not a machine; legal: x86_64, aarch64"),
        (["--arch", "sm75"], "sm75 is not a target; legal: sm80"),
        (["--cuda", "12", "--arch", "sm110a"], "no CUDA major of the selection compiles"),
    ],
)
def test_a_wrong_selection_is_rejected(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        matrix.main(words)
    assert error.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("cuda", list(PLAN.build.cuda))
def test_a_provider_is_built_in_pinned_images(cuda: int, tmp_path: Path) -> None:
    make_provider.make_provider(cuda, "sm90a", tmp_path / "a" / "b")
    text = (tmp_path / "a" / "b" / "pyproject.toml").read_text()
    settings = images.tomllib.loads(text)["tool"]
    build = settings["cibuildwheel"]
    for machine in ("x86_64", "aarch64"):
        image = build[f"manylinux-{machine}-image"]
        assert image == images.reference(f"manylinux.{machine}")
        assert re.fullmatch(r"quay\.io/\S+@sha256:[0-9a-f]{64}", image)
    assert build["before-all"].endswith(f"install_cuda.sh {cuda}")
    # The checkout is another folder inside the container.
    source = settings["scikit-build"]["cmake"]["source-dir"]
    assert not Path(source).is_absolute()
    assert (tmp_path / "a" / "b" / source).resolve() == ROOT


@pytest.mark.parametrize(("arch", "needs_it"), [("sm80", False), ("sm90a", True), ("sm100f", True)])
def test_a_provider_is_built_with_the_compiler_of_its_kernels(
    arch: str, needs_it: bool, tmp_path: Path
) -> None:
    """check_wheel.py fails for a wheel that lacks the modules in CuTe DSL."""
    make_provider.make_provider(13, arch, tmp_path)
    project = images.tomllib.loads((tmp_path / "pyproject.toml").read_text())
    compiler = f"nvidia-cutlass-dsl=={PLAN.build.cute_dsl}"
    assert (compiler in project["build-system"]["requires"]) == needs_it


# -- pins -----------------------------------------------------------------------------------------


def test_images_are_pinned_and_stated_once() -> None:
    assert images.problems() == []
    for cuda in PLAN.build.cuda:
        major, _, minor = images.toolkit(cuda)["toolkit"].partition(".")
        assert int(major) == cuda
        for package in images.toolkit(cuda).get("packages", ()):
            assert f"-{major}-{minor}-{major}.{minor}." in package


@pytest.mark.parametrize(
    ("file", "old", "new", "text"),
    [
        ("ci/images.toml", "sha256:", "latest:", "digest is 'latest:"),
        ("ci/images.toml", 'digest = "', 'digests = "', "digest is None"),
        ("docker/runtime.Dockerfile", "python@sha256:7", "python@sha256:0", "ARG BASE_IMAGE is"),
        ("docker/build.Dockerfile", "ARG BASE_IMAGE=", "ARG BASE=", "ARG BASE_IMAGE is missing"),
    ],
)
def test_an_image_by_tag_or_a_copy_that_differs_is_found(
    file: str, old: str, new: str, text: str, tmp_path: Path
) -> None:
    for folder in ("ci", "docker"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    path = tmp_path / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert text in "\n".join(images.problems(tmp_path))


def test_images_are_compared_with_those_of_cibuildwheel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cibuildwheel", reason='pip install ".[ci]" brings it')
    assert images._pinned_by_cibuildwheel()["x86_64"] == images.reference("manylinux.x86_64")
    monkeypatch.setattr(
        images, "_pinned_by_cibuildwheel", lambda: {"x86_64": "other", "aarch64": ""}
    )
    assert len(images.problems()) == 2


def test_a_missing_image_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"no image 'manylinux\.riscv'"):
        images.reference("manylinux.riscv")
    with pytest.raises(ValueError, match="no CUDA 11; legal: 12, 13"):
        images.toolkit(11)


def test_every_action_is_pinned() -> None:
    found, problems = pins.problems({f.name: f.read_text() for f in WORKFLOWS})
    assert problems == []
    assert "actions/checkout" in found


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("- uses: actions/checkout@v6", "is not pinned by the full hash"),
        ("- uses: actions/checkout@" + "a" * 39, "is not pinned by the full hash"),
        ("  uses: actions/checkout@" + "a" * 40, "has no comment with its release"),
        ("- uses: actions/checkout@" + "a" * 40 + " # v6", "has no comment with its release"),
        ("- uses: docker://alpine:3", "is not pinned by the full hash"),
        ("- uses: a/b@" + "a" * 40 + " # v1.2.4", "a/b has another pin elsewhere"),
    ],
)
def test_an_action_that_can_change_is_found(line: str, text: str) -> None:
    good = "steps:\n  - uses: a/b@" + "a" * 40 + " # v1.2.3\n  - uses: ./.github/workflows/x.yml\n"
    assert pins.problems({"good.yml": good})[1] == []
    (problem,) = pins.problems({"good.yml": good, "bad.yml": f"steps:\n  {line}\n"})[1]
    assert problem.startswith("bad.yml: ")
    assert text in problem


# -- what a person types --------------------------------------------------------------------------


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_every_step_of_a_workflow_is_a_script(workflow: Path) -> None:
    text = workflow.read_text()
    inline = re.findall(r"^ *(?:- )?run: (?!\|)(.+)$", text, re.MULTILINE)
    blocks = re.findall(r"^( *)(?:- )?run: \|\n((?:\1 +.*\n)+)", text, re.MULTILINE)
    lines = inline + [line.strip() for _, block in blocks for line in block.splitlines()]
    for line in lines:
        if line.startswith("echo "):
            continue
        called = re.search(r"(?:^|\(| )(?:\./)?(ci/[\w.]+)", line)
        assert called is not None, line
        assert (ROOT / called[1]).is_file(), line
        # An expression inside a script would be text that somebody else may have chosen.
        assert "${{" not in line
    for needed in ("permissions: {}", "concurrency:"):
        assert needed in text
    jobs = text[text.index("\njobs:") :]
    assert jobs.count("timeout-minutes:") == jobs.count("runs-on:")


# -- times ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "warns"), [("0", True), ("100", False), ("", False)])
def test_a_script_says_what_each_step_took(budget: str, warns: bool) -> None:
    """Also where a command fails."""
    script = (
        f"set -euo pipefail; STEPS=2; . ci/common.sh; trap 'print_step_times {budget}' EXIT\n"
        "step one; SECONDS=7; step 'two, or less'; false"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    times = done.stdout.partition("== seconds\n")[2].splitlines()
    rows = dict(reversed(line.strip().split(" s  ")) for line in times[:3])
    assert [*rows] == ["one", "two, or less", "in all"]
    assert int(rows["one"]) == 7 <= int(rows["in all"])
    assert times[3:] == (
        ["warning: these are more than 0 s. Fix: see which step and which tests became slower"]
        if warns
        else []
    )


def test_the_times_of_tests_are_summed_by_folder_and_file() -> None:
    def report(file: str, when: str, seconds: float) -> pytest.TestReport:
        location = (file, 0, "test")
        return pytest.TestReport(
            f"tests/{file}::test[a::b]", location, {}, "passed", None, when, duration=seconds
        )

    reports = [
        report("unit/a/test_one.py", "setup", 0.5),
        report("unit/a/test_one.py", "call", 2),
        report("unit/a/test_two.py", "setup", 0.25),
        report("build/test_one.py", "setup", 4),
        report("build/test_one.py", "setup", 1),
    ]
    assert [" ".join(line.split()) for line in run_times.lines(reports)] == [
        "7.8 s in all",
        "5.0 s tests/build (2 tests)",
        "2.8 s tests/unit/a (2 tests)",
        "the longest files:",
        "5.0 s tests/build/test_one.py",
        "2.5 s tests/unit/a/test_one.py",
        "0.2 s tests/unit/a/test_two.py",
    ]


# -- images ---------------------------------------------------------------------------------------


@pytest.fixture
def entrypoint(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs docker/entrypoint.sh with a ``precast`` that says what it was asked."""
    stub = tmp_path / "precast"
    stub.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *missing*) exit 1 ;; esac\n')
    stub.chmod(0o755)

    def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path}:/usr/bin:/bin"
        argv = ["sh", str(ROOT / "docker" / "entrypoint.sh"), *words]
        return subprocess.run(argv, capture_output=True, text=True, env={"PATH": path, **env})

    return run


def test_a_container_starts_only_where_every_kernel_is_there(
    entrypoint: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = entrypoint("echo", "a b")
    assert (done.returncode, done.stdout, done.stderr) == (0, "a b\n", "doctor --profile core\n")
    done = entrypoint("echo", "started", PRECAST_DOCTOR_PROFILE="missing")
    assert (done.returncode, done.stdout) == (1, "")
    done = entrypoint("echo", "started", PRECAST_DOCTOR_PROFILE="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


def test_the_runtime_image_cannot_compile_and_has_an_unprivileged_user() -> None:
    text = (ROOT / "docker" / "runtime.Dockerfile").read_text()
    assert "PRECAST_JIT=error" in text
    assert "--network=none" in text
    assert "apt-get" not in text
    assert text.index("\nUSER 10001") < text.index("\nENTRYPOINT")
    assert "doctor --profile" in text[text.index("\nHEALTHCHECK") :]
