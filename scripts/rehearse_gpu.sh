#!/usr/bin/env bash
# Rehearses the start and the steps of a GPU engine on a machine without a GPU (tests/gpu_rehearsal).
#
#   scripts/rehearse_gpu.sh                           plain vLLM and a head of each kind, two minutes
#   scripts/rehearse_gpu.sh HEAD [HEAD ...] [options] "plain", packaged heads' names or folders; see --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD"

(($#)) || set -- plain btree backbone late
exec .venv/bin/python -m tests.gpu_rehearsal "$@"
