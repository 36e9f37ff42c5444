# SPDX-License-Identifier: Apache-2.0
"""precast bundle: what goes into it, what is rejected, and that it installs without a network."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_support import core_specs, run
from packaging.requirements import Requirement
from small_wheels import (
    ALONE,
    core_plan,
    make_core,
    make_provider,
    make_wheel,
    read_wheel,
    write_wheel,
)

from precast.bundle import Target, _contents, make_bundle
from precast.bundle._closure import Pip, close
from precast.bundle._wheel import Wheel
from precast.errors import BundleError
from precast.shim import shim_version

Change = Callable[[dict[str, bytes]], dict[str, bytes]]

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def write_dist(folder: Path) -> Path:
    """A folder of wheels that stands for the index: core, provider, and what they need."""
    dist = folder / "dist"
    make_core(dist)
    make_provider(dist, folder)
    for version in ("0.1.14", "0.1.15", "0.1.16", "0.1.17", "0.2.0"):
        make_wheel(dist, "apache_tvm_ffi", version, ("typing-extensions>=4",))
    for version in ("12.9", "13.0", "13.4", "14.0"):
        make_wheel(dist, "nvidia_cuda_runtime", version, tag="py3-none-manylinux2014_x86_64")
    make_wheel(dist, "typing_extensions", "4.16.0")
    make_wheel(dist, "old_only", "1.0")
    make_wheel(dist, "new_only", "1.0")
    make_wheel(dist, "compiler", "1.3", ('hammer; extra == "tool"', 'saw; extra == "other"'))
    make_wheel(dist, "hammer", "1.0")
    make_wheel(dist, "saw", "1.0")
    make_wheel(dist, "torch", "2.11.0", ("nvidia-cuda-runtime==13.0",))
    make_wheel(dist, "torch", "2.13.0", ("nvidia-cuda-runtime==13.4",))
    return dist


@pytest.fixture
def dist(tmp_path):
    return write_dist(tmp_path)


def bundle(dist: Path, out: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return run(
        "bundle", "-o", str(out), "--arch", "9.0a", "--python", "3.12", "--platform",
        "manylinux_2_28_x86_64", "--no-index", "--find-links", str(dist), *argv, **ALONE,
    )  # fmt: skip


def pins(out: Path) -> dict[str, str]:
    lines = (out / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines)


# -- contents -------------------------------------------------------------------------------------


def test_the_closure_is_that_of_the_target_and_leaves_torch_out(dist, tmp_path):
    out = tmp_path / "bundle"
    done = bundle(dist, out, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    expected = {
        "precast": "0.1.0",
        "precast-jit-cache-cu13-sm90a": "0.1.0",
        "apache-tvm-ffi": "0.1.16",  # The provider's range, narrower than the core's.
        "nvidia-cuda-runtime": "13.4",
        "typing-extensions": "4.16.0",
        "new-only": "1.0",  # 3.12 is the target, whatever Python runs this.
    }
    assert pins(out) == expected
    assert {w["name"]: w["version"] for w in report["wheels"]} == expected
    assert report["assumed"] == "torch>=2.9"
    assert report["notes"] == []
    files = {p.name for p in (out / "wheels").iterdir()}
    assert files == {Path(w["file"]).name for w in report["wheels"]}
    requirements = (out / "requirements.txt").read_text().split()
    assert requirements == ["precast==0.1.0", "precast-jit-cache-cu13-sm90a==0.1.0"]


def test_the_package_for_an_engine_is_one_of_the_wheels(dist, tmp_path):
    out = tmp_path / "bundle"
    done = bundle(dist, out, "--shim", "sglang")
    assert done.returncode == 0, done.stderr
    assert pins(out)["flashinfer-python"] == shim_version("sglang")
    assert f"flashinfer-python=={shim_version('sglang')}" in (out / "requirements.txt").read_text()
    assert [*(out / "wheels").glob("flashinfer_python-0.7.2+precast.*-py3-none-any.whl")]


def test_every_file_has_its_digest(dist, tmp_path):
    out = tmp_path / "bundle"
    assert bundle(dist, out).returncode == 0
    lines = (out / "SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split("  ")) for line in lines)
    there = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert set(sums) == there - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    readme = (out / "README.md").read_text()
    assert "Python 3.12 on manylinux_2_28_x86_64. `torch>=2.9` must be installed" in readme
    assert "| apache-tvm-ffi | 0.1.16 |" in readme


def test_torch_is_carried_where_asked_and_decides_what_it_shares(dist, tmp_path):
    done = bundle(dist, tmp_path / "newest", "--with-torch")
    assert done.returncode == 0, done.stderr
    assert pins(tmp_path / "newest")["torch"] == "2.13.0"
    done = bundle(dist, tmp_path / "b", "--with-torch", "torch==2.11.0")
    assert done.returncode == 0, done.stderr
    assert pins(tmp_path / "b")["torch"] == "2.11.0"
    # First 13.4 was taken for the provider; torch wants exactly 13.0, which suits both.
    assert pins(tmp_path / "b")["nvidia-cuda-runtime"] == "13.0"
    assert len(list((tmp_path / "b" / "wheels").glob("nvidia_cuda_runtime-*"))) == 1
    assert "torch" not in (tmp_path / "b" / "install.sh").read_text()
    rejected = bundle(dist, tmp_path / "c", "--with-torch", "pytorch")
    assert rejected.returncode == 3
    assert "'pytorch' is not a requirement of torch" in rejected.stderr


def test_an_extra_brings_what_it_names(dist, tmp_path):
    done = bundle(dist, tmp_path / "b", "--extra", "jit")
    assert done.returncode == 0, done.stderr
    assert {"compiler", "hammer"} <= set(pins(tmp_path / "b"))
    assert "saw" not in pins(tmp_path / "b")
    assert (tmp_path / "b" / "requirements.txt").read_text().startswith("precast[jit]==0.1.0\n")
    wrong = bundle(dist, tmp_path / "c", "--extra", "jti")
    assert wrong.returncode == 3
    assert "precast 0.1.0 has no extra 'jti'; legal: cu13-sm90a, jit" in wrong.stderr


def test_a_target_without_a_local_wheel_comes_by_its_extra(dist, tmp_path):
    (wheel,) = dist.glob("precast_jit_cache*")
    elsewhere = tmp_path / "index"
    elsewhere.mkdir()
    wheel.rename(elsewhere / wheel.name)
    # As an address it is only a place to fetch from; what lies there is not taken as given.
    done = bundle(dist, tmp_path / "b", "--find-links", f"file://{elsewhere}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "b" / "requirements.txt").read_text() == "precast[cu13-sm90a]==0.1.0\n"
    assert "precast-jit-cache-cu13-sm90a" in pins(tmp_path / "b")


def test_a_named_wheel_wins_over_a_newer_one(dist, tmp_path):
    named = make_wheel(tmp_path / "mine", "apache_tvm_ffi", "0.1.15")
    done = bundle(dist, tmp_path / "b", "--wheel", str(named))
    assert done.returncode == 0, done.stderr
    assert pins(tmp_path / "b")["apache-tvm-ffi"] == "0.1.15"


# -- errors ---------------------------------------------------------------------------------------


def rejected(dist: Path, tmp_path: Path, *argv: str) -> str:
    """The one message of a bundle that is rejected; nothing is left of it."""
    before = set(tmp_path.iterdir())
    done = bundle(dist, tmp_path / "rejected", *argv)
    assert done.returncode == 3, done.stdout
    assert "Traceback" not in done.stderr
    assert set(tmp_path.iterdir()) == before
    return done.stderr.partition("error: ")[2]


def test_a_provider_of_other_sources_is_rejected(dist, tmp_path):
    plan = core_plan()
    plan["modules"]["norm__dtype_bf16"]["fingerprints"]["cu13"]["sm90a"] = "0" * 64
    make_core(dist, plan)
    message = rejected(dist, tmp_path)
    assert "1 modules for sm90a (such as norm__dtype_bf16) were built from other sources" in message
    assert "Fix: build core and provider from the same sources" in message


def test_a_target_that_nothing_holds_is_rejected(dist, tmp_path):
    message = rejected(dist, tmp_path, "--arch", "12.0")
    assert "no wheel with prebuilt modules for sm120f (CUDA 13)" in message


def test_a_wheel_for_another_machine_is_rejected(dist, tmp_path):
    (wheel,) = dist.glob("precast_jit_cache*")
    wheel.unlink()
    make_provider(dist, tmp_path, tag="py3-none-manylinux_2_28_aarch64")
    message = rejected(dist, tmp_path)
    assert "is for py3-none-manylinux_2_28_aarch64; the bundle is for Python 3.12 on" in message


def test_a_wheel_for_a_newer_system_is_rejected(dist, tmp_path):
    (wheel,) = dist.glob("precast_jit_cache*")
    wheel.unlink()
    make_provider(dist, tmp_path, tag="py3-none-manylinux_2_34_x86_64")
    assert "is for py3-none-manylinux_2_34_x86_64; the bundle" in rejected(dist, tmp_path)


def test_what_cannot_be_fetched_is_named_with_what_requires_it(dist, tmp_path):
    make_core(dist, requires=("nowhere>=3",))
    message = rejected(dist, tmp_path)
    assert "No matching distribution found for nowhere>=3" in message
    assert "nowhere: precast 0.1.0 (nowhere>=3)" in message


def test_damaged_and_foreign_files_are_rejected(dist, tmp_path):
    (dist / "precast-0.1.1-py3-none-any.whl").write_bytes(b"PK")
    assert "precast-0.1.1-py3-none-any.whl is damaged" in rejected(dist, tmp_path)
    (dist / "precast-0.1.1-py3-none-any.whl").unlink()
    assert "is not a folder of wheels" in rejected(dist, tmp_path, "--find-links", str(dist / "x"))
    assert "none.whl cannot be read" in rejected(
        dist, tmp_path, "--wheel", str(dist / "x-1-py3-none-none.whl")
    )


def test_a_bundle_is_made_in_a_folder_that_nobody_else_can_write(dist, tmp_path, monkeypatch):
    """Even if the folder above is everybody's, and somebody has taken the name."""
    place = tmp_path / "shared"
    place.mkdir(mode=0o777)
    taken = place / f".out.{os.getpid()}"
    (taken / "wheels").mkdir(parents=True)
    modes = []
    download = Pip.download

    def seen(self, wanted):
        modes.append(self.folder.parent.stat().st_mode & 0o777)
        return download(self, wanted)

    monkeypatch.setattr(Pip, "download", seen)
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    made = make_bundle(
        place / "out",
        ["sm90a"],
        Target("3.12", "manylinux_2_28_x86_64"),
        cuda_major=13,
        version="0.1.0",
        local=[Wheel.read(path) for path in dist.glob("precast*.whl")],
        find_links=[str(dist)],
        no_index=True,
    )
    assert set(modes) == {0o700}
    folders = (made.folder, made.folder / "wheels")
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o755}
    assert taken.exists()


def test_a_folder_with_contents_is_left_alone(dist, tmp_path):
    out = tmp_path / "bundle"
    out.mkdir()
    (out / "mine").write_text("precious")
    done = bundle(dist, out)
    assert done.returncode == 3
    assert "exists already and is not empty. Fix: name a new folder" in done.stderr
    assert [p.name for p in out.iterdir()] == ["mine"]


def test_planned_modules_that_are_absent_and_local_tags_are_noted(dist, tmp_path):
    plan = core_plan()
    plan["modules"]["norm__dtype_f64"] = {"fingerprints": {"cu13": {"sm90a": "1" * 64}}}
    make_core(dist, plan)
    (wheel,) = dist.glob("precast_jit_cache*")
    wheel.unlink()
    make_provider(dist, tmp_path, tag="py3-none-linux_x86_64")
    done = bundle(dist, tmp_path / "b")
    assert done.returncode == 0, done.stderr
    total = len(core_specs("sm90a")) + 1
    assert f"Note: 1 of {total} planned modules for sm90a are not in the bundle" in done.stdout
    assert "linux_x86_64.whl is tagged for the machine that it was built on" in done.stdout


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--arch", "9.0x"], 2, "error: --arch: '9.0x' is not a CUDA target; legal: sm80"),
        (["--cuda", "11"], 2, "error: --cuda 11: legal: 12, 13"),
        (["--python", "2.7"], 2, "Python '2.7' is not a version; legal example: 3.12"),
        (["--platform", "win_amd64"], 2, "platform 'win_amd64' is unknown; legal example:"),
    ],
)
def test_a_wrong_request_is_a_usage_error(dist, tmp_path, argv, code, message):
    done = bundle(dist, tmp_path / "b", *argv)
    assert message in done.stderr
    assert done.returncode == code


def test_requirements_that_contradict_one_another_end(tmp_path):
    # a wants b<2, b 1 wants a>1, a 2 wants b>1: no set of versions satisfies all.
    needs = {("a", "1"): "b<2", ("b", "1"): "a>1", ("a", "2"): "b>1", ("b", "2"): "a<2"}
    pip = _FakePip({"a": ["1", "2"], "b": ["1", "2"]}, needs, tmp_path)
    with pytest.raises(BundleError, match="contradict one another"):
        close([Requirement("a")], {}, set(), pip)


class _FakePip(Pip):
    """An index in memory, to see the closure alone."""

    def __init__(self, versions, needs, folder):
        super().__init__(Target("3.12", "manylinux_2_28_x86_64"), folder, (), True, print)
        self.versions, self.needs = versions, needs

    def download(self, wanted):
        found = {}
        for name, want in wanted.items():
            version = max(want.specifier.filter(self.versions[name]), default="2")
            need = self.needs[name, version]
            found[name] = Wheel.read(make_wheel(self.folder, name, version, (need,)))
        return found


# -- installing -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """An environment with nothing but pip."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """A bundle for this Python."""
    folder = tmp_path_factory.mktemp("made_once")
    assert bundle(write_dist(folder), folder / "bundle", "--python", PYTHON).returncode == 0
    return folder / "bundle"


@pytest.fixture
def made(made_once, tmp_path):
    """A copy of a bundle for this Python, to be changed at will."""
    return Path(shutil.copytree(made_once, tmp_path / "bundle"))


def installed(python: Path) -> dict[str, str]:
    done = subprocess.run(
        [python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    )
    return {p["name"].replace("_", "-"): p["version"] for p in json.loads(done.stdout)}


def install(out: Path, python: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    # Settings of the machine that would bring other places in.
    env = {
        "PATH": "/usr/bin:/bin",
        "PYTHON": str(python),
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_FIND_LINKS": "/nowhere",
        **environment,
    }
    return subprocess.run([out / "install.sh"], capture_output=True, text=True, env=env, cwd="/")


def test_a_bundle_installs_without_a_network(dist, tmp_path, venv):
    out = tmp_path / "a bundle"
    done = bundle(dist, out, "--python", PYTHON)
    assert done.returncode == 0, done.stderr
    dist.rename(tmp_path / "gone")

    first = install(out, venv)
    assert first.returncode == 1
    assert "error: torch>=2.9 must be installed first: this bundle does" in first.stderr
    assert "precast" not in installed(venv)

    # As torch comes: with the CUDA runtime that it pins, older than the one in the bundle.
    gone = tmp_path / "gone"
    there = [next(gone.glob(f"{name}-*")) for name in ("torch-2.11.0", "nvidia_cuda_runtime-13.0")]
    pip = [venv, "-m", "pip", "install", "--no-index", *there]
    subprocess.run(pip, check=True, capture_output=True, env={**os.environ, **ALONE})
    done = install(out, venv)
    assert done.returncode == 0, done.stderr
    expected = {**pins(out), "torch": "2.11.0", "nvidia-cuda-runtime": "13.0"}
    assert {name: installed(venv).get(name) for name in expected} == expected

    # Relative to where the caller stands.
    relative = os.path.relpath(venv, "/")
    assert install(out, Path(relative)).returncode == 0


def test_a_bundle_with_torch_installs_into_an_empty_environment(dist, tmp_path):
    out = tmp_path / "bundle"
    done = bundle(dist, out, "--python", PYTHON, "--with-torch", "torch==2.13.0")
    assert done.returncode == 0, done.stderr
    target = tmp_path / "site"
    done = subprocess.run(
        [out / "install.sh", "--target", target], capture_output=True, text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = {p.name.partition("-")[0] for p in target.glob("*.dist-info")}
    assert {"torch", "precast", "apache_tvm_ffi"} <= names


def test_a_changed_wheel_is_not_installed(made, venv):
    wheel = next((made / "wheels").glob("apache_tvm_ffi*"))
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    done = install(made, venv)
    assert done.returncode == 1
    assert f"wheels/{wheel.name}: FAILED" in done.stderr
    assert "error: the bundle is damaged or was changed" in done.stderr


@pytest.mark.parametrize(
    "name", ["wheels/platformdirs-99.0-py3-none-any.whl", "sitecustomize.py", "wheels/a b.whl"]
)
def test_nothing_is_installed_beside_a_file_without_a_digest(made, venv, name):
    (made / name).write_bytes(b"")
    before = installed(venv)
    done = install(made, venv)
    assert done.returncode == 1
    assert f"{name} is not in SHA256SUMS\nerror: files were added to the bundle" in done.stderr
    assert installed(venv) == before


def test_two_bundles_in_one_folder_are_not_installed(dist, made, tmp_path, venv):
    other = tmp_path / "other"
    make_wheel(dist, "typing_extensions", "4.17.0")
    assert bundle(dist, other, "--python", PYTHON).returncode == 0
    shutil.copytree(other, made, dirs_exist_ok=True)
    done = install(made, venv)
    assert done.returncode == 1
    assert "typing_extensions-4.16.0-py3-none-any.whl is not in SHA256SUMS" in done.stderr


def test_cdpath_does_not_lead_elsewhere(made, tmp_path, venv):
    done = subprocess.run(
        ["sh", "bundle/install.sh"], capture_output=True, text=True, cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(venv), "CDPATH": f".:{tmp_path}"},
    )  # fmt: skip
    # The script has found itself: it asks for torch, or an earlier test has installed that.
    assert "damaged" not in done.stderr
    assert done.returncode == 0 or "error: torch>=2.9 must be installed first" in done.stderr


def test_the_script_rejects_another_python_and_another_machine(dist, tmp_path):
    make_wheel(dist, "new_only", "2.0", tag="cp312-cp312-manylinux_2_28_x86_64")
    out = tmp_path / "bundle"
    assert bundle(dist, out).returncode == 0
    other = tmp_path / "python3.9"
    other.write_text("#!/bin/sh\necho 3.9\n")
    other.chmod(0o755)
    done = install(out, other)
    assert done.returncode == 1
    assert f"error: the bundle is for Python 3.12, {other} is 3.9" in done.stderr
    text = (out / "install.sh").read_text()
    assert re.search(r'\[ "\$machine" = "x86_64" \] \|\| fail', text)
    (tmp_path / "uname").write_text("#!/bin/sh\necho riscv64\n")
    (tmp_path / "uname").chmod(0o755)
    done = install(out, other, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert "error: the bundle is for x86_64, this machine is riscv64" in done.stderr


# -- damaged wheels -------------------------------------------------------------------------------

METADATA = "precast_jit_cache_cu13_sm90a-0.1.0.dist-info/METADATA"
POINTS = "precast_jit_cache_cu13_sm90a-0.1.0.dist-info/entry_points.txt"
MANIFEST = "precast_jit_cache_cu13_sm90a/manifest.json"
MODULE = "precast_jit_cache_cu13_sm90a/sm90a/norm__dtype_bf16.so"


def replaced(name: str, data: bytes) -> Change:
    return lambda files: files | {name: data}


def appended(name: str, data: bytes) -> Change:
    return lambda files: files | {name: files[name] + data}


def without(name: str) -> Change:
    return lambda files: {n: d for n, d in files.items() if n != name}


def of_manifest(**changes: object) -> Change:
    def change(files: dict[str, bytes]) -> dict[str, bytes]:
        data = json.loads(files[MANIFEST])
        (row,) = (row for row in data["modules"] if row["name"] == "norm__dtype_bf16")
        row.update(changes)
        return files | {MANIFEST: json.dumps(data).encode()}

    return change


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


FOREIGN = b"\x7fELF, but of another kind".ljust(100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(METADATA), "it has no METADATA"),
        (replaced(METADATA, b"\xff\xfe\x00\x81" * 9), "is damaged: "),
        (replaced(METADATA, b"Metadata-Version: 2.1\nName: other\nVersion: 0.1.0\n"), "of other 0"),
        (appended(METADATA, b"Requires-Dist: a b c\n"), "Expected"),
        (appended(METADATA, b"Requires-Dist: a; what == 'x'\n"), "Expected"),
        (appended(METADATA, b"Requires-Dist: a; os_name < 'x' >\n"), "Expected"),
        (appended(METADATA, b"Requires-Python: 3 or so\n"), "Invalid specifier"),
        (appended(METADATA, b"Requires-Python: >=3\n" * 2), "wrong field 'requires-python'"),
        (appended(METADATA, b"Version: 0.1.0\n"), "wrong field 'version'"),
        (replaced(POINTS, b"a = b\n"), "no section headers"),
        (replaced(POINTS, b"[precast.jit_cache]\n"), "has 0 packages of precast.jit_cache"),
        (appended(POINTS, b"[precast.jit_cache]\nx = y\n"), "already exists"),
        (appended(POINTS, b"x = y\n"), "has 2 packages"),
        (replaced(POINTS, b"\xff\xfe"), "can't decode"),
        (without(MANIFEST), "no item named"),
        (replaced(MANIFEST, b"[" * 100_000), "manifest.json is damaged (nested too deeply)"),
        (replaced(MANIFEST, b"{}"), "manifest.json has schema None"),
        (without(MODULE), f"{MODULE} is in the manifest and missing"),
        (replaced(MODULE + ".so", b""), f"{MODULE}.so is not in the manifest"),
        (appended(MODULE, b"\0"), "norm__dtype_bf16.so is not what the manifest says"),
        (
            lambda files: of_manifest(size=len(FOREIGN), sha256=sha256(FOREIGN))(
                files | {MODULE: FOREIGN}
            ),
            "norm__dtype_bf16.so is not a 64-bit shared library",
        ),
        (of_manifest(exports=["rmsnorm", "other"]), "norm__dtype_bf16.so has no function other"),
        (replaced("../../../../x", b""), "its member '../../../../x' lies outside"),
        (replaced("/abs", b""), "its member '/abs' lies outside"),
    ],
)  # fmt: skip
def test_a_damaged_provider_is_named(dist, tmp_path, change, message):
    (wheel,) = dist.glob("precast_jit_cache*")
    write_wheel(wheel, change(read_wheel(wheel)))
    with pytest.raises(BundleError, match="is damaged: ") as caught:
        Wheel.read(wheel)
    assert str(caught.value).startswith(f"{wheel} is damaged: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "it has no RECORD"),
        (b"", f"{MODULE.partition('/')[0]}"),
        (b'"unclosed\n', "is not in RECORD"),
        (b"x,sha256=0,1\n", "RECORD"),
    ],
)
def test_a_provider_that_differs_from_its_record_is_named(dist, record, message):
    (wheel,) = dist.glob("precast_jit_cache*")
    files = read_wheel(wheel)
    name = METADATA.replace("METADATA", "RECORD")
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, data in (files if record is None else files | {name: record}).items():
            archive.writestr(file, data)
    with pytest.raises(BundleError, match="is damaged: ") as caught:
        Wheel.read(wheel)
    assert message in str(caught.value)


def test_a_digest_of_a_record_is_compared(dist):
    (wheel,) = dist.glob("precast-*")
    with zipfile.ZipFile(wheel) as archive:
        record = archive.read("precast-0.1.0.dist-info/RECORD")
    files = appended("precast/__init__.py", b"import os\n")(read_wheel(wheel))
    write_wheel(wheel, files | {"precast-0.1.0.dist-info/RECORD": record})
    with pytest.raises(BundleError, match=r"precast/__init__.py is not what RECORD says"):
        Wheel.read(wheel)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"PK\x03\x04", b"PK\x03\x05"),  # A local header.
        (b"import", b"IMPORT"),  # The checksum of a member.
    ],
)
def test_flipped_bytes_are_named(tmp_path, old, new):
    wheel = make_wheel(tmp_path, "precast", "0.1.0", files={"precast/x.py": "import os\n"})
    wheel.write_bytes(wheel.read_bytes().replace(old, new))
    with pytest.raises(BundleError, match="is damaged: "):
        Wheel.read(wheel)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_flipped_bytes_of_compressed_data_are_named(tmp_path, method):
    wheel = make_wheel(tmp_path, "precast", "0.1.0")
    files = read_wheel(wheel)
    with zipfile.ZipFile(wheel, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    data = bytearray(wheel.read_bytes())
    start = data.index(b"METADATA") + len("METADATA")
    data[start + 12 : start + 30] = bytes(18)
    wheel.write_bytes(data)
    with pytest.raises(BundleError, match=r"is damaged: |cannot be read"):
        Wheel.read(wheel)


def test_a_pipe_is_no_wheel_to_wait_for(tmp_path):
    wheel = tmp_path / "precast-0.1.0-py3-none-any.whl"
    os.mkfifo(wheel)
    with pytest.raises(BundleError, match="cannot be read"):
        Wheel.read(wheel)
    with pytest.raises(BundleError, match="cannot be read"):
        _contents.core_plan(wheel)


@pytest.mark.parametrize(("offset", "value"), [(6, 1), (8, 99)])
def test_encryption_and_an_unknown_compression_are_named(tmp_path, offset, value):
    wheel = make_wheel(tmp_path, "precast", "0.1.0")
    data = bytearray(wheel.read_bytes())
    for mark, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        at = data.find(mark)
        while at >= 0:
            data[at + offset + shift] = value
            at = data.find(mark, at + 1)
    wheel.write_bytes(data)
    with pytest.raises(BundleError, match="is damaged: "):
        Wheel.read(wheel)


@pytest.mark.parametrize(
    "plan",
    [
        *("", "[]", "{}", '{"modules": []}', '{"modules": {"a": 1}}', "[" * 100_000),
        '{"modules": {"a": {"fingerprints": {"cu13": ["sm90a"]}}}}',
        '{"modules": {"a": {"fingerprints": {"cu13": 1}}}}',
        '{"modules": {"a": {"fingerprints": {"cu13": {"sm90a": 1}}}}}',
    ],
)
def test_a_core_without_a_plan_is_named(dist, plan):
    (core,) = dist.glob("precast-*")
    write_wheel(core, replaced("precast/data/plan.json", plan.encode())(read_wheel(core)))
    with pytest.raises(BundleError, match="is damaged: "):
        _contents.core_plan(core)


@pytest.mark.parametrize("extra", ["../../x", "a b", "", "jit]", "j\nit"])
def test_an_extra_that_is_no_name_is_refused(tmp_path, extra):
    target = Target(PYTHON, "manylinux_2_28_x86_64")
    with pytest.raises(BundleError, match="is not the name of an extra of precast"):
        make_bundle(tmp_path / "out", ["sm90a"], target, cuda_major=13, version="1", extras=[extra])
    assert not any(tmp_path.iterdir())


def test_a_damaged_wheel_ends_a_bundle_with_one_message(dist, tmp_path):
    (wheel,) = dist.glob("precast_jit_cache*")
    write_wheel(wheel, without(MODULE)(read_wheel(wheel)))
    assert f"{wheel.name} is damaged: {MODULE} is in the manifest" in rejected(dist, tmp_path)
