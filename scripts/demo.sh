#!/usr/bin/env bash
# Sets everything up and runs the demo: a server with a head, and a comparison with plain vLLM.
#
#   scripts/demo.sh [--logs DIR]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh

scripts/setup.sh
exec .venv/bin/python scripts/demo.py "$@"
