# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# To be sourced by steps that not every machine can run.

# Goes on where the machine can run it, ends the step with the reason where it really cannot, and fails where it only
# lacks something that ci/setup --dev installs. COMMAND --why-not tells: by status 1, 0 and 2, and the reason.
if_possible() {  # LABEL CLOSING COMMAND
  local status=0 reason
  reason=$("$3" --why-not) || status=$?
  [ $status -ne 2 ] || { printf 'error: %s\nhint: run ci/setup --dev\n' "$reason" >&2; exit 1; }
  [ $status -ne 0 ] || { echo "$1: skipped, because this machine cannot: $reason" | tee "$2"; exit 0; }
}
