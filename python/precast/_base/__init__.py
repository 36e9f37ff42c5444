# SPDX-License-Identifier: Apache-2.0
"""The lowest layer: errors, names, settings, and what needs torch but no kernel."""
