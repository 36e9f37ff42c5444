# SPDX-License-Identifier: Apache-2.0
"""Prefill beside decode, in tensors or caches of their own."""
