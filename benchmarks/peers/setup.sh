#!/usr/bin/env bash
# Makes .venv-peers with speculators, for the peers' trainers; torch and the rest are those of .venv (scripts/setup.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
VERSION=0.9.0
PY=.venv-peers/bin/python

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

.venv/bin/python -m venv .venv-peers
packages .venv/bin/python >"$(packages "$PY")/shared.pth"
"$PY" -m pip install -q --no-deps "speculators==$VERSION" "hs-connectors==$VERSION"
"$PY" -c 'import speculators.train.cli'
echo "[peers] .venv-peers has speculators $VERSION"
