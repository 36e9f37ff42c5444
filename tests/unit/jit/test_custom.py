# SPDX-License-Identifier: Apache-2.0
"""gen_jit_spec: a kernel from outside the library, and every argument that makes no sense."""

from __future__ import annotations

import re

import pytest

from precast._plan.installed import plan
from precast.jit import JitSpec, MissingJITCacheError, gen_jit_spec


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "k.cu"
    path.write_text("// a kernel\n")
    return path


def test_a_spec(world, source, tmp_path):
    (tmp_path / "k.cpp").write_text("")
    spec = gen_jit_spec(
        "k",
        [str(source), tmp_path / "k.cpp"],
        extra_cuda_cflags=["-lineinfo"],
        extra_include_paths=[str(tmp_path)],
        exports=["f"],
        arch="9.0",
        cuda_major=12,
    )
    assert isinstance(spec, JitSpec)
    assert (spec.name, spec.arch.target, spec.cuda_major, spec.is_aot) == ("k", "9.0a", 12, False)
    assert spec.sources == (str(source), str(tmp_path / "k.cpp"))
    assert spec.cuda_flags[-1] == "-lineinfo"
    assert set(plan().build.cuda_flags) < set(spec.cuda_flags)
    assert (spec.exports, spec.include_paths) == (("f",), (tmp_path,))
    assert not spec.is_compiled
    assert spec.get_library_path() is None
    with pytest.raises(MissingJITCacheError, match=r"k for sm90a is not compiled\. Fix: call") as e:
        spec.load()
    assert e.value.spec is spec


def test_without_a_compiler_the_driver_decides_the_cuda_major(world, source):
    for driver, major in (((12, 8), 12), ((13, 1), 13), ((14, 0), 13), (None, 13)):
        world.driver = driver
        assert gen_jit_spec("k", [source], arch="9.0").cuda_major == major


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"name": "My-Kernel"}, ValueError, "name must be lower case letters, digits and '_'"),
        ({"name": "../k"}, ValueError, "got '../k'"),
        ({"sources": []}, ValueError, "sources must be one or more files"),
        ({"sources": "k.cu"}, TypeError, "sources must be a list, got 'k.cu'. Fix: ['k.cu']"),
        ({"sources": ["none.cu"]}, ValueError, "none.cu does not exist"),
        ({"sources": ["k.py"]}, ValueError, "k.py has an unknown suffix; legal: .cu, .cc, .cpp"),
        ({"sources": ["k.cu", "./k.cu"]}, ValueError, "files with different names"),
        ({"extra_cuda_cflags": "-O3"}, TypeError, "extra_cuda_cflags must be a list, got '-O3'"),
        (
            {"extra_cuda_cflags": ["-I/x"]},
            ValueError,
            "'-I/x' would hide headers from the fingerprint",
        ),
        ({"extra_cuda_cflags": ["-include", "x.h"]}, ValueError, "Fix: pass extra_include_paths"),
        ({"extra_cuda_cflags": ["-Xcompiler=-I/x"]}, ValueError, "pass extra_include_paths"),
        ({"extra_cuda_cflags": ["-Xcompiler=-O2,-isystem/x"]}, ValueError, "extra_include_paths"),
        ({"extra_cuda_cflags": ["--options-file", "f"]}, ValueError, "extra_include_paths"),
        ({"extra_cuda_cflags": ["-Xcompiler=@flags"]}, ValueError, "extra_include_paths"),
        ({"extra_cuda_cflags": ["-Xcompiler=--include-directory=x"]}, ValueError, "hide headers"),
        ({"cuda_major": 13.0}, TypeError, "cuda_major must be a whole number such as 13, got 13.0"),
        ({"cuda_major": "13"}, TypeError, "cuda_major must be a whole number such as 13, got '13'"),
        ({"extra_cuda_cflags": ["-DX=$(touch x)"]}, ValueError, "would give '-DX=$(touch x)' to a"),
        ({"extra_cuda_cflags": ["-DX=`x`"]}, ValueError, "Fix: define it in a header of yours"),
        ({"extra_cuda_cflags": ["-Xcompiler=-DX=a;touch x"]}, ValueError, "to a shell"),
        ({"extra_cuda_cflags": ["-Xcompiler", "-DX=a|x"]}, ValueError, "'-DX=a|x' to a shell"),
        ({"extra_cuda_cflags": [3]}, TypeError, "extra_cuda_cflags must be a list of str, got 3"),
        ({"extra_cuda_cflags": 3}, TypeError, "extra_cuda_cflags must be a list, got 3"),
        (
            {"sources": [b"k.cu"]},
            TypeError,
            "sources must be a list of str or PathLike",
        ),
        ({"exports": [None]}, TypeError, "exports must be a list of str, got None in it"),
        ({"name": 3}, TypeError, "name must be a string, got 3"),
        ({"arch": 9.0}, TypeError, "arch must be a string, got 9.0"),
        ({"sources": ["k'.cu"]}, ValueError, "letters, digits and ._+- alone"),
        ({"extra_include_paths": "x"}, TypeError, "extra_include_paths must be a list"),
        ({"exports": "f"}, TypeError, "exports must be a list"),
        ({"arch": "hopper"}, ValueError, "'hopper' is not a CUDA target; legal: sm80"),
        ({"cuda_major": 11}, ValueError, "CUDA 11 is not supported; legal: 12, 13"),
    ],
)
def test_a_wrong_argument_is_named(world, source, monkeypatch, arguments, error, words):
    monkeypatch.chdir(source.parent)
    defaults = {"name": "k", "sources": [source], "arch": "9.0"}
    with pytest.raises(error, match=re.escape(words)):
        gen_jit_spec(**{**defaults, **arguments})


def test_the_target_is_that_of_the_machine_or_must_be_given(world, source, monkeypatch):
    monkeypatch.setenv("PRECAST_CUDA_ARCH_LIST", "8.9")
    assert gen_jit_spec("k", [source]).arch.name == "sm89"
    monkeypatch.setenv("PRECAST_CUDA_ARCH_LIST", "8.9 9.0")
    with pytest.raises(
        ValueError, match=r"targets of this machine are: 8.9, 9.0a. Fix: pass arch="
    ):
        gen_jit_spec("k", [source])
    monkeypatch.delenv("PRECAST_CUDA_ARCH_LIST")
    with pytest.raises(ValueError, match=r"none \(no GPU present\)"):
        gen_jit_spec("k", [source])
