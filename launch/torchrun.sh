#!/usr/bin/env bash
# Trains one run on all GPUs of this node, or of several nodes. The arguments are those of `gptexp train`.
#
#   launch/torchrun.sh experiment=gpt2_124m data.path='/data/*.txt'
#   NNODES=2 HEAD=node0:29500 JOB=a launch/torchrun.sh …      (run the same line on each node)
#
# NPROC is the number of ranks on each node: a number, `gpu` (one rank per GPU, the default) or `cpu` (one per CPU).
set -eu
if [ "${NNODES:-1}" != 1 ] && { [ -z "${HEAD:-}" ] || [ -z "${JOB:-}" ]; }; then
  echo "NNODES=$NNODES needs HEAD=host:port and JOB=name, the same on each node" >&2
  exit 2
fi
exec torchrun \
  --nnodes="${NNODES:-1}" \
  --nproc-per-node="${NPROC:-gpu}" \
  --rdzv-backend=c10d \
  --rdzv-endpoint="${HEAD:-localhost:0}" \
  --rdzv-id="${JOB:-$$}" \
  -m gptexp.train "$@"
