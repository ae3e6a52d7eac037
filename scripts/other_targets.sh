#!/usr/bin/env bash
# Default serving on targets that are not the demo: a subword Qwen3 with a flat distribution and a head that borrows its
# lm_head, a byte-level Llama of another text, a NeoX with a sharp distribution, a Phi-3 with the default head. Trains them
# with their heads, then serves each next to plain vLLM and with fixed numbers of drafts.
#
#   scripts/other_targets.sh TEXT_FILE      TEXT_FILE: training text of the byte-level Llama, e.g. Tiny Shakespeare
#
# One to two hours on two CPU cores, of which the serving is most. Existing files are kept (build/other).
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh
python=.venv/bin/python
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
text="${1:?type: scripts/other_targets.sh TEXT_FILE}"
out=build/other
library="$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
mkdir -p "$out"
cat "$library"/encodings/*.py >"$out/tables.txt" # tables that go on as they begin

target() { # NAME MODULE [ARGUMENT ...]
    [ -f "$out/$1/provenance.json" ] || "$python" -m "benchmarks.demo.$2" --out "$out/$1" "${@:3}"
}
drafter() { # NAME DATA [ARGUMENT ...]
    [ -f "$out/$1-head/model.safetensors" ] || "$python" -m vllm_mtpc train --target "$out/$1" --data "$2" \
        --out "$out/$1-head" --regenerate 600 --circuit btree "${@:3}"
}
serve() { # NAME DATA
    local fixed='"num_speculative_tokens_per_batch_size": "off"'
    "$python" -m vllm_mtpc bench serve --heads "$out/$1-head" --peers --data "$2" --concurrency 1 4 16 --prompts 8 \
        --max-tokens 96 --rounds "${ROUNDS:-5}" --json "benchmarks/results/other-$1-cpu.json" \
        --variant 'K=0={"num_speculative_tokens_per_batch_size": [[1, 1024, 0]]}' \
        --variant "K=1={\"num_speculative_tokens\": 1, $fixed}" --variant "K=3={\"num_speculative_tokens\": 3, $fixed}" \
        --variant "every draft={$fixed}"
}

target qwen3 subword_target --family qwen3 --vocab-size 2048 --hidden-size 160 --steps 350
drafter qwen3 "$library/*.py" --window 6 --components 4 --max-steps 200 \
    --windows-per-step 192 --seq-len 128 --learning-rate 0.003
target neox subword_target --family neox --vocab-size 1024 --hidden-size 128 --steps 250 --text "$out/tables.txt"
drafter neox "$out/tables.txt" --window 8 --components 4 --max-steps 200 --windows-per-step 192 --seq-len 256 \
    --learning-rate 0.005
target bytes train_target --text "$text" --layers 4 --intermediate-size 512 --steps 500 --long-steps 30
drafter bytes "$text" --window 8 --components 8 --max-steps 300 --windows-per-step 256 --learning-rate 0.005
target phi3 subword_target --family phi3 --vocab-size 3072 --steps 350
drafter phi3 "$library/*.py" --window 8 --components 8 --max-steps 200 --windows-per-step 192 --seq-len 128

serve qwen3 "$library/argparse.py"
serve neox "$out/tables.txt"
serve bytes "$text"
serve phi3 "$library/argparse.py"
