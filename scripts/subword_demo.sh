#!/usr/bin/env bash
# A subword target end to end: a BPE of 4096 ids, a small Llama, its own text, FF and BTree heads that borrow its
# lm_head and look at the token before, and both served next to plain vLLM.
#
#   scripts/subword_demo.sh [--quick] [--text FILE]
#
# Half an hour to an hour on two CPU cores. --quick: a few steps of everything, to try the pipeline. --text:
# that text in place of the Python standard library's source. Existing files are kept: remove build/subword to
# begin again.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

quick="" text=()
while [ $# -gt 0 ]; do
    case "$1" in
        --quick) quick=yes; shift ;;
        --text) text=(--text "${2:?--text needs a file}"); shift 2 ;;
        *) echo "subword_demo.sh: $1 is not known; allowed: --quick, --text FILE" >&2; exit 1 ;;
    esac
done
out=build/subword${quick:+-quick} steps=550 responses=768 new_tokens=96 head_steps=300
bench=(--concurrency 1 4 16 --prompts 8 --max-tokens 64 --rounds 3)
if [ -n "$quick" ]; then
    steps=4 responses=16 new_tokens=24 head_steps=4
    bench=(--concurrency 1 --prompts 2 --max-tokens 12 --rounds 1)
fi

[ -f "$out/target/provenance.json" ] ||
    "$python" -m benchmarks.demo.subword_target --out "$out/target" --steps "$steps" ${text[@]+"${text[@]}"}
"$python" -m benchmarks.demo.corpus --out "$out" ${text[@]+"${text[@]}"}
write() {
    "$python" -m vllm_mtpc regenerate --target "$out/target" --ignore-eos "$@"
}
write --data "$out/train.jsonl" --out "$out/responses.jsonl" --crops 3 --limit "$responses" --max-tokens "$new_tokens"
write --data "$out/valid.jsonl" --out "$out/heldout.jsonl" --crops 4 --limit 128 --max-tokens 6 --seed 2

for circuit in ff btree; do
    sizes=(--components 4)
    [ "$circuit" = ff ] && sizes=(--components 1)
    [ -f "$out/$circuit/model.safetensors" ] && continue
    rm -rf "$out/$circuit/state"  # of an interrupted run: start over
    "$python" -m vllm_mtpc train --target "$out/target" \
        --data "$out/responses.jsonl" --validation-data "$out/heldout.jsonl" --out "$out/$circuit" \
        --circuit "$circuit" "${sizes[@]}" --leaves.token-rank 32 --window 6 \
        --windows-per-step 192 --seq-len 128 --max-steps "$head_steps" --learning-rate 0.003 \
        --evaluation-sequences "$([ -n "$quick" ] && echo 4 || echo 48)"
done

# Heads as users get them (drafts by batch size, unlikely ones left out), then with every draft verified
exec "$python" -m vllm_mtpc bench serve --heads "$out/ff" "$out/btree" --peers "${bench[@]}" \
    --variant 'every draft={"num_speculative_tokens_per_batch_size": "off"}' --json "$out/serve.json"
