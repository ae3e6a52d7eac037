#!/usr/bin/env bash
# Measures tables and figures of the papers; without a name it lists them.
#
#   benchmarks/paper/run.sh [NAME...|all] [--quick --out FOLDER] [--write]
set -euo pipefail
cd "$(dirname "$0")/../.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
exec "$python" -m benchmarks.paper "$@"
