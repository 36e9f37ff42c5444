# SPDX-License-Identifier: Apache-2.0
"""Names that engines read when they start, and that precast itself does not have.

What is plain Python works. What needs a kernel that precast lacks raises, and is there only for an
engine that does not start without the name.
"""
