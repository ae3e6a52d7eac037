#!/usr/bin/env bash
# Trains the packaged demo target and heads with the commands a user has.
#
#   scripts/train_demo.sh [--only target|text|heads] [--quick] [--out FOLDER]
#
# About four hours on two CPU cores; the result depends on the seeds and the fixed step counts, not on the time taken.
# --quick: a few steps and texts, to try the pipeline; into build/demo-quick where --out names no folder. The heads'
# training text stays in build/demo.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX # bytecode is kept next to the sources, see setup.sh
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
# Threads that wait without spinning leave the processor to whatever else the machine does.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

only="" out="" quick=""
while [ $# -gt 0 ]; do
    case "$1" in
        --only)
            case "${2-}" in
                target | text | heads) only="$2"; shift 2 ;;
                *) echo "train_demo.sh: --only ${2:-without a name}; allowed: --only target, --only text, --only heads" >&2; exit 1 ;;
            esac ;;
        --quick) quick=yes; shift ;;
        --out)
            [ -n "${2-}" ] || { echo "train_demo.sh: --out needs a folder; type --out FOLDER" >&2; exit 1; }
            out="$2"; shift 2 ;;
        *) echo "train_demo.sh: $1 is not known; allowed: --only target|text|heads, --quick, --out FOLDER" >&2; exit 1 ;;
    esac
done
# A trial run never replaces packaged files
others="$out" target=../target # heads that are not packaged, and how they name it
if [ -z "$out" ] && [ -n "$quick" ]; then
    out=build/demo-quick others=build/demo-quick
elif [ -z "$out" ]; then
    out=vllm_mtpc/demo/assets others=tests/assets target=../../../vllm_mtpc/demo/assets/target
fi
data=build/demo${quick:+-quick}
# With Python's documentation (Debian's python3.11-doc) and the JSON examples of botocore, twice.
mkdir -p build/demo
ln -sfn /usr/share/doc/python3.11/html/_sources build/demo/python3.11-doc
"$python" -c 'import botocore' 2>/dev/null || "$python" -m pip install -q botocore
ln -sfn "$("$python" -c 'import botocore; print(botocore.__path__[0])')/data" build/demo/botocore
json="build/demo/botocore/**/examples-1.json"
texts=("build/demo/python3.11-doc/**/*.txt" "$json" "$json")
about="; its documentation (Debian's python3.11-doc, *.txt); the JSON examples of botocore (Apache 2.0), twice"
teacher_steps=(--steps 3700 --long-steps 160 --cool-down 800 --ahead-steps 500) head_steps=()
target_steps=(--steps 1200 --long-steps 20 --cool-down 1000 --ahead-steps 600)
sampled=1280 greedy=256 long=160 new_tokens=128
if [ -n "$quick" ]; then
    teacher_steps=(--steps 20 --long-steps 2) target_steps=(--steps 20 --long-steps 2)
    head_steps=(--max-steps 20 --evaluation-sequences 8)
    sampled=24 greedy=8 long=4 new_tokens=48
fi

# A target that a wheel has room for writes best when it is cut out of a larger one and learns its distributions.
if [ -z "$only" ] || [ "$only" = target ]; then
    sizes=(--hidden-size 192 --positions 8192 --short-window 512 --significant-bits 4)
    "$python" -m benchmarks.demo.train_target --out "$data/teacher" --also "${texts[@]}" --about "$about" \
        "${sizes[@]}" --intermediate-size 1536 --tokens-per-step 4096 --state "$data/teacher-state.pt" \
        "${teacher_steps[@]}"
    "$python" -m benchmarks.demo.train_target --out "$out/target" --also "${texts[@]}" --about "$about" \
        "${sizes[@]}" --intermediate-size 320 --tokens-per-step 2048 --state "$data/target-state.pt" \
        "${target_steps[@]}" --teacher "$data/teacher" --learning-rate 0.0015
fi
[ "$only" = target ] && exit
if [ ! -f "$out/target/model.safetensors" ]; then
    echo "train_demo.sh: $out/target holds no target; run scripts/train_demo.sh --only target --out $out first" >&2
    exit 1
fi

# Text of the target itself, after pieces of the text it was trained on; held out: other pieces.
write() {
    "$python" -m vllm_mtpc regenerate --target "$out/target" --ignore-eos "$@"
}
"$python" -m benchmarks.demo.corpus --out "$data" --also "${texts[@]}"
write --data "$data/train.jsonl" --out "$data/sampled.jsonl" --crops 6 --limit "$sampled" --max-tokens "$new_tokens"
write --data "$data/train.jsonl" --out "$data/greedy.jsonl" --crops 4 --limit "$greedy" --max-tokens "$new_tokens" \
    --temperature 0 --seed 1
# After long prompts: rows of PTP heads draft badly at positions far beyond those they learned.
write --data "$data/train.jsonl" --out "$data/long.jsonl" --crops 1 --limit "$long" --prompt-tokens 896 \
    --max-tokens 112 --seed 3
write --data "$data/valid.jsonl" --out "$data/heldout.jsonl" --crops 16 --limit 256 --max-tokens 8 --seed 2
[ "$only" = text ] && exit
responses=("$data/sampled.jsonl" "$data/greedy.jsonl")

first=(--evaluation-sequences 0) # of two runs

train() { # yaml, options; --out FOLDER first
    rm -rf "$3/state" # of an interrupted run: start over
    "$python" -m vllm_mtpc train --config "scripts/$1" --target "$out/target" --data "${responses[@]}" \
        --validation-data "$data/heldout.jsonl" "${@:2}" ${head_steps[@]+"${head_steps[@]}"}
    rm -r "$3/state"
}

# Circuits with latents twice: the second run starts from the first, with leaves that look at the token before as well.
circuits() {
    states=(--cache "$data/states")
    rm -rf "$data/states" # of another target
    train train_demo.yaml --out "$others/ff" "${states[@]}" --circuit ff --components 1 --leaves lm_head
    for circuit in cp hmm btree; do
        kind=("${states[@]}" --circuit "$circuit" --components 4 --leaves lm_head --leaves.expander-rank 16)
        [ "$circuit" = btree ] && kind=("${states[@]}" --circuit btree --components 8 --leaves lm_head)
        train train_demo.yaml --out "$data/$circuit" "${first[@]}" "${kind[@]}"
        place=("$others/$circuit" --verifier "$target")
        [ "$circuit" = btree ] && place=("$out/btree" --verifier ../target)
        train train_demo.yaml --out "${place[@]}" "${kind[@]}" --leaves.token-rank 32 --init-from "$data/$circuit" \
            --learning-rate 0.003 --max-steps 600
    done
}

# Heads that read earlier tokens learn from short texts first, then from long ones as well.
with_long=(--data "${responses[@]}" "$data/long.jsonl" --seq-len 1024)

# Own draft layers: a drafter whose leaves are ff, as DFlash, then a circuit on it and all of it learning.
backbone() {
    kind=(--leaves lm_head --trunk backbone --trunk.layers 1 --trunk.width 128 --windows-per-step 128
        --trunk.aux-hidden-state-layer-ids "[1, 4, 8]")
    circuit=("${kind[@]}" --circuit btree --components 4 --leaves.component-rank 16 --leaves.token-rank 32)
    train train_demo.yaml --out "$data/drafter" "${first[@]}" "${kind[@]}" --circuit ff --acceptance 0.5 \
        --max-steps 300 --block-rows 48
    train train_demo.yaml --out "$data/backbone" "${first[@]}" "${circuit[@]}" --init-from "$data/drafter" \
        --learning-rate 0.002 --max-steps 150 --block-rows 48
    train train_demo.yaml --out "$others/backbone" "${circuit[@]}" --init-from "$data/backbone" --verifier "$target" \
        --learning-rate 0.001 --block-rows 8 "${with_long[@]}" --max-steps 40
}

# PTP heads: o-ptp and late start from one without u, c-ptp has other rows.
independent() {
    train train_demo_ptp.yaml --out "$data/independent" "${first[@]}" --variant independent
}

ptp() { # variant, place, verifier, options
    variant=(--variant "$1" "${@:4}")
    start=(--init-from "$data/independent" --max-steps 200)
    [ "$1" = c-ptp ] && start=(--max-steps 300) variant+=(--lora-rank 4 --lora-alpha 4)
    train train_demo_ptp.yaml --out "$data/$1" "${first[@]}" "${start[@]}" "${variant[@]}"
    train train_demo_ptp.yaml --out "$2/$1" --verifier "$3" --init-from "$data/$1" --learning-rate 0.001 \
        --block-rows 40 "${with_long[@]}" --max-steps 120 "${variant[@]}"
}

# Two at a time, a core each.
export OMP_NUM_THREADS=1
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
{ independent; ptp late "$out" ../target --late-width 192; ptp o-ptp "$others" "$target"; } &
{ circuits; backbone; ptp c-ptp "$others" "$target"; } &
wait -n
wait -n

# The wheel is smaller with weights of few significant bits.
"$python" -m benchmarks.demo.round_heads "$others"/{ff,cp,hmm,backbone,o-ptp,c-ptp} "$out"/{btree,late}
