#!/usr/bin/env bash
# Trains the packaged demo target and heads: scripts/train_demo.sh [--only target|heads] [--quick]
# About an hour on two CPU cores; the result depends on the seed and the fixed step counts, not on the time taken.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
# Threads that wait without spinning leave the processor to whatever else the machine does.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
exec "$python" -m vllm_mtpc.train "$@"
