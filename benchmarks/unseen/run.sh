#!/usr/bin/env bash
# Serves the prompts of this folder with the packaged btree (V1) and backbone (V2, interpreted), 33 minutes on two cores.
#
#   benchmarks/unseen/run.sh [FOLDER]     results into FOLDER (default: benchmarks/results)
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${1:-benchmarks/results}"

serve() { # kind, head, file; the command before it
    "${@:4}" .venv/bin/vllm-mtpc bench serve --heads "vllm_mtpc/demo/assets/$2" --peers --concurrency 1 --rounds 1 \
        --data "benchmarks/unseen/$1.jsonl" --prompts 24 --max-tokens 96 --json "$out/$3.json" \
        --variant 'every draft={"num_speculative_tokens_per_batch_size": "off"}'
}

for kind in functions prose json; do
    serve $kind btree "unseen-$kind-cpu" env
    serve $kind backbone "unseen-$kind-v2" env MTPC_INTERPRETER=lanes scripts/v2_on_cpu.sh
done
