#!/usr/bin/env bash
# Sets everything up and runs the demo: a server with a head, and batch jobs beside plain vLLM.
#
#   scripts/demo.sh [--logs DIR]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept beside the sources, see setup.sh

scripts/setup.sh
exec .venv/bin/python scripts/demo.py "$@"
