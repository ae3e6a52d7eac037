#!/usr/bin/env bash
# Sets everything up and runs the demo: a chat model, plain and with its head, answers five questions.
#
#   scripts/demo.sh [--logs DIR]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh

scripts/setup.sh
scripts/smollm2.sh || true # it says why not
exec .venv/bin/python scripts/demo.py "$@"
