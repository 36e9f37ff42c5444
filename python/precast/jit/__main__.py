# SPDX-License-Identifier: Apache-2.0
"""``python -m precast.jit``: write the plan for other tools."""

from precast._jit.plan_files import main

if __name__ == "__main__":
    raise SystemExit(main())
