#!/usr/bin/env bash
# Half an hour of a real server under clients that ask, hang up and misbehave: python -m vllm_mtpc.bench.soak --help
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m vllm_mtpc.bench.soak "$@"
