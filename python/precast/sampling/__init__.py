# SPDX-License-Identifier: Apache-2.0
"""Sampling: draws from distributions and logits, filters, softmax, speculative decoding."""

from __future__ import annotations

from precast.sampling.filtered import min_p_sampling_from_probs as min_p_sampling_from_probs
from precast.sampling.filtered import (
    min_p_sampling_from_probs_reference as min_p_sampling_from_probs_reference,
)
from precast.sampling.filtered import top_k_sampling_from_probs as top_k_sampling_from_probs
from precast.sampling.filtered import (
    top_k_sampling_from_probs_reference as top_k_sampling_from_probs_reference,
)
from precast.sampling.filtered import top_p_sampling_from_probs as top_p_sampling_from_probs
from precast.sampling.filtered import (
    top_p_sampling_from_probs_reference as top_p_sampling_from_probs_reference,
)
from precast.sampling.fused import Sampled as Sampled
from precast.sampling.fused import sample as sample
from precast.sampling.fused import sample_reference as sample_reference
from precast.sampling.plain import sampling_from_logits as sampling_from_logits
from precast.sampling.plain import sampling_from_logits_reference as sampling_from_logits_reference
from precast.sampling.plain import sampling_from_probs as sampling_from_probs
from precast.sampling.plain import sampling_from_probs_reference as sampling_from_probs_reference
from precast.sampling.renorm import top_k_mask_logits as top_k_mask_logits
from precast.sampling.renorm import top_k_mask_logits_reference as top_k_mask_logits_reference
from precast.sampling.renorm import top_k_renorm_prob as top_k_renorm_prob
from precast.sampling.renorm import top_k_renorm_probs as top_k_renorm_probs
from precast.sampling.renorm import top_k_renorm_probs_reference as top_k_renorm_probs_reference
from precast.sampling.renorm import top_p_renorm_prob as top_p_renorm_prob
from precast.sampling.renorm import top_p_renorm_probs as top_p_renorm_probs
from precast.sampling.renorm import top_p_renorm_probs_reference as top_p_renorm_probs_reference
from precast.sampling.softmax import softmax as softmax
from precast.sampling.softmax import softmax_reference as softmax_reference
from precast.sampling.speculative import (
    chain_speculative_sampling as chain_speculative_sampling,
)
from precast.sampling.speculative import (
    chain_speculative_sampling_reference as chain_speculative_sampling_reference,
)
from precast.sampling.top_k_top_p import (
    top_k_top_p_sampling_from_logits as top_k_top_p_sampling_from_logits,
)
from precast.sampling.top_k_top_p import (
    top_k_top_p_sampling_from_logits_reference as top_k_top_p_sampling_from_logits_reference,
)
from precast.sampling.top_k_top_p import (
    top_k_top_p_sampling_from_probs as top_k_top_p_sampling_from_probs,
)
from precast.sampling.top_k_top_p import (
    top_k_top_p_sampling_from_probs_reference as top_k_top_p_sampling_from_probs_reference,
)
