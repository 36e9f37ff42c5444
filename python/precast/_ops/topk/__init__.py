# SPDX-License-Identifier: Apache-2.0
"""Top-k ops; :mod:`precast.topk` exports them."""
