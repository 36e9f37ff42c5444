# SPDX-License-Identifier: Apache-2.0
"""The script that reads the signatures of FlashInfer, on a package made up here."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from ci_support import script

api = script("flashinfer_api")

FILES = {
    "__init__.py": "from .norm import rmsnorm as rmsnorm, norm_again\n"
    "from .decode import Wrapper\nfrom .gemm.inner import mm\nfrom torch import other\n",
    "norm/__init__.py": "from .inner import rmsnorm\nfrom ..utils import helper\n"
    "norm_again = rmsnorm\ndef _private(x): pass\ndef gen_norm_module(): pass\n"
    "def norm(x: int, /, *rest, eps: float = 1e-6, **more) -> None: pass\n",
    "norm/inner.py": "def rmsnorm(x: T, out: T | None = None, dtype=torch.bfloat16): pass\n",
    "decode.py": """
if CUDA:
    from typing import overload
class Wrapper:
    limit = 3
    def __init__(self, kv_layout="NHD"): pass
    @overload
    def run(self, q: int) -> int: ...
    def run(self, q, *, lse=False): pass
    def _inner(self): pass
    @property
    def size(self): pass
    @classmethod
    def get(cls, key): pass
    forward = run
class Layout(Enum):
    NHD = 1
try:
    def late(a): pass
except ImportError:
    pass
""",
    "utils.py": "def helper(x): pass\n",
    "gemm/inner.py": "def mm(a, b, *, out=None): pass\n",
    "mla/__init__.py": "from ._core import *\n",
    "mla/_core.py": "def decode(q, kv=None): pass\ndef _hidden(): pass\n",
}


def test_signatures_by_public_name(tmp_path: Path) -> None:
    wheel = tmp_path / "flashinfer_python-0.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(f"flashinfer/{name}", text)
    output = tmp_path / "facts.json"
    assert api.main([str(wheel), "-o", str(output)]) == 0
    facts = json.loads(output.read_text())
    assert facts["version"] == "0.9.9"
    methods = {
        "__init__": "self, kv_layout='NHD'",
        "run": "self, q, *, lse=False",
        "get": "key",
        "forward": "self, q, *, lse=False",
    }
    assert facts["names"] == {
        "Wrapper": "= decode.Wrapper",
        "decode.Wrapper": methods,
        "decode.late": "a",
        "mla.decode": "q, kv=None",
        "mm": "a, b, *, out=None",
        "norm.norm": "x, /, *rest, eps=1e-06, **more",
        "norm.norm_again": "x, out=None, dtype=torch.bfloat16",
        "norm.rmsnorm": "= norm.norm_again",
        "norm_again": "= norm.norm_again",
        "rmsnorm": "= norm.norm_again",
        "utils.helper": "x",
    }
