# SPDX-License-Identifier: Apache-2.0
"""The example of a custom kernel, as far as it goes without a compiler, and its page."""

from __future__ import annotations

from pathlib import Path

import custom_kernel
import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_op_runs_on_the_cpu_and_its_fake_function_agrees(dtype):
    x = torch.tensor([[-2.0, 0.0, 3.0], [float("nan"), float("inf"), -0.5]], dtype=dtype)
    want = torch.tensor([[0.0, 0.0, 9.0], [float("nan"), float("inf"), 0.0]], dtype=dtype)
    torch.testing.assert_close(custom_kernel.squared_relu(x), want, equal_nan=True)
    for argument in (x, x.T, x[:, :0]):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(custom_kernel.squared_relu, (argument,), test_utils=checks)


def test_the_spec_is_for_the_target_of_a_gpu():
    spec = custom_kernel.spec("8.6")
    assert (spec.arch.name, spec.exports) == ("sm86", ("squared_relu",))
    assert spec.sources == (str(ROOT / "examples" / "custom_kernel.cu"),)


def test_a_page_shows_files_whole_but_for_the_licence(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from sitegen import inserts

    page = (ROOT / "docs" / "custom_kernels.md").read_text(encoding="utf-8")
    shown = inserts.filled(page)
    for name, language in (("custom_kernel.cu", "cpp"), ("custom_kernel.py", "python")):
        text = (ROOT / "examples" / name).read_text(encoding="utf-8").partition("\n")[2]
        assert f'```{language} title="examples/{name}"\n{text}```\n' in shown
    assert "SPDX" not in shown
