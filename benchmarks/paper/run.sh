#!/usr/bin/env bash
# Measures Spec-Bench (ptp-table-3), writes the documents of the papers; without arguments it lists the tables.
#
#   benchmarks/paper/run.sh [ptp-table-3] [--write]
set -euo pipefail
cd "$(dirname "$0")/../.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
exec "$python" -m benchmarks.paper "$@"
