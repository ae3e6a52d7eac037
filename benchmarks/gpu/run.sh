#!/usr/bin/env bash
# What is measured on a GPU, in stages of at most 8 minutes that can be called again and go on where they stopped.
#
#   benchmarks/gpu/run.sh                        lists the stages, their parts and what is finished
#   benchmarks/gpu/run.sh STAGE [PART ...]       runs what is not finished of a stage, or these parts of it
#     --limit SECONDS     ends by then (default: 480); what does not fit is left for the next call
#     --engine JSON       more arguments of every engine; first of all, without torch.compile:
#                         '{"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}'
#     --toy               at toy size on a CPU, to try the stage; its results are not kept with those of GPUs
#
#   OUT=FOLDER              where gpu-STAGE.json is written (default: benchmarks/results; toy: the cache)
#   MTPC_GPU_CACHE=FOLDER   models, logs and what is finished (default: build/gpu; toy: build/gpu-toy)
#   MTPC_COMMIT=COMMIT      what is measured, where there is no .git to ask
# The first stages need pytest: pip install '.[test]', or pytest alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see scripts/setup.sh
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
exec "$python" -m benchmarks.gpu.programme "$@"
