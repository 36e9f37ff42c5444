# SPDX-License-Identifier: Apache-2.0
"""An installed FlashInfer with precast's ops in it: who computes, and whether it is right.

Each test asks a fresh process, which has the variable as a user sets it and FlashInfer as it is
installed. Calls are counted where precast logs them, so that FlashInfer's own kernels cannot pass.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)

#: A checkout on ``PYTHONPATH`` has no ``.pth`` file that Python reads, so this does what it does.
START = """
import json, sys
if not any(type(f).__name__ == "_OverlayFinder" for f in sys.meta_path):
    from precast.shim.overlay import overlay_from_environment
    overlay_from_environment()
import flashinfer
if hasattr(flashinfer, "__precast__"):
    print(json.dumps({"skip": "flashinfer is precast's own package, not FlashInfer"}))
    raise SystemExit
"""

WHO = """
from types import ModuleType
from precast.shim.overlay import OVERLAID, ops

has = set().union(*(ops(path) for path in OVERLAID))
found = {"precast": [], "flashinfer": [], "mistaken": [], "file": flashinfer.__file__}
for name, value in vars(flashinfer).items():
    if name.startswith("_") or isinstance(value, ModuleType) or not callable(value):
        continue
    home = getattr(getattr(value, "func", value), "__module__", None) or ""
    is_ours = home.startswith("precast.")
    found["precast" if is_ours else "flashinfer"].append(name)
    if is_ours != (name in has):
        found["mistaken"].append(name)
print(json.dumps(found))
"""

CALLS = """
import torch
from torch.nn.functional import silu

torch.manual_seed(5)
bf16 = dict(dtype=torch.bfloat16, device="cuda")
wrong = {}


def check(name, found, expected, tolerance=2e-2):
    gap = (found.double() - expected.double()).abs().max().item()
    if not gap <= tolerance * max(1.0, expected.double().abs().max().item()):
        wrong[name] = gap


# -- norm and activation ----------------------------------------------------------------------
x, w = torch.randn(37, 576, **bf16), torch.rand(576, **bf16) + 0.5
xd = x.double()
normed = xd * torch.rsqrt(xd.square().mean(-1, keepdim=True) + 1e-6) * w.double()
check("rmsnorm", flashinfer.rmsnorm(x, w), normed)
check("norm.rmsnorm", flashinfer.norm.rmsnorm(x, w), normed)
left, right = xd.chunk(2, -1)
check("silu_and_mul", flashinfer.activation.silu_and_mul(x), silu(left) * right)

# -- RoPE of two halves -----------------------------------------------------------------------
q, k = torch.randn(9, 4, 64, **bf16), torch.randn(9, 2, 64, **bf16)
positions = torch.arange(100, 109, dtype=torch.int32, device="cuda")
power = torch.arange(0, 64, 2, dtype=torch.float64, device="cuda") / 64
angles = (positions[:, None, None] * 1e4**-power).repeat(1, 1, 2)


def turned(t):
    a, b = t.double().chunk(2, -1)
    return t.double() * angles.cos() + torch.cat([-b, a], -1) * angles.sin()


for name, found, given in zip("qk", flashinfer.apply_rope_pos_ids(q, k, positions), (q, k)):
    check(f"apply_rope_pos_ids {name}", found, turned(given))

# -- paged decode: append keys and values, plan, run ------------------------------------------
lengths, page_size, heads, kv_heads, dim = [1, 16, 33], 16, 4, 2, 64
pages = [-(-n // page_size) for n in lengths]
indptr = torch.tensor([0, *pages], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
table = torch.randperm(sum(pages)).to(torch.int32).cuda()
last = torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32, device="cuda")
keys, values = torch.randn(2, sum(lengths), kv_heads, dim, **bf16)
cache = torch.full((sum(pages), 2, page_size, kv_heads, dim), torch.nan, **bf16)
owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(torch.int32).cuda()
place = torch.cat([torch.arange(n) for n in lengths]).to(torch.int32).cuda()
flashinfer.append_paged_kv_cache(keys, values, owner, place, cache, table, indptr, last)
query = torch.randn(3, heads, dim, **bf16)
decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
)
decode.plan(indptr, table, last, heads, kv_heads, dim, page_size, q_data_type=torch.bfloat16)
found = decode.run(query, cache)
for i, (start, n) in enumerate(zip([0, 1, 17], lengths)):
    mine = [t[start : start + n].double().repeat_interleave(2, dim=1) for t in (keys, values)]
    scores = torch.einsum("hd,nhd->hn", query[i].double(), mine[0]) / dim**0.5
    check(f"decode {i}", found[i], torch.einsum("hn,nhd->hd", scores.softmax(-1), mine[1]))

# -- sampling: of one likely token, and of a set ----------------------------------------------
probs = torch.full((64, 1000), 1e-7, device="cuda")
sure = torch.randint(1000, (64,), device="cuda")
probs.scatter_(1, sure[:, None], 1.0)
probs /= probs.sum(-1, keepdim=True)
check("top_p", flashinfer.sampling.top_p_sampling_from_probs(probs, 0.9), sure, 0)
probs = torch.rand(64, 1000, device="cuda").softmax(-1)
drawn = flashinfer.sampling.top_k_sampling_from_probs(probs, 5)
inside = (probs.topk(5).indices == drawn[:, None]).any(1)
check("top_k", inside, torch.ones_like(inside), 0)
torch.cuda.synchronize()
print(json.dumps({"wrong": wrong}))
"""

#: The public names that ``CALLS`` reaches, as precast's log of calls has them.
LOGGED = (
    "rmsnorm",
    "silu_and_mul",
    "apply_rope_pos_ids",
    "append_paged_kv_cache",
    "BatchDecodeWithPagedKVCacheWrapper.plan",
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "top_p_sampling_from_probs",
    "top_k_sampling_from_probs",
)
#: What FlashInfer has at its top level and precast does not.
THEIRS = ("trtllm_bf16_moe", "mm_fp4", "bmm_mxfp8")


def asked(code: str, *arguments: str, value: str = "overlay", **variables: str) -> dict[str, Any]:
    """What a fresh process with FlashInfer and the overlay prints at last."""
    done = subprocess.run(
        [sys.executable, "-c", START + code, *arguments],
        env={**os.environ, "PRECAST_AS_FLASHINFER": value, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if "skip" in found:
        pytest.skip(found["skip"])
    return found


def test_precast_computes_what_it_has(tmp_path: Path) -> None:
    log = tmp_path / "calls.log"
    found = asked(CALLS, PRECAST_LOGLEVEL="1", PRECAST_LOGDEST=str(log), PRECAST_JIT="error")
    assert found["wrong"] == {}
    text = log.read_text(encoding="utf-8")
    assert [name for name in LOGGED if name not in text] == []


def test_precast_computes_only_in_the_modules_that_are_named(tmp_path: Path) -> None:
    log = tmp_path / "calls.log"
    code = """
import torch
x = torch.randn(3, 64, device="cuda").half()
w = torch.ones(64, device="cuda").half()
normed = flashinfer.rmsnorm(x, w)
expected = torch.nn.functional.rms_norm(x.float(), (64,), eps=1e-6)
names = ["rmsnorm", "apply_rope_pos_ids", "merge_state"]
homes = [getattr(flashinfer, name).__module__.partition(".")[0] for name in names]
print(json.dumps({"gap": (normed.float() - expected).abs().max().item(), "homes": homes}))
"""
    variables = {"PRECAST_LOGLEVEL": "1", "PRECAST_LOGDEST": str(log), "PRECAST_JIT": "error"}
    found = asked(code, value="overlay:norm", **variables)
    assert found["homes"] == ["precast", "flashinfer", "flashinfer"]
    assert found["gap"] < 2e-2
    assert "precast.norm.rmsnorm" in log.read_text(encoding="utf-8")


@pytest.mark.without_gpu
def test_names_are_precasts_exactly_where_it_has_them() -> None:
    found = asked(WHO)
    assert found["mistaken"] == []
    tops = {name.partition(".")[0] for name in LOGGED}
    assert sorted(tops - {*found["precast"]}) == []
    assert sorted({*THEIRS} - {*found["flashinfer"]}) == []
    print(f"precast has {len(found['precast'])} names of {found['file']}")
    print(f"FlashInfer's own, {len(found['flashinfer'])}: {' '.join(sorted(found['flashinfer']))}")


@pytest.mark.without_gpu
def test_nothing_is_precasts_without_the_variable() -> None:
    found = asked(WHO, value="")
    assert found["precast"] == []
    assert {*THEIRS} <= {*found["flashinfer"]}
