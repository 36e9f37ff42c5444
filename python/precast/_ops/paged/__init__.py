# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache."""
