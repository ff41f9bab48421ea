#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs Megatron on several GPU hosts with gradients that are summed by servers on their DPUs. Runs one member of the job
# in the foreground until the job ends. Start it on every machine, for example by ssh, pdsh, srun, or one pod each:
#
#   where                        command
#   one DPU, or any host         cluster.sh scheduler
#   every DPU                    cluster.sh server
#   GPU host 0, 1, ...           cluster.sh worker 0 pretrain_gpt.py --num-layers 24 ...      (then 1, ...)
#
# To compare, train on stock Megatron, which needs neither scheduler nor servers:
#
#   GPU host 0, 1, ...           cluster.sh stock 0 pretrain_gpt.py --num-layers 24 ...
#
# PYTHON on GPU hosts needs bps_rdma and Megatron. DPUs need only the binaries bps-scheduler and bps-server, on PATH.
# The scheduler and the servers serve one job: start them again for the next one, also after a failure. Members wait
# BPS_JOIN_TIMEOUT seconds (60) for each other. All BPS_ and NCCL_ variables (docs/settings.md) are passed on.
#
# Settings, the same on all machines:
#   HEAD        address of GPU host 0, which torchrun uses for its rendezvous
#   SCHEDULER   address of the machine with the scheduler
#   HOSTS       number of GPU hosts
#   SERVERS     number of servers; with fewer than GPU hosts, the servers' links are the bottleneck
#   BPS_SECRET  the secret that members of the job share: openssl rand -hex 32
#   PER_HOST    ranks of each GPU host (8)
#   PORT        of torchrun on HEAD (29500)
#   SCHEDULER_PORT  of the scheduler on SCHEDULER (9010)
#   PYTHON      of the GPU hosts (python3)
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^set /d;/SPDX/d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
}

role=${1:-}
: "${PER_HOST:=8}" "${PORT:=29500}" "${SCHEDULER_PORT:=9010}" "${PYTHON:=python3}"

train() { # NODE COMMAND...
  local node=${1:-}
  [[ $node =~ ^[0-9]+$ && $# -ge 2 ]] || usage
  shift
  # No restarts: servers end with the job, so a restart is a new job.
  exec "$PYTHON" -m torch.distributed.run --nnodes "${HOSTS:?}" --node-rank "$node" --nproc-per-node "$PER_HOST" \
    --master-addr "${HEAD:?}" --master-port "$PORT" --max-restarts 0 "$@"
}

join() { # settings of all members of the job
  export BPS_NUM_SERVERS=${SERVERS:?} BPS_ROOT_URI=${SCHEDULER:?} BPS_ROOT_PORT=$SCHEDULER_PORT BPS_SECRET=${BPS_SECRET:?}
  export BPS_JOB_ID=${BPS_JOB_ID:-megatron}
}

case $role in
  scheduler | server)
    join
    # The number of workers is the number of machines times the ranks per machine.
    export BPS_ROLE=$role BPS_NUM_WORKERS=${HOSTS:?} BPS_LOCAL_SIZE=$PER_HOST
    exec "bps-$role"
    ;;
  worker)
    join
    [[ $# -ge 3 ]] || usage
    train "$2" -m bps_rdma.megatron "${@:3}" --use-bps
    ;;
  stock)
    [[ $# -ge 3 ]] || usage
    train "$2" "${@:3}"
    ;;
  *) usage ;;
esac
