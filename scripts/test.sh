#!/usr/bin/env bash
# Sets everything up, checks style and runs the tests.
#
#   scripts/test.sh [--all] [pytest arguments]     --all: the slow tests too
#   MTPC_TEST_WORKERS=N scripts/test.sh            files in N processes at once (default: one per core, at most 4)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh

scripts/setup.sh
select=(-m "not slow")
if [[ "${1:-}" == --all ]]; then
    select=()
    shift
fi
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check .
# Tests use one core each. A file stays in one process: its engines and trained heads are made once. The longest files
# come first (tests/conftest.py).
workers=${MTPC_TEST_WORKERS:-$(nproc)}
exec .venv/bin/python -m pytest -n "$((workers < 4 ? workers : 4))" --dist loadfile --no-loadscope-reorder -q -ra --durations=15 \
    --junitxml=build/tests.xml ${select[@]+"${select[@]}"} "$@"
