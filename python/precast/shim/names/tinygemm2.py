# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's module ``tinygemm2``, which vLLM loads by its generator and calls by itself."""

from __future__ import annotations

from precast._base.torch import torch
from precast._ops.gemm.tinygemm import tinygemm_bf16


class Tinygemm2:
    """What the generator returns, and the loaded module: both have nothing left to compile."""

    name = "tinygemm2"

    def build_and_load(self) -> Tinygemm2:
        """Return the module; its kernel is loaded by the first call."""
        return self

    def tinygemm2_op(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        output: torch.Tensor,
        use_pdl: bool,
    ) -> None:
        """Call :func:`precast.gemm.tinygemm_bf16` with a bias."""
        tinygemm_bf16(input, weight, output, bias, use_pdl)

    def tinygemm2_nobias_op(
        self, input: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, use_pdl: bool
    ) -> None:
        """Call :func:`precast.gemm.tinygemm_bf16` without a bias."""
        tinygemm_bf16(input, weight, output, None, use_pdl)


def gen_tinygemm2_module() -> Tinygemm2:
    """Return what has the functions of FlashInfer's module ``tinygemm2``.

    Returns
    -------
    Tinygemm2
        ``build_and_load()`` gives the module.

    Examples
    --------
    >>> gen_tinygemm2_module().build_and_load().name
    'tinygemm2'
    """
    return Tinygemm2()
