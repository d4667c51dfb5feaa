#!/usr/bin/env bash
# Trains one run on all GPUs of this node, or of several nodes. The arguments are those of `gptexp train`.
#
#   launch/torchrun.sh experiment=gpt2_124m data.path='/data/*.txt'
#   NNODES=2 HEAD=node0:29500 JOB=a launch/torchrun.sh …      (run the same line on each node)
#
# NPROC is the number of ranks on each node: a number, `gpu` (one rank per GPU, the default) or `cpu` (one per CPU).
#
# torchrun passes SIGTERM, SIGINT and SIGUSR1 on to the ranks. They save a checkpoint and exit, and torchrun kills those
# that have not exited after PET_SHUTDOWN_TIMEOUT seconds. torch 2.11 ignores that variable and waits 30 seconds.
set -eu
if [ "${NNODES:-1}" != 1 ] && { [ -z "${HEAD:-}" ] || [ -z "${JOB:-}" ]; }; then
  echo "NNODES=$NNODES needs HEAD=host:port and JOB=name, the same on each node" >&2
  exit 2
fi
export PET_SHUTDOWN_TIMEOUT="${PET_SHUTDOWN_TIMEOUT:-300}"
exec torchrun \
  --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  --nnodes="${NNODES:-1}" \
  --nproc-per-node="${NPROC:-gpu}" \
  --rdzv-backend=c10d \
  --rdzv-endpoint="${HEAD:-localhost:0}" \
  --rdzv-id="${JOB:-$$}" \
  -m gptexp.train "$@"
