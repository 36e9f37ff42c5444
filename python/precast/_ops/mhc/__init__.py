# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections; :mod:`precast.mhc` exports them."""
