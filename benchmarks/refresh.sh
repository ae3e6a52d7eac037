#!/usr/bin/env bash
# Measure stale results again: benchmarks/refresh.sh [NAME...]. `--stale` only lists those without a reason to be old.
# Commands of one FILE write build/refresh/NAME.json; check it and copy it to benchmarks/results. Others are printed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export PATH="$PWD/.venv/bin:$PATH"
[[ ${1:-} == --stale ]] && exec "$python" -m benchmarks.registry --stale
mkdir -p build/refresh
"$python" -m benchmarks.registry --commands "$@" | while IFS=$'\t' read -r name command; do
    if [[ $name != - && $command == *FILE* && $command != *DATA* && $command != *TEXT_FILE* ]]; then
        command=${command//FILE/build/refresh/$name.json}
        echo "+ $command"
        bash -c "${command//DIR/build/refresh/$name}" < /dev/null
    else
        echo "by hand: $command"
    fi
done
