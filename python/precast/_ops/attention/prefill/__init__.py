# SPDX-License-Identifier: Apache-2.0
"""Prefill attention."""
