# SPDX-License-Identifier: Apache-2.0
"""Sampling: draws from distributions and logits, filters, softmax, speculative decoding.

What its functions have in common:

**Rows.** ``probs`` and ``logits`` are ``[rows, vocabulary]``, float32, float16 or bfloat16, on a
CUDA device; the vocabulary has 1 to 2^20 tokens. Rows have unit stride, and any pitch. They need
not sum to 1; a negative probability has no mass, and minus infinity is a logit that is never drawn.

**Numbers by row.** Filters, temperatures and penalties are numbers for all rows, or 1-D tensors
with one for each row: int32 for ``top_k``, otherwise float32, to which other dtypes are converted
first. Values in tensors are not checked, because a call does not wait for the GPU.

**Filters.** Each keeps the tokens with at least a certain probability, so all that are as likely as
the last one that is kept are kept, too. Of several, a token has to pass all.

=========  ========================================  =================  ====================
Filter     Keeps                                     All                The likeliest alone
=========  ========================================  =================  ====================
``top_k``  the ``top_k`` likeliest                   below 1, or from   1
                                                     the vocabulary on
``top_p``  the likeliest that hold ``top_p`` of the  from 1 on          0 and below
           mass together
``min_p``  those with ``min_p`` of the largest       0 and below        from 1 on
           probability
=========  ========================================  =================  ====================

Thresholds are exact, that of top-p up to 2^-31 of the mass a token: nothing else is ever drawn.

**Rows that are no distribution** have a NaN, no mass, or infinite mass; as logits, a NaN, plus
infinity, or minus infinity alone. Their token is 0, and not valid where ``return_valid`` asks.

**Indices.** ``indices`` are ``[outputs]``, int32 or int64: the row that each output draws from. The
tokens have their dtype, and are int32 without them. Where there is no such row, the token is 0 and
not valid: a call does not wait for the GPU to reject it. Reference mode raises an ``IndexError``.

**Random numbers** are those of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011) by a seed, an offset and, but for the case below, the position of the output; 24
bits at each of four levels of an inverse CDF. Nothing else decides a token: neither the rows around
it, nor the size of the batch, nor timing, which is why ``deterministic`` has no effect.

- Without ``seed`` and ``offset``, a ``generator`` gives both and moves on: by default the device's
  own, else one of the device, or one of the CPU, which draws a seed for each call. While a CUDA
  graph is captured, and in ``torch.compile``, they are drawn on the device, so that each replay has
  numbers of its own: the generator is the default one, or one that the graph registered. Under
  ``torch.compile(fullgraph=True)`` it is the default one.
- ``seed`` and ``offset`` are both integers, or both 1-D tensors on the device, int64 or uint64,
  with one number or one for each output. Generators are then left alone. An offset serves one call:
  with the same seed, the next call takes another.
- **Equal seeds give equal tokens.** With a seed for each output, its position does not count: a
  request has the same tokens wherever it stands in a batch. So two outputs with equal seeds and
  equal offsets have the same random numbers, and equal rows then the same token. Requests that are
  to differ need seeds of their own.

All can be captured in CUDA graphs and compiled by ``torch.compile``, but for ``check_nan``, which
waits for the GPU. None is differentiable. Arguments that do not fit raise a ``ValueError`` before
anything is written: another device, dtype, shape or stride, a seed without an offset; what is no
tensor or number, a ``TypeError``.
"""

from __future__ import annotations

from precast._ops.sampling.from_rows import min_p_sampling_from_probs as min_p_sampling_from_probs
from precast._ops.sampling.from_rows import (
    min_p_sampling_from_probs_reference as min_p_sampling_from_probs_reference,
)
from precast._ops.sampling.from_rows import sampling_from_logits as sampling_from_logits
from precast._ops.sampling.from_rows import (
    sampling_from_logits_reference as sampling_from_logits_reference,
)
from precast._ops.sampling.from_rows import sampling_from_probs as sampling_from_probs
from precast._ops.sampling.from_rows import (
    sampling_from_probs_reference as sampling_from_probs_reference,
)
from precast._ops.sampling.from_rows import top_k_sampling_from_probs as top_k_sampling_from_probs
from precast._ops.sampling.from_rows import (
    top_k_sampling_from_probs_reference as top_k_sampling_from_probs_reference,
)
from precast._ops.sampling.from_rows import (
    top_k_top_p_sampling_from_logits as top_k_top_p_sampling_from_logits,
)
from precast._ops.sampling.from_rows import (
    top_k_top_p_sampling_from_logits_reference as top_k_top_p_sampling_from_logits_reference,
)
from precast._ops.sampling.from_rows import (
    top_k_top_p_sampling_from_probs as top_k_top_p_sampling_from_probs,
)
from precast._ops.sampling.from_rows import (
    top_k_top_p_sampling_from_probs_reference as top_k_top_p_sampling_from_probs_reference,
)
from precast._ops.sampling.from_rows import top_p_sampling_from_probs as top_p_sampling_from_probs
from precast._ops.sampling.from_rows import (
    top_p_sampling_from_probs_reference as top_p_sampling_from_probs_reference,
)
from precast._ops.sampling.fused import Sampled as Sampled
from precast._ops.sampling.fused import sample as sample
from precast._ops.sampling.fused import sample_reference as sample_reference
from precast._ops.sampling.rows import softmax as softmax
from precast._ops.sampling.rows import softmax_reference as softmax_reference
from precast._ops.sampling.rows import top_k_mask_logits as top_k_mask_logits
from precast._ops.sampling.rows import top_k_mask_logits_reference as top_k_mask_logits_reference
from precast._ops.sampling.rows import top_k_renorm_prob as top_k_renorm_prob
from precast._ops.sampling.rows import top_k_renorm_probs as top_k_renorm_probs
from precast._ops.sampling.rows import top_k_renorm_probs_reference as top_k_renorm_probs_reference
from precast._ops.sampling.rows import top_p_renorm_prob as top_p_renorm_prob
from precast._ops.sampling.rows import top_p_renorm_probs as top_p_renorm_probs
from precast._ops.sampling.rows import top_p_renorm_probs_reference as top_p_renorm_probs_reference
from precast._ops.sampling.speculative import (
    chain_speculative_sampling as chain_speculative_sampling,
)
from precast._ops.sampling.speculative import (
    chain_speculative_sampling_reference as chain_speculative_sampling_reference,
)
