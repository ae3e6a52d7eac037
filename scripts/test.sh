#!/usr/bin/env bash
# Sets everything up, checks style and runs the tests.
#
#   scripts/test.sh [--all] [pytest arguments]     --all: the slow tests too
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
select=(-m "not slow")
if [[ "${1:-}" == --all ]]; then
    select=()
    shift
fi
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
exec .venv/bin/python -m pytest -q -ra --durations=15 ${select[@]+"${select[@]}"} "$@"
