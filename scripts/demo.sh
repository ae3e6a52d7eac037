#!/usr/bin/env bash
# Sets everything up and runs the demo: vLLM with heads beside plain vLLM, over HTTP and offline.
#
#   scripts/demo.sh [--quick] [--json FILE]     --help lists the rest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept beside the sources, see setup.sh

scripts/setup.sh
exec .venv/bin/python scripts/demo.py "$@"
