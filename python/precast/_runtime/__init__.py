# SPDX-License-Identifier: Apache-2.0
"""Finding, checking and loading modules, prebuilt or compiled."""
