#!/usr/bin/env bash
# Tiny Shakespeare end to end: a byte-level target, its own text, ten heads, a table.
#
#   scripts/shakespeare.sh TEXT_FILE
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
text="${1:?type: scripts/shakespeare.sh TEXT_FILE}"
out=build/shakespeare

[ -f "$out/target/provenance.json" ] || "$python" -m benchmarks.demo.train_target --out "$out/target" --text "$text" \
    --steps 1200 --long-steps 100 --layers 4 --intermediate-size 512
"$python" -m benchmarks.demo.corpus --out "$out" --text "$text"
write() {
    "$python" -m vllm_mtpc regenerate --target "$out/target" --ignore-eos "$@"
}
write --data "$out/train.jsonl" --out "$out/sampled.jsonl" --crops 2560 --max-tokens 128
write --data "$out/train.jsonl" --out "$out/greedy.jsonl" --crops 512 --max-tokens 128 --temperature 0 --seed 1
write --data "$out/valid.jsonl" --out "$out/heldout.jsonl" --crops 256 --max-tokens 8 --seed 2
exec "$python" -m benchmarks.sweep benchmarks/shakespeare.yaml --runs "$out/heads" \
    --json benchmarks/results/shakespeare.json
