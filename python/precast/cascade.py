# SPDX-License-Identifier: Apache-2.0
"""Attention over parts of the keys, put together: merges, and wrappers for shared prefixes."""

from __future__ import annotations

from precast._ops.attention.cascade.merge import merge_state as merge_state
from precast._ops.attention.cascade.merge import merge_state_in_place as merge_state_in_place
from precast._ops.attention.cascade.merge import merge_states as merge_states
from precast._ops.attention.cascade.shared_prefix import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper as BatchDecodeWithSharedPrefixPagedKVCacheWrapper,  # noqa: E501
)
from precast._ops.attention.cascade.shared_prefix import (
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper as BatchPrefillWithSharedPrefixPagedKVCacheWrapper,  # noqa: E501
)
from precast._ops.attention.cascade.wrapper import (
    MultiLevelCascadeAttentionWrapper as MultiLevelCascadeAttentionWrapper,
)
