# SPDX-License-Identifier: Apache-2.0
"""The version of precast; every distribution of the project reads it from here."""

__version__ = "0.1.0"
