#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A prolog of Slurm (Prolog= in slurm.conf) for nodes that are to be pools of servers, such as DPUs or hosts without GPUs:
# it starts a pool where none runs. slurmd runs it as root, before the first task of each job. Where systemd starts the
# pool (examples/systemd), it is not needed. Nor is an epilog: a server ends with its job, and a pool without jobs sleeps.
#
# The file of keys belongs to the user of the pool: see docs/pools.md.
set -euo pipefail

keys=${BPS_POOL_KEY_FILE:-/etc/bps/pool-keys}
port=${BPS_POOL_PORT:-9030}
log=${POOL_LOG:-/var/log/bps-pool.log}

[ -e "$keys" ] || exit 0                                              # nodes without keys are no pools
if (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then exit 0; fi # there is one

# In a session of its own: slurmd ends what a prolog leaves behind. Nothing of the job's environment is for the pool.
setsid --fork setpriv --reuid "$(stat --format %u "$keys")" --regid "$(stat --format %g "$keys")" --clear-groups \
  env -i PATH="$PATH" BPS_POOL_KEY_FILE="$keys" BPS_POOL_PORT="$port" bps-server --pool < /dev/null >> "$log" 2>&1
