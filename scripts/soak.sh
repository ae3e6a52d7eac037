#!/usr/bin/env bash
# Half an hour of a real server under clients that ask, hang up and misbehave: python -m benchmarks.soak --help
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh
exec .venv/bin/python -m benchmarks.soak "$@"
