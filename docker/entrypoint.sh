#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Start a command only if every kernel of the profile is prebuilt for this machine's GPU.
#
# PRECAST_DOCTOR_PROFILE  the profile (core); if empty, nothing is checked
set -eu
profile=${PRECAST_DOCTOR_PROFILE-core}
if [ -n "$profile" ]; then
  precast doctor --profile "$profile" >&2
fi
exec "$@"
