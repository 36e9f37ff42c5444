# SPDX-License-Identifier: Apache-2.0
"""Merges of attention states."""
