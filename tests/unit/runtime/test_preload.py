# SPDX-License-Identifier: Apache-2.0
"""preload: what it loads, from where, and what it says of the rest."""

from __future__ import annotations

import re

import pytest
import torch

import precast
from precast._runtime import loader
from precast.errors import MissingKernelError, UnsupportedConfigError, UnsupportedTargetError


@pytest.fixture
def provider(world):
    root = world.provide("p", "9.0")
    world.loader()
    return root


def names(loaded) -> set[str]:
    return {row.module for row in loaded}


def test_a_profile_or_a_part_of_it(world, provider):
    assert names(precast.preload(["norm"], profile="ci", device=0)) == {"norm__dtype_bf16"}
    loaded = precast.preload(["norm", "scale"], device=0)
    plan = loader.plan()
    assert names(loaded) == {s.name for s in plan.modules("core") if s.op in ("norm", "scale")}
    for row in loaded:
        assert row.path == provider / f"sm90a/{row.module}.so"
        assert row.source == "PRECAST_PROVIDER_PATH"
        assert row.seconds >= 0


@pytest.mark.parametrize("dtype", ["bf16", ["bf16"], ("bf16",), torch.bfloat16, [torch.bfloat16]])
def test_axis_values(world, provider, dtype):
    loaded = precast.preload(["norm", "scale"], device=0, dtype=dtype)
    assert names(loaded) == {"norm__dtype_bf16", "scale__dtype_bf16"}


def test_a_gpu_that_no_target_serves_is_an_error(world, provider):
    with pytest.raises(UnsupportedTargetError, match=r"capability 13.0, .* legal: 8.0, 8.6, 8.7"):
        precast.preload(device=3)


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        (None, AssertionError("Torch not compiled with CUDA enabled"), "the current CUDA device"),
        (None, RuntimeError("Found no NVIDIA driver on your system.\nMore."), "the current CUDA"),
        ("cuda", RuntimeError("No CUDA GPUs are available"), "device='cuda'"),
    ],
)
def test_without_a_gpu_the_error_says_what_is_missing(monkeypatch, device, error, words):
    def fails():
        raise error

    monkeypatch.setattr(torch.cuda, "current_device", fails)
    first = str(error).splitlines()[0].rstrip(".")
    with pytest.raises(RuntimeError, match=f"preload loads .* {words}.* none: {first}.*Fix: call"):
        precast.preload(["norm"], device=device)


def test_a_device_that_is_not_there(monkeypatch):
    def fails(*args):
        raise AssertionError("Invalid device id")

    monkeypatch.setattr(loader.loader, "check_device", fails)
    with pytest.raises(RuntimeError, match=r"GPU of device=7, and PyTorch finds none: Invalid dev"):
        precast.preload(["norm"], device=7)


def test_nothing_is_opened_twice(world, provider):
    precast.preload(["norm"], device=0)
    precast.preload(["norm"], device=0)
    assert len(world.opened) == len(set(world.opened))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ops": ["mul"]}, "unknown op 'mul'; legal: activation, "),
        ({"profile": "all"}, "unknown profile 'all'; legal: ci, core, full"),
        ({"size": 4}, "size is not an axis of these ops; legal: dtype"),
        ({"ops": ["norm"], "dtype": "f32"}, "dtype=f32 does not exist; legal: bf16, f16"),
        ({"dtype": torch.float64}, "dtype=torch.float64 does not exist; legal: bf16, f16, f32"),
        ({"device": "cpu"}, "device must be a CUDA device, got cpu"),
    ],
)
def test_what_does_not_exist(world, provider, arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        precast.preload(**{"device": 0, **arguments})
    assert world.opened == []


def test_one_op_must_be_in_a_list(world, provider):
    words = """ops must be a list of ops, got the string 'norm'. Fix: pass ['norm']"""
    with pytest.raises(TypeError, match=re.escape(words)):
        precast.preload("norm", device=0)


def test_all_misses_are_reported_at_once_and_the_others_are_loaded(world, provider):
    (provider / "sm90a/scale__dtype_f16.so").unlink()
    (provider / "sm90a/norm__dtype_f16.so").unlink()
    with pytest.raises(MissingKernelError) as caught:
        precast.preload(["norm", "scale"], device=0)
    paragraphs = str(caught.value).split("\n\n")
    assert {p.split()[2] for p in paragraphs} == {"scale__dtype_f16", "norm__dtype_f16"}
    assert caught.value.spec is not None
    assert len(world.opened) == 3


def test_after_freeze_what_was_preloaded_still_runs(world, provider):
    precast.preload(["norm"], profile="ci", device=0)
    precast.freeze()
    assert loader.loader.load("norm", {"dtype": "bf16"}, 0).path in world.opened


def test_an_op_for_other_gpus_is_left_out_unless_it_is_asked_for(world, provider):
    load = loader.loader.load

    def without_norm(op, axes, device):
        if op == "norm":
            raise UnsupportedConfigError("norm does not exist for sm90a")
        return load(op, axes, device)

    world.patch.setattr(loader.loader, "load", without_norm)
    world.patch.setattr(
        loader.plan().__class__,
        "aot_axes",
        lambda plan, profile: [("norm", {"dtype": "bf16"}), ("scale", {"dtype": "bf16"})],
    )
    assert names(precast.preload(device=0)) == {"scale__dtype_bf16"}
    with pytest.raises(UnsupportedConfigError, match="norm does not exist for sm90a"):
        precast.preload(["norm", "scale"], device=0)


def test_kernels_in_cute_dsl_are_left_out_where_no_build_has_them(world, provider):
    op = "moe_activation_cute_dsl"
    world.patch.setattr(
        loader.plan().__class__,
        "aot_axes",
        lambda plan, profile: [("norm", {"dtype": "bf16"}), (op, {"dtype": "bf16"})],
    )
    assert names(precast.preload(device=0)) == {"norm__dtype_bf16"}
    with pytest.raises(MissingKernelError, match=f"no kernel {op}__dtype_bf16"):
        precast.preload(["norm", op], device=0)
