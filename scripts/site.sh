#!/usr/bin/env bash
# Builds the site of docs/ into build/site, or into the folder that is named, which is emptied first; any warning is an error.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh
NO_MKDOCS_2_WARNING=1 "${PYTHON:-.venv/bin/python}" -m mkdocs build --quiet --strict --site-dir "${1:-build/site}"
echo "${1:-build/site}/index.html"
