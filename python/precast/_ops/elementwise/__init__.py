# SPDX-License-Identifier: Apache-2.0
"""Elementwise operators and copies."""
