#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Start a command only where every kernel of the profile is there for this machine's GPU.
#
# PRECAST_DOCTOR_PROFILE  the profile (core); empty: do not ask
set -eu
profile=${PRECAST_DOCTOR_PROFILE-core}
if [ -n "$profile" ]; then
  precast doctor --profile "$profile" >&2
fi
exec "$@"
