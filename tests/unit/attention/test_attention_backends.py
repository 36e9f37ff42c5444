# SPDX-License-Identifier: Apache-2.0
"""What callers choose kernels by: backends, and jit_args of the variant with sinks."""

from __future__ import annotations

import logging

import pytest
import torch

import precast
from precast._ops.attention import backends
from precast.errors import BackendSupportedError

I32 = torch.int32
ONE = torch.tensor([0, 3], dtype=I32)
F32 = {"q_data_type": "float32"}
WRAPPERS = (
    precast.BatchDecodeWithPagedKVCacheWrapper,
    precast.BatchPrefillWithPagedKVCacheWrapper,
    precast.BatchPrefillWithRaggedKVCacheWrapper,
)
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda w: w.__name__)
#: As FlashInfer's own wrapper with sinks makes them, but for the code, which is not read.
SINKS = [
    *("uri", torch.float16, torch.float16, torch.float16, I32, 64, 64),
    *(["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", "struct AttentionSink;"),
]
KWARGS = {"use_sliding_window": False, "pos_encoding_mode": 0}

pytestmark = pytest.mark.usefixtures("reference_mode")


@pytest.fixture
def capability(monkeypatch):
    """Say what GPU every device is."""

    def be(major, minor):
        monkeypatch.setattr(backends, "get_compute_capability", lambda device: (major, minor))

    return be


def workspace():
    return torch.empty(1024, dtype=torch.uint8)


def planned(kind, **options):
    """A wrapper of three queries, or one of a decode, over three tokens."""
    wrapper = kind(workspace(), **options)
    if kind is WRAPPERS[2]:
        wrapper.plan(ONE, ONE, 4, 2, 64, causal=True, **F32)
    else:
        table = ONE // 3, ONE[:1], ONE[1:]
        rows = () if kind is WRAPPERS[0] else (ONE,)
        wrapper.plan(*rows, *table, 4, 2, 64, 3, **({"causal": True} if rows else {}), **F32)
    return wrapper


def call(kind):
    g = torch.Generator().manual_seed(2)
    q = torch.randn(1 if kind is WRAPPERS[0] else 3, 4, 64, generator=g)
    k, v = torch.randn(2, 3, 2, 64, generator=g)
    return (q, k, v) if kind is WRAPPERS[2] else (q, (k.unsqueeze(0), v.unsqueeze(0)))


# -- backends -------------------------------------------------------------------------------------


@wrappers
def test_fa3_runs_what_hopper_lacks_on_other_kernels_and_the_log_says_so_once(wrapper, caplog):
    backends.note_fa3.cache_clear()
    with caplog.at_level(logging.INFO, "precast"):
        made = [planned(wrapper, backend="fa3") for _ in range(2)]
    (line,) = caplog.messages
    assert line.startswith("backend='fa3': the kernels for Hopper lack what a plan asks for")
    assert torch.equal(made[0].run(*call(wrapper)), planned(wrapper).run(*call(wrapper)))
    # What engines choose the arguments of _cached_module.plan() by.
    assert [w._backend for w in (*made, planned(wrapper))] == ["fa3", "fa3", "fa2"]


def test_fa3_is_for_one_compute_capability(capability):
    device = torch.device("cuda", 1)
    capability(9, 0)
    backends.check_backend("f", "fa3", device)
    for other in ((8, 0), (8, 9), (10, 0), (12, 0)):
        capability(*other)
        with pytest.raises(BackendSupportedError, match="f: backend='fa3' is for compute cap"):
            backends.check_backend("f", "fa3", device)
        backends.check_backend("f", "fa2", device)
        backends.check_backend("f", "auto", device)


def test_one_request():
    q, k, v = call(WRAPPERS[2])
    single = precast.single_prefill_with_kv_cache
    assert torch.equal(single(q, k, v, backend="fa3"), single(q, k, v))
    assert single.is_backend_supported("fa3", 90)
    assert not any(single.is_backend_supported("fa3", cc) for cc in (80, 89, 100, 120))
    assert single.is_backend_supported("fa2", 80)
    single(q, k, v, backend="auto")
    assert list(single.suitable_auto_backends) == ["fa2"]


# -- variants -------------------------------------------------------------------------------------


@wrappers
@pytest.mark.parametrize("sequence", [list, tuple])
def test_the_variant_with_sinks_takes_them_by_position(wrapper, sequence):
    sink = torch.tensor([0.5, -1.0, 2.0, -torch.inf])
    plain = planned(wrapper)
    plain._sinks, plain._sm_scale = sink, 0.3
    want = plain.run(*call(wrapper), return_lse=True)
    made = planned(wrapper, backend="fa2", jit_args=sequence(SINKS))
    torch.testing.assert_close(made.run(*call(wrapper), sink, 0.3, return_lse=True), want)
    torch.testing.assert_close(made.run_return_lse(*call(wrapper), sink, 0.1, q_scale=3.0), want)
    assert torch.equal(made.run(*call(wrapper)), planned(wrapper).run(*call(wrapper)))


@pytest.mark.parametrize("wrapper", WRAPPERS[1:], ids=lambda w: w.__name__)
def test_what_the_variant_is_compiled_for_is_said_by_plans(wrapper):
    assert planned(wrapper, jit_args=SINKS, jit_kwargs=KWARGS)._takes_sinks
    with pytest.raises(ValueError, match=r"jit_kwargs must not have a pos_encoding_mode, got 1"):
        wrapper(workspace(), jit_args=SINKS, jit_kwargs={"pos_encoding_mode": 1})


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (("x",), TypeError, "sink must be a torch.Tensor, got str"),
        ((None, "x"), TypeError, "sm_scale must be a number, got str 'x'"),
        ((None, 1.0, 2.0), TypeError, "takes sink and sm_scale by position, got 3 arguments"),
        ((torch.zeros(3),), ValueError, r"sinks must have shape \[4\], got \[3\]"),
    ],
)
@wrappers
def test_wrong_arguments_of_the_variant(wrapper, args, error, words):
    made = planned(wrapper, jit_args=SINKS)
    q, *kv = call(wrapper)
    out = torch.full_like(q, 7.0)
    with pytest.raises(error, match=words):
        made.run(q, *kv, *args, out=out)
    assert out.eq(7).all()


@wrappers
@pytest.mark.parametrize(
    "jit_args",
    [
        ["name"],
        [*SINKS, "more"],
        [*SINKS[:11], "FlashSigmoid", SINKS[12]],
        [*SINKS[:7], ["sink", "scale"], *SINKS[8:]],
        [*SINKS[:9], [], *SINKS[10:]],
    ],
    ids=["short", "long", "name", "tensors", "numbers"],
)
def test_other_code_of_the_caller(wrapper, jit_args):
    words = r"jit_args must be None, .* Fix: .* precast\.jit\.gen_jit_spec"
    with pytest.raises(NotImplementedError, match=words):
        wrapper(workspace(), jit_args=jit_args)


@wrappers
def test_without_the_variant_nothing_is_taken_by_position(wrapper):
    with pytest.raises(TypeError, match="takes no further arguments by position, got 1"):
        planned(wrapper).run(*call(wrapper), torch.zeros(4))
