# SPDX-License-Identifier: Apache-2.0
"""The overlay: an installed FlashInfer whose functions are precast's, where precast has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from precast.shim.overlay import OVERLAID, ops, overlay

ROOT = Path(__file__).resolve().parents[3]
PTH = ROOT / "python" / "precast_as_flashinfer.pth"

#: What matters of FlashInfer: modules that use one another, one that is imported later, enums.
FLASHINFER = {
    "__init__.py": "from . import cascade, utils\n"
    "from .decode import BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper\n"
    "from .norm import own_norm as own_norm, rmsnorm as rmsnorm\n"
    "__version__ = '0.7.2'\n",
    "norm/__init__.py": "def rmsnorm(): return 'theirs'\ndef own_norm(): return 'theirs'\n"
    "from .inner import fused_add_rmsnorm\n",
    "norm/inner.py": "def fused_add_rmsnorm(): return 'theirs'\n",
    "decode.py": "from .norm import rmsnorm\n"
    "class BatchDecodeWithPagedKVCacheWrapper:\n    normed = staticmethod(rmsnorm)\n",
    "cascade.py": "from .decode import BatchDecodeWithPagedKVCacheWrapper as Base\n"
    "class Derived(Base): pass\n"
    "def merge_state(): return 'theirs'\n",
    "rope.py": "def apply_rope(): return 'theirs'\n",
    "utils.py": "class MaskMode: pass\ndef get_compute_capability(): return 'theirs'\n",
}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with such a FlashInfer and what the core's wheel puts beside it."""
    folder = tmp_path_factory.mktemp("site")
    for name, text in FLASHINFER.items():
        file = folder / "flashinfer" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / PTH.name).write_text(PTH.read_text())
    return folder


def started(site: Path, code: str, value: str | None = None) -> subprocess.CompletedProcess[str]:
    """A process whose Python reads the .pth files of the folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    if value is not None:
        env["PRECAST_AS_FLASHINFER"] = value
    start = f"import site; site.addsitedir({str(site)!r})\n"
    argv = [sys.executable, "-c", start + code]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def answer(site: Path, code: str, value: str | None = None) -> str:
    done = started(site, code, value)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SHOW = """
import sys
import flashinfer
from flashinfer import decode, norm, rmsnorm
import flashinfer.rope
both = {
    "rmsnorm": rmsnorm, "norm.rmsnorm": norm.rmsnorm, "fused": norm.fused_add_rmsnorm,
    "own": norm.own_norm, "rope": flashinfer.rope.apply_rope,
    "decode": decode.BatchDecodeWithPagedKVCacheWrapper,
    "capability": flashinfer.utils.get_compute_capability,
}
print(" ".join(name for name, value in both.items() if value.__module__.startswith("precast.")))
"""


def test_nothing_happens_without_the_variable(site):
    code = SHOW + "print([name for name in sys.modules if 'precast' in name])"
    assert answer(site, code) == "[]"


def test_names_that_precast_has_ops_of_are_its_own(site):
    done = started(site, SHOW, "overlay")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["rmsnorm", "norm.rmsnorm", "fused", "rope", "decode"]
    assert "4 functions of flashinfer 0.7.2 are precast" in done.stderr


def test_modules_can_be_chosen(site):
    assert answer(site, SHOW, "overlay:norm").split() == ["rmsnorm", "norm.rmsnorm", "fused"]
    assert answer(site, SHOW, "overlay:rope").split() == ["rope"]


def test_own_code_of_flashinfer_keeps_its_own_names(site):
    code = """
import flashinfer
from flashinfer.cascade import Derived
print(Derived.__mro__[1].__module__, Derived.normed(), flashinfer.cascade.merge_state.__module__)
"""
    said = answer(site, code, "overlay")
    assert said == "flashinfer.decode theirs precast._ops.attention.cascade.merge"


def test_modules_know_their_own_loaders(site):
    code = """
import inspect
import flashinfer.norm
print(type(flashinfer.norm.__loader__).__name__, type(flashinfer.norm.__spec__.loader).__name__)
print("own_norm" in inspect.getsource(flashinfer.norm))
"""
    assert answer(site, code, "overlay").split() == ["SourceFileLoader", "SourceFileLoader", "True"]


def test_an_overlay_of_what_is_imported_can_be_removed(site):
    code = """
import flashinfer
from precast.flashinfer import overlay, remove_overlay
theirs = flashinfer.rmsnorm
overlay("norm")
print(flashinfer.rmsnorm is theirs, flashinfer.norm.rmsnorm is theirs)
try:
    overlay()
except RuntimeError as error:
    print(error)
remove_overlay()
remove_overlay()
print(flashinfer.rmsnorm is theirs, flashinfer.norm.rmsnorm is theirs)
"""
    said = answer(site, code).splitlines()
    assert (said[0], said[2]) == ("False False", "True True")
    assert said[1].startswith("flashinfer is overlaid already")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("shim", "PRECAST_AS_FLASHINFER='shim' is unknown; legal: overlay, or overlay:<modules"),
        ("overlay:mamba", "precast has no ops of flashinfer.mamba; legal: activation, "),
    ],
)
def test_a_wrong_value_is_named_and_python_starts(site, value, words):
    done = started(site, "print('started')", value)
    assert done.stdout.strip() == "started"
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_shim_is_left_alone(site):
    code = """
import precast.flashinfer
precast.flashinfer.install()
import flashinfer
print(flashinfer.rmsnorm is precast.rmsnorm, flashinfer.__version__)
"""
    said = answer(site, code, "overlay")
    assert said.startswith("True 0.7.2.post1+precast.")


def test_ops_are_functions_and_classes_of_every_overlaid_module():
    with_ops = {path: ops(path) for path in OVERLAID}
    assert "fused_topk_deepseek" in with_ops["fused_moe"]
    assert not {"RoutingMethodType", "get_w2_permute_indices_with_cache"} & {*with_ops["fused_moe"]}
    assert {"rmsnorm", "fused_add_rmsnorm"} <= with_ops["norm"].keys()
    assert "single_prefill_with_kv_cache_return_lse" in with_ops["prefill"]
    assert "SfLayout" in with_ops["quantization"]
    assert not with_ops["jit.env"]
    assert "CompilationContext" not in with_ops["compilation_context"]
    with pytest.raises(ValueError, match=r"no ops of flashinfer.utils; legal: .*\brope\b"):
        overlay("utils")
