#!/usr/bin/env bash
# Two Ray nodes on this machine, the app and a batch job on them, and one node killed while each runs:
# .venv/bin/python -m benchmarks.ray_demo --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh
exec .venv/bin/python -m benchmarks.ray_demo "$@"
