# SPDX-License-Identifier: Apache-2.0
"""The loader: where a module is looked for, in which order, and for which device."""

from __future__ import annotations

import copy
import os
import shutil
import threading
import time
from functools import partial

import pytest
from loader_support import BF16, FakeModule, messages, rejections, resolve

import precast
from precast._plan.install_hint import modules_command
from precast._runtime import library, loader
from precast._runtime.jit_spec import JitSpec
from precast.errors import (
    LoadError,
    MissingJITCacheError,
    MissingKernelError,
    UnsupportedTargetError,
)


def test_the_whole_order_first_hit_wins(world):
    tree = world.provide("tree", "9.0", source="KERNEL_DIR")
    wheel = world.install("cache-cu13-sm90a", "9.0")
    mount = world.provide("mount", "9.0")
    cached = world.cached(world.spec("f16"))
    file = "sm90a/norm__dtype_f16.so"
    axes = {"dtype": "f16"}
    for source, root in [
        ("PRECAST_KERNEL_DIR", tree),
        ("provider", wheel),
        ("PRECAST_PROVIDER_PATH", mount),
    ]:
        world.loader()
        found = resolve(axes)
        assert found.path == root / file
        assert [(s.source, s.accepted) for s in found.steps] == [(source, True)]
        (root / "manifest.json").unlink()
    world.loader()
    found = resolve(axes)
    assert found.path == cached
    assert [(s.source, s.accepted) for s in found.steps] == [
        ("PRECAST_KERNEL_DIR", False),
        ("provider", False),
        ("PRECAST_PROVIDER_PATH", False),
        ("JIT cache", True),
    ]
    shutil.rmtree(cached.parent)
    found = resolve(axes)
    assert found.path is None
    assert str(found.steps[-1]) == (
        'JIT: rejected: no CUDA compiler: nothing there Fix: pip install "precast[jit]"'
    )


def test_a_cached_build_of_an_older_cuda_serves_where_nothing_can_be_compiled(world):
    old = world.cached(world.spec(major=12))
    world.loader()
    found = resolve()
    assert (found.path, found.cuda_major) == (old, 12)
    new = world.cached(world.spec())
    assert (resolve().path, resolve().cuda_major) == (new, 13)
    world.driver = (12, 8)
    assert (resolve().path, resolve().cuda_major) == (old, 12)


def test_a_driver_runs_no_cached_build_of_a_newer_cuda(world):
    world.cached(world.spec(major=13))
    world.driver = (12, 8)
    world.loader()
    assert resolve().path is None


def test_what_is_rejected_first_does_not_stop_the_search(world):
    first = world.provide("first", "9.0", source="KERNEL_DIR")
    second = world.provide("second", "9.0")
    (first / "sm90a/norm__dtype_bf16.so").write_bytes(b"")
    world.loader()
    found = resolve()
    assert found.path == second / "sm90a/norm__dtype_bf16.so"
    assert [s.accepted for s in found.steps] == [False, True]
    assert "0 bytes instead of" in found.steps[0].reason


def test_several_providers_serve_each_its_own_device_in_one_process(world):
    hopper = world.install("cache-cu13-sm90a", "9.0")
    ampere = world.install("cache-cu13-sm80", "8.0")
    fresh = world.loader()
    for device, root, arch in ((0, hopper, "sm90a"), (1, ampere, "sm80"), (2, ampere, "sm80")):
        assert fresh.load("norm", BF16, device).path == root / arch / "norm__dtype_bf16.so"
    assert len(world.opened) == 3
    assert [r.capability for r in fresh.loaded()] == ["9.0", "8.0", "8.6"]


@pytest.mark.parametrize("order", [("8.0", "8.6"), ("8.6", "8.0")])
def test_the_nearest_target_wins_whatever_the_order_of_installation(world, order):
    roots = {arch: world.install(f"cache-{arch.replace('.', '')}", arch) for arch in order}
    world.loader()
    assert resolve(capability="8.6").path == roots["8.6"] / "sm86/norm__dtype_bf16.so"
    assert resolve(capability="8.9").path == roots["8.0"] / "sm80/norm__dtype_bf16.so"


def test_a_build_tree_wins_over_a_nearer_target(world):
    world.provide("wheel", "8.6")
    tree = world.provide("tree", "8.0", source="KERNEL_DIR")
    world.loader()
    assert resolve(capability="8.6").path == tree / "sm80/norm__dtype_bf16.so"


def test_the_newest_cuda_that_the_driver_runs_wins(world):
    old = world.provide("old", "9.0", cuda_major=12)
    new = world.provide("new", "9.0", cuda_major=13)
    world.loader()
    assert (resolve().path, resolve().cuda_major) == (new / "sm90a/norm__dtype_bf16.so", 13)
    world.driver = (12, 8)
    loader.provider_problem.cache_clear()
    assert (resolve().path, resolve().cuda_major) == (old / "sm90a/norm__dtype_bf16.so", 12)


@pytest.mark.parametrize("gone", [0, 1])
def test_removing_one_provider_leaves_the_other(world, gone):
    roots = [world.install("cache-sm90a", "9.0"), world.install("cache-sm80", "8.0")]
    shutil.rmtree(roots[gone].parent)
    world.loader()
    devices = ["9.0", "8.0"]
    assert resolve(capability=devices[gone]).path is None
    left = resolve(capability=devices[1 - gone])
    assert left.path is not None
    assert left.path.is_relative_to(roots[1 - gone])


def test_a_folder_of_providers_is_a_provider_path_too(world):
    root = world.provide("wheelhouse/a", "9.0")
    world.provide("wheelhouse/b", "8.0")
    world.patch.setenv("PRECAST_PROVIDER_PATH", str(root.parent))
    assert [p.root.name for p in world.loader().providers] == ["a", "b"]
    assert resolve().path == root / "sm90a/norm__dtype_bf16.so"


def test_the_in_process_table_answers_first(world):
    root = world.provide("p", "9.0")
    fresh = world.loader()
    module = fresh.load("norm", BF16, 0)
    shutil.rmtree(root)
    assert fresh.load("norm", BF16, 0) is module
    assert fresh.resolution("norm", BF16, 0).path == world.opened[0]
    with pytest.raises(KeyError):
        fresh.resolution("norm", {"dtype": "f16"}, 0)


def test_first_calls_of_many_threads_load_once(world):
    world.provide("p", "9.0")
    fresh = world.loader()
    slow = library.load_library

    def open_slowly(path, major):
        time.sleep(0.05)
        return slow(path, major)

    world.patch.setattr(library, "load_library", open_slowly)
    start = threading.Barrier(16)
    got = []

    def call():
        start.wait()
        got.append(fresh.load("norm", BF16, 0))

    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(world.opened) == 1
    assert len(got) == 16
    assert set(map(id, got)) == {id(got[0])}


def test_a_fork_after_import_loads(world):
    world.provide("p", "9.0")
    fresh = world.loader()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if isinstance(fresh.load("norm", BF16, 0), FakeModule) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert world.opened == []


# -- version skew, policy, and what nobody has ----------------------------------------------------


def test_another_version_with_the_same_fingerprints_serves_without_a_word(world, caplog):
    root = world.provide("p", "9.0", version="0.0.1")
    assert world.loader().load("norm", BF16, 0).path == root / "sm90a/norm__dtype_bf16.so"
    assert messages(caplog) == []


def test_version_skew_is_warned_once_a_module_with_one_command_as_fix(world, caplog):
    root = world.install("cache-cu13-sm90a", "9.0", version="0.0.1")
    text = (root / "manifest.json").read_text()
    for spec in world.specs("9.0"):
        text = text.replace(spec.fingerprint, "0" * 64)
    (root / "manifest.json").write_text(text)
    for spec in world.specs("9.0"):
        world.cached(spec)
    fresh = world.loader()
    assert fresh.load("norm", BF16, 0).path.is_relative_to(os.environ["PRECAST_CACHE_DIR"])
    fresh._loaded.clear()
    fresh.load("norm", BF16, 0)
    (warning,) = messages(caplog)
    wanted = world.spec().fingerprint[:12]
    assert warning == (
        f"provider (cache-cu13-sm90a 0.0.1, sm90a/norm__dtype_bf16.so): rejected: its "
        f"fingerprint 000000000000 is not the {wanted} of this precast {precast.__version__}: it "
        f"was built from other sources. Fix: pip install --force-reinstall "
        f"--no-deps precast-jit-cache-cu13-sm90a=={precast.__version__}"
    )
    fresh.load("norm", {"dtype": "f16"}, 0)
    _, other = messages(caplog)
    assert "(cache-cu13-sm90a 0.0.1, sm90a/norm__dtype_f16.so): rejected" in other


@pytest.mark.parametrize("how", ["PRECAST_JIT=error", "precast.freeze() was called"])
def test_a_policy_that_forbids_compiling(world, how):
    if how.startswith("PRECAST"):
        world.patch.setenv("PRECAST_JIT", "error")
    else:
        precast.freeze()
    fresh = world.loader()
    with pytest.raises(MissingKernelError) as caught:
        fresh.load("norm", BF16, 0)
    assert isinstance(caught.value, MissingJITCacheError)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.spec, JitSpec)
    assert caught.value.spec.name == "norm__dtype_bf16"
    assert str(caught.value) == (
        "no kernel norm__dtype_bf16 for cuda:0 (a GPU) (compute capability 9.0). Looked at:\n"
        f"  JIT cache ({os.environ['PRECAST_CACHE_DIR']}/v1): rejected: holds no build of "
        "norm__dtype_bf16\n"
        f"  JIT: rejected: compiling is forbidden ({how})\n"
        f"Fix: {modules_command({(13, 'sm90a'): '9.0a'})}"
    )


def test_frozen_and_forbidden_still_load_what_is_cached(world):
    cached = world.cached(world.spec())
    precast.freeze()
    world.patch.setenv("PRECAST_JIT", "error")
    assert world.loader().load("norm", BF16, 0).path == cached


def test_shapes_that_follow_from_the_target_come_from_a_device_s_own_alone(world):
    """A plan for the shared memory of 8.0 fits no kernel of 8.6."""
    world.patch.setattr(world, "specs", partial(world.specs, ops=("attention_plan",)))
    file = "attention_plan.so"
    root = world.provide("p", "8.0")
    world.loader()
    assert resolve({}, "8.0", "attention_plan").path == root / "sm80" / file
    for capability in ("8.6", "8.7", "8.9"):
        found = resolve({}, capability, "attention_plan")
        assert found.path is None
        assert f"sm80 serves 8.0, not {capability}" in rejections(found)[0]
    root = world.provide("q", "8.6")
    world.loader()
    for capability in ("8.6", "8.7"):
        assert resolve({}, capability, "attention_plan").path == root / "sm86" / file
    assert resolve({}, "8.9", "attention_plan").path is None


def test_an_unknown_gpu_gets_a_message(world):
    """No kernel is compiled for it: nobody has tried whether it would work."""
    world.provide("p", "9.0")
    with pytest.raises(UnsupportedTargetError) as caught:
        world.loader().load("norm", BF16, 3)
    text = str(caught.value)
    assert text.startswith("cuda:3 (a GPU) has compute capability 13.0, which no target of precast")
    assert "serves; legal: 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, 10.3, 11.0, 12.0, 12.1. Fix: " in text
    with pytest.raises(UnsupportedTargetError, match="no target of precast serves compute capab"):
        resolve(BF16, "13.0")


def test_legal_but_not_prebuilt_names_the_prebuilt_ones(world):
    document = copy.deepcopy(loader.plan_document())
    del document["modules"]["scale__dtype_f16"]
    world.patch.setattr(loader, "plan_document", lambda: document)
    world.patch.setattr(loader.plan().__class__, "_aot_names", lambda self, op: set())
    with pytest.raises(MissingKernelError) as caught:
        world.loader().load("scale", {"dtype": "f16"}, 0)
    text = str(caught.value)
    assert "Prebuilt configurations of scale: scale__dtype_f32, scale__dtype_bf16." in text
    assert "Fix: allow JIT" in text


def test_an_illegal_axis_names_the_legal_values(world):
    fresh = world.loader()
    with pytest.raises(
        ValueError, match="scale: dtype=f64 is not supported; legal: f16, bf16, f32"
    ):
        fresh.load("scale", {"dtype": "f64"}, 0)
    with pytest.raises(ValueError, match="scale has no axis 'size'; legal: dtype"):
        fresh.load("scale", {"dtype": "f32", "size": 1}, 0)
    with pytest.raises(ValueError, match="unknown op 'mul'"):
        fresh.load("mul", {}, 0)
    call = {"dtype_q": "f16", "dtype_kv": "bf16", "head_dim_qk": 64, "head_dim_vo": 64}
    with pytest.raises(ValueError, match="attention: dtype_q,dtype_kv=f16,bf16 is not supported"):
        fresh.load("attention", call, 0)


def test_a_joint_axis_is_resolved_from_the_shipped_plan_alone(world):
    """Only JIT reads the TOML files; a prebuilt module needs the plan of the wheel."""
    world.patch.setattr(world, "specs", partial(world.specs, ops=("attention",)))
    root = world.provide("p", "9.0")
    fresh = world.loader()
    assert fresh.axis_names("attention") == ["dtype_q", "dtype_kv", "head_dim_qk", "head_dim_vo"]
    world.patch.setattr(loader, "plan", lambda: pytest.fail("the files of the plan were read"))
    call = {"head_dim_vo": 128, "head_dim_qk": 192, "dtype_kv": "e4m3", "dtype_q": "f16"}
    name = "attention__dtype_q_f16__dtype_kv_e4m3__head_dim_qk_192__head_dim_vo_128"
    assert fresh.resolve("attention", call, "9.0").path == root / "sm90a" / f"{name}.so"


# -- opening --------------------------------------------------------------------------------------


def test_a_library_that_does_not_open_gives_the_linkers_message(tmp_path, monkeypatch):
    path = tmp_path / "m.so"
    path.write_bytes(b"not an ELF file" * 100)
    monkeypatch.setattr(library, "open_cudart", lambda *row: None)
    with pytest.raises(LoadError, match=rf"{path} was accepted but did not load: .*(header|ELF)"):
        library.load_library(path, 13)


def test_a_missing_export_is_named():
    class Empty:
        def get_function(self, name):
            raise AttributeError("no such thing")

    with pytest.raises(LoadError, match="the library has no function 'rmsnorm'"):
        library.get_function(Empty(), "rmsnorm")


def test_a_missing_libcudart_names_the_wheel(monkeypatch, tmp_path):
    from precast._runtime.cudart import open_cudart

    with pytest.raises(
        LoadError, match=r'libcudart.so.99 .*Fix: pip install "no-such-wheel==99.\*"'
    ):
        open_cudart("libcudart.so.99", "no-such-wheel")
