#!/usr/bin/env bash
# Megatron on several GPU hosts, its gradients summed by servers on their DPUs. Runs one member of the job, in the
# foreground, until the job is over; start it on every machine, by ssh, pdsh, srun or a pod each:
#
#   where                        command
#   one DPU, or any host         cluster.sh scheduler
#   every DPU                    cluster.sh server
#   GPU host 0, 1, ...           cluster.sh worker 0 pretrain_gpt.py --num-layers 24 ...      (then 1, ...)
#
# The same training on stock Megatron, to compare, needs neither scheduler nor servers:
#
#   GPU host 0, 1, ...           cluster.sh stock 0 pretrain_gpt.py --num-layers 24 ...
#
# GPU hosts need bps_rdma and Megatron in PYTHON. DPUs need the binaries bps-scheduler and bps-server alone, on PATH.
# Scheduler and servers serve one job: start them anew for the next one, also after a failure. Members wait
# BPS_JOIN_TIMEOUT seconds (60) for each other. All BPS_ and NCCL_ variables (docs/settings.md) reach every member.
#
# Settings, the same on all machines:
#   HEAD        address of GPU host 0, where torchrun's ranks meet
#   SCHEDULER   address of the machine with the scheduler
#   HOSTS       number of GPU hosts
#   SERVERS     number of servers; as many as GPU hosts at least, or their links are the bottleneck
#   BPS_SECRET  random text that proves who belongs to the job: openssl rand -hex 32
#   PER_HOST    ranks of each GPU host (8)
#   PORT        of torchrun on HEAD (29500)
#   BPS_PORT    of the scheduler on SCHEDULER (9010)
#   PYTHON      of the GPU hosts (python3)
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
}

role=${1:-}
: "${PER_HOST:=8}" "${PORT:=29500}" "${BPS_PORT:=9010}" "${PYTHON:=python3}"

train() { # NODE COMMAND...
  local node=${1:-}
  [[ $node =~ ^[0-9]+$ && $# -ge 2 ]] || usage
  shift
  # One life: servers end with the job, so a restart is a new job.
  exec "$PYTHON" -m torch.distributed.run --nnodes "${HOSTS:?}" --node-rank "$node" --nproc-per-node "$PER_HOST" \
    --master-addr "${HEAD:?}" --master-port "$PORT" --max-restarts 0 "$@"
}

join() { # what all members of the job must know
  export BPS_NUM_SERVERS=${SERVERS:?} BPS_ROOT_URI=${SCHEDULER:?} BPS_ROOT_PORT=$BPS_PORT BPS_SECRET=${BPS_SECRET:?}
  export BPS_JOB_ID=${BPS_JOB_ID:-megatron}
}

case $role in
  scheduler | server)
    join
    # Workers are counted as machines times ranks of each.
    export BPS_ROLE=$role BPS_NUM_WORKERS=${HOSTS:?} BPS_LOCAL_SIZE=$PER_HOST
    exec "bps-$role"
    ;;
  worker)
    join
    [[ $# -ge 3 ]] || usage
    train "$2" -m bps_rdma.megatron "${@:3}" --use-dpu-reduce
    ;;
  stock)
    [[ $# -ge 3 ]] || usage
    train "$2" "${@:3}"
    ;;
  *) usage ;;
esac
