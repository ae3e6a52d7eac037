#!/usr/bin/env bash
# Trains and measures PTP heads of one target, and writes the documents of the papers.
#
#   benchmarks/paper/run.sh [ptp-ingredients-bytes|ptp-ingredients-smollm2] [--write]
set -euo pipefail
cd "$(dirname "$0")/../.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
exec "$python" -m benchmarks.paper "$@"
