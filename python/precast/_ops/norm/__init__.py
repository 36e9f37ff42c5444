# SPDX-License-Identifier: Apache-2.0
"""Norms of rows."""
