# SPDX-License-Identifier: Apache-2.0
"""The configuration space: what `aot_configs/` declares, and the modules that follow from it."""
