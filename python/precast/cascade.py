# SPDX-License-Identifier: Apache-2.0
"""Attention over parts of the keys, put together."""

from __future__ import annotations

from precast._ops.attention.cascade.merge import merge_state as merge_state
from precast._ops.attention.cascade.merge import merge_state_in_place as merge_state_in_place
from precast._ops.attention.cascade.merge import merge_states as merge_states
