# SPDX-License-Identifier: Apache-2.0
"""A kernel from outside the library, compiled by the real compilers and loaded through the FFI."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from hostile_environment import hostile_environment
from jit_support import (
    ONE_FILE,
    PACKAGES,
    compiles,
    environment,
    failure,
    run,
    success,
    worker_command,
)

from precast._jit.toolchain import find_toolchain


def test_compile_then_hit_then_a_changed_header_compiles_again(tiny, cache, real):
    first = run(worker_command(tiny, "load"), real)
    path = success(first)
    assert first.stdout.splitlines()[1] == "42"
    assert compiles(first) == 1
    assert re.search(r"Why: this is a test\.\n", first.stderr)
    assert re.search(r"INFO: compiled tiny in \d+\.\d s\n", first.stderr)

    second = run(worker_command(tiny), real)
    assert (success(second), compiles(second), second.stderr) == (path, 0, "")

    elsewhere = tiny.with_name("elsewhere")
    shutil.copytree(tiny, elsewhere)
    assert success(run(worker_command(elsewhere), real)) == path

    header = tiny / "inc" / "tiny.h"
    header.write_text(header.read_text().replace("42", "43"))
    third = run(worker_command(tiny, "load"), real)
    assert (compiles(third), third.stdout.splitlines()[1]) == (1, "43")
    assert success(third) != path
    assert path.is_file()
    assert not [*(cache / "v1" / ".work").iterdir()]


def test_one_file_that_exports_by_itself(tmp_path, real):
    (tmp_path / "mine.cu").write_text(ONE_FILE)
    script = (
        "from precast.jit import gen_jit_spec; "
        "module = gen_jit_spec('mine', ['mine.cu'], arch='9.0a').build_and_load(); "
        "print(module.get_function('mine')(41))"
    )
    done = run([sys.executable, "-c", script], real, cwd=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_variables_of_the_environment_change_nothing(tiny, tmp_path, real):
    first = success(run(worker_command(tiny), real))
    hostile = {**real, **hostile_environment(tmp_path)}
    hostile["PRECAST_CACHE_DIR"] = str(tmp_path / "other")
    second = success(run(worker_command(tiny), hostile))
    assert second.parent.name == first.parent.name
    assert second.read_bytes() == first.read_bytes()
    assert not (tmp_path / "dependencies").exists()


def test_an_error_in_the_source_shows_command_and_first_lines(tiny, cache, real):
    with (tiny / "tiny.cu").open("a") as out:
        out.write("int broken() { return not_declared; }\n")
    text = failure(run(worker_command(tiny), real))
    nvcc = find_toolchain(cuda_major=13).toolkit.nvcc
    assert text.startswith("precast.errors.CompileError: compiling tiny failed (exit status ")
    assert f"\n  {nvcc} -ccbin=" in text
    assert f'{tiny}/tiny.cu(5): error: identifier "not_declared" is undefined' in text
    assert list(cache.rglob("*.so")) == list(cache.rglob("*.o")) == []


def test_an_error_in_the_binding_does_so_too(tiny, cache, real):
    (tiny / "tiny_binding.cc").write_text("int broken() { return not_declared; }\n")
    text = failure(run(worker_command(tiny), real))
    assert "tiny_binding.cc:1:23: error: " in text
    assert list(cache.rglob("*.so")) == list(cache.rglob("*.o")) == []


def test_an_undefined_symbol_fails_at_the_link(tiny, cache, real):
    (tiny / "tiny.cu").write_text("#include <tiny.h>\n")
    text = failure(run(worker_command(tiny), real))
    assert "-shared" in text
    assert "undefined reference to `launch_tiny" in text
    assert list(cache.rglob("*.so")) == []


def test_a_library_that_exports_nothing_is_named(tmp_path, real):
    (tmp_path / "mine.cc").write_text("int mine() { return 1; }\n")
    script = (
        "from precast.jit import gen_jit_spec; "
        "gen_jit_spec('mine', ['mine.cc'], arch='9.0a').build_and_load()"
    )
    text = failure(run([sys.executable, "-c", script], real, cwd=str(tmp_path)))
    assert "mine.so exports no function. Fix: TVM_FFI_DLL_EXPORT_TYPED_FUNC(name, " in text


def test_an_export_that_the_library_lacks_is_named(tiny, real):
    source = tiny / "tiny_binding.cc"
    source.write_text(source.read_text().replace("tiny_answer", "tiny_other"))
    text = failure(run(worker_command(tiny, "load"), real))
    assert text.startswith("precast.errors.LoadError: the library has no function 'tiny_answer'")


def test_a_missing_host_compiler(tiny, cache, toolchain, tmp_path):
    (tmp_path / "bin").mkdir()
    env = environment(PRECAST_CACHE_DIR=str(cache), PATH=str(tmp_path / "bin"))
    env["PRECAST_CUDA_HOME"] = str(toolchain.toolkit.nvcc.resolve().parents[1])
    text = failure(run(worker_command(tiny), env))
    assert "no host C++ compiler: neither g++, c++ nor clang++ is on PATH. Fix: install one" in text
    assert not cache.exists()


def test_headers_of_another_cuda(tiny, cache, toolchain, tmp_path):
    home = tmp_path / "mixed"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").symlink_to(toolchain.toolkit.nvcc.resolve())
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION 12080\n")
    env = environment(PRECAST_CACHE_DIR=str(cache), PRECAST_CUDA_HOME=str(home))
    env["PATH"] = os.defpath
    done = run(worker_command(tiny), env)
    reason = f"its headers in {home}/include are CUDA 12.8: compiler and headers do not agree"
    if done.returncode == 0:  # Another toolkit of this machine was good enough, and was taken.
        assert str(home) not in done.stdout
        verdict = (
            "from precast._jit.toolchain import candidates, unsuitable; "
            "print(unsuitable(next(candidates())))"
        )
        assert run([sys.executable, "-c", verdict], env).stdout.strip() == reason
    else:
        assert reason in failure(done)


def test_a_compiler_without_its_parts(tiny, cache, toolchain, tmp_path):
    # nvcc alone, as a broken installation leaves it: it reports its version and compiles nothing.
    home = tmp_path / "broken"
    (home / "bin").mkdir(parents=True)
    for name in ("nvcc", "nvcc.profile"):
        shutil.copy(toolchain.toolkit.nvcc.resolve().parent / name, home / "bin" / name)
    (home / "include").symlink_to(toolchain.toolkit.include)
    (home / "lib64").symlink_to(toolchain.toolkit.cudart.parent)
    env = environment(PRECAST_CACHE_DIR=str(cache), PRECAST_CUDA_HOME=str(home))
    text = failure(run(worker_command(tiny), env))
    assert text.startswith("precast.errors.CompileError: compiling tiny failed (exit status ")
    assert f"\n  {home}/bin/nvcc " in text
    assert "Cause: a program of the compiler is missing. Fix: reinstall the toolkit" in text
    assert list(cache.rglob("*.o")) == []


# -- names of places ------------------------------------------------------------------------------

ODD = 'o\'brien, "a" $(ran) `ran` $HOME;=x'


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The file that the program ``ran`` of ``ODD`` makes when a shell runs it, in any folder."""
    (tmp_path / "bin").mkdir()
    program, mark = tmp_path / "bin" / "ran", tmp_path / "mark"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return mark


@pytest.mark.parametrize("through_link", [False, True])
def test_no_place_is_read_by_a_shell(tiny, tmp_path, real, ran, through_link):
    """Sources, cache, temporary folder and the package itself below a name with its characters."""
    plain = success(run(worker_command(tiny), real))
    odd = tmp_path / ODD
    for name in ("tiny", "tmp", "cache", "package"):
        (odd / name).mkdir(parents=True)
    shutil.copytree(tiny, odd / "tiny", dirs_exist_ok=True)
    shutil.copytree(Path(PACKAGES).parent / "include", odd / "package" / "include")
    for folder in ("python", "csrc", "aot_configs"):
        (odd / "package" / folder).symlink_to(Path(PACKAGES).parent / folder)
    changed = {
        **real,
        "PATH": os.environ["PATH"],
        "PRECAST_CACHE_DIR": str(odd / "cache"),
        "TMPDIR": str(odd / "tmp"),
    }
    sources = odd / "tiny"
    if through_link:
        sources = tmp_path / "link"
        sources.symlink_to(odd / "tiny")
    done = run(worker_command(sources, "load"), changed, cwd=str(odd))
    found = success(done)
    assert done.stdout.splitlines()[1] == "42"
    assert found.is_relative_to(odd / "cache")
    assert found.read_bytes() == plain.read_bytes()
    assert not ran.exists()
    assert not [*(odd / "tmp").iterdir()]
    again = run(worker_command(sources), changed, cwd=str(odd))
    assert (success(again), compiles(again)) == (found, 0)


def test_a_checkout_and_a_toolkit_with_such_a_name(tmp_path, real, ran, toolchain):
    root = Path(PACKAGES).parent
    odd = tmp_path / ODD
    odd.mkdir()
    for name in ("include", "csrc", "aot_configs", "python"):
        shutil.copytree(root / name, odd / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", odd)
    shutil.copy(root / "CMakeLists.txt", odd)
    (odd / "cuda").symlink_to(toolchain.toolkit.nvcc.parents[1])
    script = (
        "from precast._plan.installed import plan; from precast._runtime.jit_spec import JitSpec; "
        "print(JitSpec.of(plan().spec('scale', {'dtype': 'f32'}, '9.0', 13)).build('a test'))"
    )
    built = []
    for place, cache in ((root, "plain"), (odd, "odd")):
        changed = {**real, "PATH": os.environ["PATH"], "PYTHONPATH": str(place / "python")}
        changed["PRECAST_CACHE_DIR"] = str(tmp_path / cache)
        if place == odd and toolchain.toolkit.origin != "Python environment":
            changed["PRECAST_CUDA_HOME"] = "cuda"  # Relative, too.
        done = run([sys.executable, "-c", script], changed, cwd=str(odd))
        assert done.returncode == 0, done.stderr
        built.append(Path(done.stdout.splitlines()[0]))
    assert built[0].parent.name == built[1].parent.name
    assert built[0].read_bytes() == built[1].read_bytes()
    assert not ran.exists()


# -- forms of an include --------------------------------------------------------------------------


#: Each includes ``<N.h>``, where N is its number.
FORMS = [
    "#include <0.h>",
    "#define NAME <1.h>\n#include NAME",
    "#include \\\n<2.h>",
    "/* a comment */ #include <3.h>",
    "#include /* a comment */ <4.h>",
    "%:include <5.h>",
    "#include_next <6.h>",
    "#import <7.h>",
]


def test_a_change_of_a_header_is_seen_in_any_form_of_include(tmp_path, real):
    (tmp_path / "inc").mkdir()
    headers = [tmp_path / "inc" / f"{k}.h" for k in range(len(FORMS))]
    for header in headers:
        header.write_text(f"// {header.name}\n")
    (tmp_path / "host.cc").write_text(
        "#include <tvm/ffi/function.h>\n" + "\n".join(FORMS) + "\n"
        "static int mine() { return 7; }\nTVM_FFI_DLL_EXPORT_TYPED_FUNC(mine, mine);\n"
    )
    script = """
import sys
from pathlib import Path
from precast.jit import gen_jit_spec
def found():
    spec = gen_jit_spec("mine", ["host.cc"], arch="9.0a", extra_include_paths=["inc"])
    return spec, spec.get_library_path()
found()[0].build("a test")
print(found()[1] is not None)
for name in sys.argv[1:]:
    header = Path(name)
    text = header.read_text()
    header.write_text(text + "// changed")
    changed = found()[1]
    header.unlink()
    removed = found()[1]
    header.write_text(text)
    print(changed, removed, found()[1] is not None)
"""
    done = run([sys.executable, "-c", script, *map(str, headers)], real, cwd=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", *["None None True"] * len(FORMS)]


def test_a_kernel_that_includes_by_a_macro(tmp_path, real):
    """The same by nvcc, which writes its own list of files."""
    kernel = "__global__ void MineKernel(int* out) { *out = 1; }"
    (tmp_path / "mine.cu").write_text(f'#define NAME "one.h"\n#include NAME\n{kernel}\n')
    script = (
        "from precast.jit import gen_jit_spec; "
        "print(gen_jit_spec('mine', ['mine.cu'], arch='9.0a').build('a test'))"
    )
    seen = []
    for text in ("// first\n", "// second\n"):
        (tmp_path / "one.h").write_text(text)
        done = run([sys.executable, "-c", script], real, cwd=str(tmp_path))
        assert done.returncode == 0, done.stderr
        seen.append(done.stderr.count("INFO: compiling mine"))
    assert seen == [1, 1]
