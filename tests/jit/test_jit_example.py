# SPDX-License-Identifier: Apache-2.0
"""The example of a custom kernel compiles, loads and checks its arguments."""

from __future__ import annotations

import sys
from pathlib import Path

from jit_support import run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

#: Without a GPU, whatever this machine has; then the error of the C++ check, and nothing else.
PROGRAM = """
import sys, torch
torch.cuda.is_available = lambda: False
sys.path.insert(0, sys.argv.pop(1))
import custom_kernel
custom_kernel.main()
"""


def test_the_example_compiles_and_refuses_a_cpu_tensor(real, cache):
    done = run([sys.executable, "-c", PROGRAM, str(EXAMPLES), "--arch", "9.0"], real)
    assert done.returncode == 0, done.stderr
    compiled, refused = done.stdout.splitlines()
    assert compiled.startswith(f"compiled for 9.0: {cache}/")
    assert refused == "it refuses a CPU tensor: squared_relu: input must be a CUDA tensor"
    assert done.stderr.count("INFO: compiling squared_relu") == 1
