# SPDX-License-Identifier: Apache-2.0
"""Compiling modules: toolchain, commands, cache and policy."""
