# SPDX-License-Identifier: Apache-2.0
"""Attention between blocks of queries and blocks of keys, on the kernels for pages."""
