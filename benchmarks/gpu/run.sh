#!/usr/bin/env bash
# GPU measurements in stages of at most 8 minutes, which resume when called again.
#
#   benchmarks/gpu/run.sh                        lists stages, parts and finished parts
#   benchmarks/gpu/run.sh STAGE [PART ...]       runs the unfinished parts of a stage, or these parts
#     --limit SECONDS     ends by then (default: 480); what does not fit is left for the next call
#     --engine JSON       more arguments of every engine; first of all, without torch.compile:
#                         '{"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}'
#     --toy               at toy size on a CPU, to try the stage; its results are not kept with those of GPUs
#
#   OUT=FOLDER              where gpu-STAGE.json is written (default: benchmarks/results; toy: the cache)
#   MTPC_GPU_CACHE=FOLDER   models, logs and finished parts (default: build/gpu; toy: build/gpu-toy)
#   MTPC_COMMIT=COMMIT      the commit, if this is a copy of its files
# The first stages need pytest: pip install '.[test]', or pytest alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see scripts/setup.sh
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
exec "$python" -m benchmarks.gpu.programme "$@"
