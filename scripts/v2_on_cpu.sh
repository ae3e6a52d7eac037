#!/usr/bin/env bash
# Runs a command with vLLM's Model Runner V2 on a machine without a GPU: its kernels are interpreted (scripts/interpreter).
# The same code as on a GPU, slowly: for trying PTP heads and for tests.
#
#   MTPC_INTERPRETER=lanes     all instances of a launch at once: many times faster for many requests, equal to rounding
#   MTPC_INTERPRETER=triton    in Triton's own interpreter, many times slower; the results are the same
#
#   scripts/v2_on_cpu.sh COMMAND [ARGUMENT ...]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh

export TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1
export PYTHONPATH="$here/interpreter${PYTHONPATH:+:$PYTHONPATH}"
exec "$@"
