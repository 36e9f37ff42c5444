# SPDX-License-Identifier: Apache-2.0
"""precast install: what it chooses for a machine, what it runs, and when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig

import pytest
from cli_support import PACKAGES, run
from small_wheels import ALONE, PLAN, core_plan, make_provider, make_wheel

import precast
from precast._plan.installed import plan
from precast.cli import _environment, _fit, _installer, _machine, install, main
from precast.cli._gpus import Gpu
from precast.cli._output import UnableError

VERSION = precast.__version__
ALL = tuple(plan().config.ops)


class Box:
    """A machine: its GPUs and torch; the driver and the providers are those of ``world``."""

    def __init__(self, world, patch, capsys) -> None:
        self.world, self.patch, self.capsys = world, patch, capsys
        self.ran: list[list[str]] = []
        self.gpus("9.0")
        self.torch("2.11.0+cu130", "13.0")
        world.driver = (13, 0)
        world.specs = lambda *archs, ops=ALL, major=13: type(world).specs(
            world, *archs, ops=ops, major=major
        )
        world.loader()
        patch.setattr(_installer, "execute", lambda command: self.ran.append([*command]))
        patch.setattr(_installer, "find_installer", lambda: (["pip", "install"], "pip"))
        patch.setattr(_installer, "installed_version", lambda name: None)
        patch.setattr(_fit, "platform_problem", lambda any_libc=False: None)

    def gpus(self, *capabilities: str, problem: str | None = None) -> None:
        found = [Gpu(i, f"GPU {c}", c, 10**9) for i, c in enumerate(capabilities)]
        self.patch.setattr(install, "find_gpus", lambda: (found, problem))

    def torch(self, version: str | None, cuda: str | None) -> None:
        row = {"name": "torch", "version": version, "cuda": cuda, "text": str(version)}
        self.patch.setattr(_environment, "torch", lambda has_gpu: dict(row))

    def install(self, *words: str) -> tuple[int, dict]:
        code = main(["install", "--json", *words])
        captured = self.capsys.readouterr()
        self.err = captured.err
        report = json.loads(captured.out)
        if "error" in report:  # It says the same as the text.
            assert report["exit_code"] == code
            report = {}
        return code, report


@pytest.fixture
def box(world, monkeypatch, capsys) -> Box:
    return Box(world, monkeypatch, capsys)


# -- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "driver", "torch", "extra"),
    [
        ("9.0", (13, 0), "13.0", "cu13-sm90a"),
        ("9.0", (13, 1), "12.8", "cu12-sm90a"),  # torch's own major, though the driver runs more
        ("9.0", (12, 4), "12.4", "cu12-sm90a"),
        ("9.0", (12, 4), "13.0", "cu12-sm90a"),  # what the driver runs decides
        ("9.0", (14, 0), "14.0", "cu13-sm90a"),  # a major of tomorrow: its driver runs ours
        ("9.0", (13, 0), None, "cu13-sm90a"),
        ("9.0", None, "12.8", "cu12-sm90a"),  # an image build: no driver
        ("9.0", None, None, "cu13-sm90a"),
        ("8.0", (13, 0), "13.0", "cu13-sm80"),
        ("8.7", (13, 0), "13.0", "cu13-sm86"),
        ("8.9", (13, 0), "13.0", "cu13-sm89"),
        ("10.3", (13, 0), "12.8", "cu12-sm100f"),
        ("12.1", (13, 0), "13.0", "cu13-sm120f"),
        ("11.0", (13, 0), "12.8", "cu13-sm110a"),  # there is no CUDA 12 for it
    ],
)
def test_the_gpu_decides_the_target_and_driver_and_torch_the_cuda_major(
    box, capability, driver, torch, extra
):
    box.gpus(capability)
    box.world.driver = driver
    box.torch("2.11.0", torch)
    code, report = box.install("--dry-run")
    assert (code, report["status"], report["extras"]) == (0, "planned", [extra])
    assert report["commands"] == [
        ["pip", "install", f"precast[{extra}]=={VERSION}", "torch==2.11.0"]
    ]
    assert box.ran == []


def test_every_extra_that_can_be_chosen_is_in_the_metadata_of_the_core_wheel(monkeypatch):
    from precast._plan.installed import plan
    from precast._plan.places import checkout_root

    root = checkout_root()
    monkeypatch.syspath_prepend(root / "python" / "precast_jit_cache")
    import precast_metadata

    settings = precast_metadata._core_settings()
    extras = precast_metadata.Core().dynamic_metadata(settings, {})["optional-dependencies"]
    machines = [_fit.Machine((major, 9), None) for major in plan().build.cuda]
    for arch in plan().build.archs.values():
        for machine in machines:
            if not _fit.suitable_majors(machine, arch.cuda[0]):
                continue
            for capability in arch.serves:
                for choice in _fit.choices(capability, machine):
                    assert extras[choice.extra] == [f"{choice.distribution}=={VERSION}"]


def test_several_gpus_of_two_kinds_are_one_command_with_two_extras(box):
    box.gpus("9.0", "8.0", "9.0")
    code, report = box.install("--dry-run")
    assert (code, report["extras"]) == (0, ["cu13-sm90a", "cu13-sm80"])
    (command,) = report["commands"]
    assert command[2] == f"precast[cu13-sm90a,cu13-sm80]=={VERSION}"
    reasons = {row["found"]: row["follows"] for row in report["reasons"] if row["what"] == "GPU"}
    assert "target sm90a" in reasons["cuda:0 (GPU 9.0, 9.0), cuda:2 (GPU 9.0, 9.0)"]
    assert "target sm80" in reasons["cuda:1 (GPU 8.0, 8.0)"]


def test_a_gpu_that_nothing_is_built_for_is_a_note_beside_one_that_is_served(box):
    box.gpus("7.0", "9.0")
    code, report = box.install("--dry-run")
    assert (code, report["extras"]) == (0, ["cu13-sm90a"])
    assert "no modules are built for compute capability 7.0" in report["notes"][0]


def test_the_options_override_what_is_here(box):
    box.gpus("9.0")
    box.world.driver = (12, 4)
    # With both, another machine is meant, and this driver is not asked.
    code, report = box.install("--arch", "8.0 sm120f", "--cuda", "13", "--dry-run")
    assert (code, report["extras"]) == (0, ["cu13-sm80", "cu13-sm120f"])
    code, report = box.install("--arch", "8.0", "--dry-run")
    assert (code, report["extras"]) == (0, ["cu12-sm80"])


def test_where_to_look_for_wheels_is_handed_on(box):
    _, report = box.install("--find-links", "a", "--find-links", "b", "--no-index", "--dry-run")
    assert report["commands"][0][2:5] == ["--find-links=a", "--find-links=b", "--no-index"]


def test_a_torch_that_the_driver_cannot_run_is_noted(box):
    box.world.driver = (12, 4)
    _, report = box.install("--dry-run")
    assert any("torch cannot use the GPU. Fix: update the driver" in n for n in report["notes"])


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "driver", "words", "code", "message"),
    [
        (["7.5"], (13, 0), [], 3, "no modules are built for compute capability 7.5; precast"),
        (["13.0"], (13, 0), [], 3, "knows 8.0, 8.6, 8.7, 8.9, 9.0, 10.0"),
        (["9.0"], (11, 8), [], 3, "sm90a need driver >= 525 (CUDA 12); this driver runs CUDA 11.8"),
        (["11.0"], (12, 6), [], 3, "modules for sm110a need driver >= 580 (CUDA 13)"),
        (["9.0"], (12, 4), ["--cuda", "13"], 3, "--cuda 13 needs driver >= 580; this driver runs "
         "CUDA 12.4. Fix: update the driver, or: precast install --cuda 12"),
        (["9.0"], (13, 0), ["--cuda", "11"], 2, "legal: 12, 13. Fix: precast install --cuda 13"),
        (["11.0"], (13, 0), ["--cuda", "12"], 2, "no such modules exist for sm110a; legal: 13"),
        (["9.0"], (13, 0), ["--no-index"], 2, "--find-links has no source of wheels. Fix: add"),
    ],
)  # fmt: skip
def test_where_no_modules_can_be_it_says_why_and_what_to_do(
    box, gpus, driver, words, code, message
):
    box.gpus(*gpus)
    box.world.driver = driver
    for more in ([], ["--dry-run"]):
        assert box.install(*words, *more) == (code, {})
        assert message in box.err
        assert "Fix: " in box.err
    assert box.ran == []


def test_without_a_gpu_it_asks_for_the_option(box):
    box.gpus(problem="no NVIDIA driver (libcuda.so.1 was not found)")
    assert box.install() == (2, {})
    assert "error: no NVIDIA driver" in box.err
    assert "precast install --arch 9.0" in box.err


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (
            None,
            "torch is not installed, and precast does not choose a build of it. Fix: pip",
        ),
        ("2.4.1", "torch 2.4.1 is installed, precast needs >=2.10"),
    ],
)
def test_it_never_brings_another_torch(box, version, message):
    box.torch(version, None)
    box.patch.setattr(_installer, "_own_requirements", lambda: ["filelock", "torch>=2.10"])
    assert box.install() == (3, {})
    assert message in box.err
    assert box.ran == []


def test_machines_that_no_wheel_is_made_for(monkeypatch):
    import packaging.tags

    _fit.platform_problem.cache_clear()
    assert _fit.platform_problem() is None or "glibc" in str(_fit.platform_problem())
    for patch, message in (
        (
            ("platform.machine", lambda: "riscv64"),
            "no wheels are made for riscv64, only for x86_64",
        ),
        (("sys.platform", "darwin"), "modules are built for Linux, this is darwin"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(*patch)
            _fit.platform_problem.cache_clear()
            assert message in str(_fit.platform_problem())
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(packaging.tags, "platform_tags", lambda: iter(["manylinux_2_17_x86_64"]))
    monkeypatch.setattr(_machine, "libc", lambda: "glibc 2.17")
    _fit.platform_problem.cache_clear()
    problem = str(_fit.platform_problem())
    assert "wheels are made for manylinux_2_28_x86_64, this machine has glibc 2.17. Fix:" in problem
    assert _fit.platform_problem(any_libc=True) is None  # own wheels may be made for less
    _fit.platform_problem.cache_clear()


# -- what is there already ------------------------------------------------------------------------


def test_what_is_installed_and_fits_is_left_alone(box):
    box.world.install("precast-jit-cache-cu13-sm90a", "sm90a")
    box.world.loader()
    code, report = box.install()
    assert (code, report["status"], report["commands"]) == (0, "fits", [])
    assert box.ran == []
    assert main(["install"]) == 0
    assert "nothing to do: cu13-sm90a is installed and fits" in box.capsys.readouterr().out
    # Another CUDA major is another wish.
    _, report = box.install("--cuda", "12", "--dry-run")
    assert report["extras"] == ["cu12-sm90a"]
    assert report["commands"]


def test_code_for_an_older_target_does_not_stand_in_for_the_nearest(box):
    box.gpus("8.6")
    box.world.install("precast-jit-cache-cu13-sm80", "sm80")
    box.world.loader()
    _, report = box.install("--dry-run")
    assert (report["status"], report["extras"]) == ("planned", ["cu13-sm86"])


def test_only_what_is_missing_is_installed(box):
    box.gpus("9.0", "8.0")
    box.world.install("precast-jit-cache-cu13-sm80", "sm80")
    box.world.loader()
    _, report = box.install("--dry-run")
    assert report["extras"] == ["cu13-sm90a", "cu13-sm80"]
    assert [command[2] for command in report["commands"]] == [f"precast[cu13-sm90a]=={VERSION}"]


def test_a_damaged_provider_of_this_version_is_installed_again_without_torch(box):
    box.patch.setattr(_installer, "installed_version", lambda name: VERSION)
    _, report = box.install("--dry-run")
    first, second = report["commands"]
    assert first[2:] == [f"precast[cu13-sm90a]=={VERSION}", "torch==2.11.0+cu130"]
    assert second[2:] == [
        "--force-reinstall",
        "--no-deps",
        f"precast-jit-cache-cu13-sm90a=={VERSION}",
    ]


def test_after_a_run_it_looks_whether_everything_is_there(box):
    def provide(command):
        box.world.provide("new", "sm90a")

    box.patch.setattr(_installer, "execute", provide)
    code, report = box.install()
    assert (code, report["status"]) == (0, "installed")


def test_an_installer_that_is_content_and_brings_nothing_is_a_failed_check(box):
    code, report = box.install()
    assert (code, report["status"]) == (1, "incomplete")
    assert len(box.ran) == 1
    assert "modules are still not prebuilt" in box.err
    assert "Fix: precast doctor --profile core --arch 9.0" in box.err


# -- pip and uv -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pip", "uv", "by_uv", "name"),
    [
        (True, None, False, "pip"),
        (True, "/bin/uv", False, "pip"),
        (True, "/bin/uv", True, "uv"),
        (True, None, True, "pip"),
        (False, "/bin/uv", False, "uv"),
        (False, "/bin/uv", True, "uv"),
    ],
)
def test_pip_or_uv(monkeypatch, pip, uv, by_uv, name):
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setattr("shutil.which", lambda word: uv)
    monkeypatch.setattr("importlib.util.find_spec", lambda word: object() if pip else None)
    monkeypatch.setattr(_machine, "made_by_uv", lambda: by_uv)
    command, found = _installer.find_installer()
    assert found == name
    if name == "pip":
        assert command == [sys.executable, "-m", "pip", "install"]
    else:
        assert command == ["/bin/uv", "pip", "install", f"--python={sys.executable}"]


def test_neither_pip_nor_uv(monkeypatch):
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setattr("shutil.which", lambda word: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda word: None)
    with pytest.raises(UnableError, match=r"has no pip, and there is no uv. Fix: .* -m ensurepip"):
        _installer.find_installer()


def test_an_environment_of_uv_is_known_by_its_configuration(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert not _machine.made_by_uv()
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.9.1\n")
    assert _machine.made_by_uv()


def test_a_command_is_shown_as_it_can_be_typed():
    command = ["pip", "install", "--find-links=a b", "precast[cu13-sm90a]==1", "torch==2+cu130"]
    assert _installer.shown(command) == (
        """pip install '--find-links=a b' "precast[cu13-sm90a]==1" "torch==2+cu130\""""
    )


def test_what_the_installer_says_goes_to_standard_error(tmp_path):
    package = tmp_path / "pip"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("print('no matching distribution'); raise SystemExit(1)")
    done = run(
        "install", "--arch", "9.0", "--json",
        PYTHONPATH=os.pathsep.join([str(tmp_path), PACKAGES]), PATH="", UV="",
        PRECAST_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 3
    assert json.loads(done.stdout)["exit_code"] == 3  # and nothing of the installer
    assert "no matching distribution\n" in done.stderr
    assert "Fix: precast install --find-links DIR" in done.stderr


def test_a_real_pip_installs_the_provider_and_keeps_torch(tmp_path):
    # An environment of its own that also sees the packages of this one, as a container layer does.
    site = sysconfig.get_path("purelib")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    (own,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (own / "outer.pth").write_text(f"{PACKAGES}\n{site}\n")
    dist = tmp_path / "dist"
    make_wheel(
        dist,
        "precast",
        VERSION,
        (f'precast-jit-cache-cu13-sm90a=={VERSION}; extra == "cu13-sm90a"', "torch"),
        files={PLAN: json.dumps(core_plan())},
        metadata="Provides-Extra: cu13-sm90a\n",
    )
    make_wheel(dist, "nvidia_cuda_runtime", "13.0")
    make_wheel(dist, "apache_tvm_ffi", "0.1.15")
    make_wheel(dist, "torch", "99.0")  # not requested
    tag = f"py3-none-linux_{os.uname().machine}"
    make_provider(dist, tmp_path, tag=tag)
    env = {"PATH": os.environ["PATH"], "PRECAST_CACHE_DIR": str(tmp_path / "cache"), **ALONE}
    words = ["install", "--arch", "9.0", "--cuda", "13", "--no-index", "--find-links", str(dist)]

    def call(*more: str) -> subprocess.CompletedProcess[str]:
        command = [python, "-m", "precast", *words, *more]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)

    done = call("--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "installed"
    assert (own / "precast_jit_cache_cu13_sm90a" / "manifest.json").is_file()
    assert not (own / "torch-99.0.dist-info").exists()
    again = call()
    assert again.returncode == 0
    assert "nothing to do: cu13-sm90a is installed and fits" in again.stdout
