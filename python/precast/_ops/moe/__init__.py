# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts."""
