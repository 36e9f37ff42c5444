# SPDX-License-Identifier: Apache-2.0
"""Sampling ops; :mod:`precast.sampling` exports them."""
