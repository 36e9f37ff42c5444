# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N815 (names are FlashInfer's)
"""What may follow an all-reduce in the same kernel."""

from __future__ import annotations

from typing import NamedTuple


class AllReduceFusionPattern:
    """What :func:`allreduce_fusion` computes: integers, with FlashInfer's names and values.

    0, 1, 2, 4 and 8 to 11 work here. FP4 output (3, 5) and the forms for mixtures of experts (6, 7,
    12) raise ValueError.
    """

    #: The sum of all ranks' inputs.
    kAllReduce = 0
    #: Then the residual is added and each row is normalised.
    kARResidualRMSNorm = 1
    #: Then the result is quantised to FP8 with one given scale.
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    #: As 2, and the norm is written, too.
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    #: FP8 with a power of two for each group of a row's columns.
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    #: As 8, and the norm is written, too.
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    #: FP8 with a scale for each row.
    kARResidualRMSNormDynamicFP8Quant = 10
    #: As 10, and the norm is written, too.
    kARResidualRMSNormOutDynamicFP8Quant = 11
    kMoEFinalizeARResidualRMSNormFP8Quant = 12


class QuantizationSFLayout:
    """Layouts of block scales of FP4 output, which no pattern here has; for FlashInfer's names."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


#: How scales are found, as C++ counts them (QuantMode of comm/allreduce_norm.cuh).
NO_QUANT, TENSOR, GROUP, TOKEN = range(4)


class Fusion(NamedTuple):
    """What a pattern with a norm writes."""

    mode: int
    writes_norm: bool


FUSIONS = {
    AllReduceFusionPattern.kARResidualRMSNorm: Fusion(NO_QUANT, True),
    AllReduceFusionPattern.kARResidualRMSNormFP8Quant: Fusion(TENSOR, False),
    AllReduceFusionPattern.kARResidualRMSNormOutFP8Quant: Fusion(TENSOR, True),
    AllReduceFusionPattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant: Fusion(GROUP, False),
    AllReduceFusionPattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant: Fusion(GROUP, True),
    AllReduceFusionPattern.kARResidualRMSNormDynamicFP8Quant: Fusion(TOKEN, False),
    AllReduceFusionPattern.kARResidualRMSNormOutDynamicFP8Quant: Fusion(TOKEN, True),
}


def fusion_of(function: str, pattern: int) -> Fusion:
    """What a pattern other than kAllReduce writes; ValueError for one that is not there."""
    try:
        return FUSIONS[pattern]
    except (KeyError, TypeError):
        raise ValueError(
            f"{function}: pattern must be 0, 1, 2, 4, 8, 9, 10 or 11, got {pattern!r}. "
            f"Fix: use a pattern without FP4 output and without a mixture of experts"
        ) from None
