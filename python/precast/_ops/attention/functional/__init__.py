# SPDX-License-Identifier: Apache-2.0
"""Attention without a plan by the caller: over a block table, or over ragged keys and values."""
