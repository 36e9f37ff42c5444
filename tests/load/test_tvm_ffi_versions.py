# SPDX-License-Identifier: Apache-2.0
"""One build of the modules serves every tvm-ffi of the range that build.toml states.

Engines pin exact versions. The modules here are built with the headers of the installed tvm-ffi,
released ones with those of the oldest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from build_support import CI_MODULES, PLAN, ROOT, Built, run

OLDEST = PLAN.config.build.tvm_ffi_min
PINNED = "0.1.11"  # by vLLM 0.33 and SGLang 0.5.23; vLLM 0.25 pins the oldest

#: examples/ffi_check.py, whose errors are ValueErrors, and then the other kinds of errors.
CHECKS = """
import runpy, sys
import torch, tvm_ffi
from precast._runtime.library import get_function, load_library
from precast.errors import LoadError
runpy.run_path(sys.argv[1], run_name="__main__")
module = load_library(sys.argv[2], 13)
for function, args in ((get_function(module, "scale"), ("x",)), (get_function, (module, "no"))):
    try:
        function(*args)
    except (TypeError, LoadError) as error:
        print(type(error).__name__)
print(tvm_ffi.__version__)
"""


@pytest.mark.parametrize("version", [OLDEST, PINNED])
def test_modules_answer_under_an_older_tvm_ffi(built: Built, version: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    run([*pip, tmp_path / "ffi", f"apache-tvm-ffi=={version}"])
    env = {
        "PYTHONPATH": f"{tmp_path / 'ffi'}:{ROOT / 'python'}",
        "PRECAST_PROVIDER_PATH": str(built.provider),
    }
    exports = sum(len(row.exports) for row in built.manifest.modules)
    assert len(built.manifest.modules) == len(CI_MODULES)
    scale = next(path for path in built.provider.rglob("scale__*.so"))
    example = ROOT / "examples" / "ffi_check.py"
    out = run([sys.executable, "-c", CHECKS, example, scale], env)
    assert f"{exports} functions checked" in out
    assert out.split()[-3:] == ["TypeError", "LoadError", version]


def test_released_modules_are_built_with_the_oldest_headers() -> None:
    pins = (ROOT / "ci" / "build-constraints.txt").read_text().splitlines()
    assert f"apache-tvm-ffi=={OLDEST}" in pins
