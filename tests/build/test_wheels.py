# SPDX-License-Identifier: Apache-2.0
"""The distributions: what is in them, that checks reject bad ones, that they live side by side."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from build_support import ARCHS, PACKAGE, PLAN, PROFILE, ROOT, Built, run
from ci_support import script
from wheel_support import respoil

import precast
from precast._plan.planner import Plan
from precast._runtime.manifest import MANIFEST_NAME, read_manifest

check_wheel = script("check_wheel")
make_provider = script("make_provider")


def _metadata(wheel: Path, name: str = "METADATA") -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [n for n in archive.namelist() if n.endswith(f".dist-info/{name}")]
        return archive.read(path)


def _headers(wheel: Path) -> Message:
    return message_from_bytes(_metadata(wheel))


def test_core_wheel(core: Path) -> None:
    assert core.name == f"precast-{precast.__version__}-py3-none-any.whl"
    assert check_wheel.check_wheel(core, PLAN, PROFILE) == []
    headers = _headers(core)
    assert headers["License-Expression"] == "Apache-2.0"
    requires = headers.get_all("Requires-Dist")
    assert requires is not None
    low, high = PLAN.build.tvm_ffi_min, PLAN.build.tvm_ffi_max_exclusive
    assert f"apache-tvm-ffi<{high},>={low}" in requires
    extras = set(headers.get_all("Provides-Extra") or ())
    assert {"jit", "cli", "build", "test", "dev"} <= extras
    for arch in PLAN.build.archs.values():
        for major in PLAN.build.cuda:
            name = f"cu{major}-{arch.name}"
            wanted = f'precast-jit-cache-{name}=={precast.__version__}; extra == "{name}"'
            assert (wanted in requires) == (arch.cuda[0] <= major)
    assert b"precast = precast.cli:main" in _metadata(core, "entry_points.txt")


def test_core_wheel_works_alone(core: Path, tmp_path: Path) -> None:
    """Unpacked, without the checkout: it knows its plan and finds its sources."""
    with zipfile.ZipFile(core) as archive:
        archive.extractall(tmp_path)
    code = (
        "import json, precast, precast._runtime.loader as l\n"
        "from precast._plan.planner import Plan\n"
        "from precast._plan.places import source_root\n"
        "assert l.loader.document == json.loads(json.dumps(Plan.load(source_root()).document))\n"
        "print(source_root())"
    )
    out = run([sys.executable, "-c", code], {"PYTHONPATH": str(tmp_path)})
    assert out.strip() == str(tmp_path / "precast" / "data")


@pytest.mark.parametrize("kind", ["modules", "sm80"])
def test_modules_wheel(kind: str, small_plan: Plan, request: pytest.FixtureRequest) -> None:
    wheel: Path = request.getfixturevalue(kind)
    suffix = "" if kind == "modules" else "-cu13-sm80"
    package = f"precast_jit_cache{suffix}".replace("-", "_")
    machine = os.uname().machine
    assert wheel.name == f"{package}-{precast.__version__}-py3-none-linux_{machine}.whl"
    assert check_wheel.check_wheel(wheel, small_plan, PROFILE) == []
    headers = _headers(wheel)
    assert headers["Name"] == f"precast-jit-cache{suffix}"
    requires = headers.get_all("Requires-Dist")
    assert requires is not None
    assert "nvidia-cuda-runtime==13.*" in requires
    assert any(r.startswith("apache-tvm-ffi") for r in requires)
    assert headers.get_all("License-File") == ["LICENSE"]
    entry = _metadata(wheel, "entry_points.txt").decode()
    assert entry.split() == ["[precast.jit_cache]", package, "=", package]


def test_a_wheel_of_all_modules_passes(built: Built, tmp_path: Path) -> None:
    """The wheels of the tests are small; here is every module that the profile ``ci`` has."""
    name = f"{PACKAGE}-{precast.__version__}-py3-none-linux_{os.uname().machine}.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        for path in built.provider.rglob("*"):
            wheel.write(path, path.relative_to(built.provider.parent))
    assert check_wheel.check_wheel(tmp_path / name, PLAN, PROFILE) == []


def test_public_checkers_accept_all(core: Path, modules: Path, sm80: Path) -> None:
    wheels = [core, modules, sm80]
    run(["check-wheel-contents", *wheels])
    run([sys.executable, "-m", "twine", "check", "--strict", *wheels])


def test_there_is_no_sdist_of_modules(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", tmp_path]
    out = run([*argv, ROOT / "python" / "precast_jit_cache"], fails=True)
    assert "there is no sdist of prebuilt modules" in out


def test_checks_reject_spoilt_wheels(
    core: Path,
    modules: Path,
    sm80: Path,
    small_plan: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def problems(wheel: Path, name: str, data: bytes | None, profile: str = PROFILE) -> str:
        spoilt = respoil(wheel, tmp_path, name, data)
        plan = PLAN if wheel == core else small_plan
        return "\n".join(check_wheel.check_wheel(spoilt, plan, profile))

    module = "sm90a/scale__dtype_f32.so"
    with zipfile.ZipFile(sm80) as archive:
        foreign = archive.read("precast_jit_cache_cu13_sm80/sm80/scale__dtype_f32.so")
    out = problems(modules, module, foreign)
    assert f"{module}: size or sha256 is not that of the manifest" in out
    assert f"{module}: has machine code for sm_80; planned: sm_90a" in out
    assert f"{module}: missing" in problems(modules, module, None)
    with zipfile.ZipFile(modules) as archive:
        archive.extractall(tmp_path / "modules")
    manifest = read_manifest(tmp_path / "modules" / PACKAGE)
    few = manifest._replace(modules=manifest.modules[1:])
    out = problems(modules, MANIFEST_NAME, few.dump().encode())
    assert f"{manifest.modules[0].name}.so: planned for ci, but missing" in out
    assert f"{manifest.modules[0].name}.so: not planned" in out
    assert "planned for core, but missing" in problems(modules, "LICENSE", b"", "core")
    assert "is not the plan of this checkout" in problems(core, "data/plan.json", b"{}")
    source = "csrc/elementwise/scale.cu"
    assert f"{source} is missing or differs" in problems(core, source, b"")
    out = problems(sm80, MANIFEST_NAME, few.dump().encode())
    assert "sm80/scale__dtype_f32.so: planned for ci, but missing" in out
    name = "sm80/scale__dtype_f32.so"
    (tmp_path / "copied.so").write_bytes(foreign)
    run(["patchelf", "--remove-needed", check_wheel.LIBSTDCXX, tmp_path / "copied.so"])
    out = problems(sm80, name, (tmp_path / "copied.so").read_bytes())
    assert f"{name}: does not need libstdc++.so.6, so it has a copy of it" in out
    monkeypatch.setattr(check_wheel, "TARGET_BYTES", 1000)
    assert "the budget of one target is 1000" in problems(sm80, "LICENSE", b"", "core")
    assert "the budget of one target" not in problems(sm80, "LICENSE", b"")
    newest = check_wheel.check_wheel(modules, small_plan, PROFILE, max_glibc="2.2")
    assert any("the newest allowed is 2.2" in line for line in newest)


def test_unknown_targets_are_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["--cuda", "13", "--arch", "sm75"], "no target of precast serves compute capability 7.5"),
        (["--cuda", "12", "--arch", "sm110a"], "sm110a needs CUDA >= 13.0"),
        (["--cuda", "11", "--arch", "sm80"], "CUDA 11 is not supported; legal: 12, 13"),
    ):
        with pytest.raises(SystemExit):
            make_provider.main([*words, "-o", str(tmp_path / "out")])
        assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- side by side ---------------------------------------------------------------------------------


def _stand_in(like: Path, name: str, arch: str, folder: Path) -> Path:
    """A wheel with the files of a real one under another name, and small modules."""
    package, old = name.replace("-", "_"), like.name.split("-")[0]
    wheel = folder / like.name.replace(old, package)
    with zipfile.ZipFile(like) as real, zipfile.ZipFile(wheel, "w") as new:
        for item in real.namelist():
            if item.endswith("RECORD"):
                continue
            data = real.read(item)
            if item.endswith(".so"):
                data = b"stand-in"
            elif item.endswith(MANIFEST_NAME):
                data = json.dumps(
                    {**json.loads(data), "distribution": name, "modules": []}
                ).encode()
            elif item.endswith(("METADATA", "entry_points.txt")):
                data = data.replace(old.replace("_", "-").encode(), name.encode())
                data = data.replace(old.encode(), package.encode())
            new.writestr(item.replace(old, package).replace("/sm80/", f"/{arch}/"), data)
        names = [*new.namelist(), f"{package}-{precast.__version__}.dist-info/RECORD"]
        new.writestr(names[-1], "".join(f"{item},,\n" for item in names))
    return wheel


def test_providers_come_and_go_in_any_order(sm80: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    inside = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(inside), "-q"]
    wheels = {"precast-jit-cache-cu13-sm80": sm80}
    for name, arch in (("precast-jit-cache-cu13-sm90a", "sm90a"), ("precast-jit-cache", "sm89")):
        wheels[name] = _stand_in(sm80, name, arch, tmp_path)
    (site,) = environment.glob("lib/python*/site-packages")

    def installed() -> dict[str, str]:
        code = (
            "from precast._runtime.providers import find_providers\n"
            "for p in find_providers(): print(p.manifest.distribution, p.root)"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        done = subprocess.run([inside, "-c", code], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return dict(line.split(" ", 1) for line in done.stdout.splitlines())

    def contents() -> dict[str, set[str]]:
        return {
            name: {str(p) for p in (site / name.replace("-", "_")).rglob("*") if p.is_file()}
            for name in wheels
        }

    everything: dict[str, set[str]] = {}
    names = list(wheels)
    # Each comes and goes once as the first, once in between, once as the last.
    for order in (names, [*names[1:], names[0]], [names[2], *names[:2]]):
        for name in order:
            run([*pip, "install", "--no-deps", "--no-index", "--no-compile", wheels[name]])
        assert set(installed()) == set(wheels)
        everything = everything or contents()
        assert contents() == everything
        assert all(everything.values())
        left = set(wheels)
        for name in order[1:]:
            run([*pip, "uninstall", "-y", name])
            left.remove(name)
            assert set(installed()) == left
            assert contents() == {n: everything[n] if n in left else set() for n in wheels}
        run([*pip, "uninstall", "-y", order[0]])
        assert installed() == {}
        assert not list(site.glob("precast_jit_cache*"))


def test_template_has_no_target_of_its_own() -> None:
    text = (ROOT / "python" / "precast_jit_cache" / "pyproject.toml").read_text()
    assert ARCHS not in text
    assert shutil.which("check-wheel-contents")
