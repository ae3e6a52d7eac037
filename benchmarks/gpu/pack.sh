#!/usr/bin/env bash
# Packs vLLM (CUDA) for a GPU machine without a network: DIR/part.00 ... of at most 28 MB, and DIR/unpack.sh.
#
#   benchmarks/gpu/pack.sh DIR [SM]      SM: the GPU's architecture (default: 90, an H100 or H200)
#   bash DIR/unpack.sh                   there, in the checkout, with DIR's files in any folder: makes DIR/site and
#                                        installs the checkout in editable form; then: export PYTHONPATH=DIR/site
#
# The GPU machine has Python 3.12, torch 2.11 (CUDA 13), triton, transformers, httpx, pytest. torch does not
# travel: vLLM's extensions use its stable ABI. Left out: FlashAttention 2, mixtures of experts, DeepGEMM, FlashMLA, the
# Rust front end, GPU code of other architectures, tokenizers of mistral_common, translations of pycountry.
# Without FlashInfer: export VLLM_USE_FLASHINFER_SAMPLER=0.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$(mkdir -p "${1:?type: benchmarks/gpu/pack.sh DIR}" && cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=()
for name in 2_39 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5 2014 2010 1; do
    case $name in *_*) name="_$name" ;; esac
    platforms+=(--platform "manylinux${name}_x86_64")
done
cat >"$work/wheels" <<'LIST'
vllm==0.32.0
annotated-types==0.8.0 apache-tvm-ffi==0.1.11 astor==0.8.1 blake3==1.0.11 cachetools==8.0.1 cbor2==6.2.1
compressed-tensors==0.17.0 datasets==5.2.0 depyf==0.20.0 dill==0.4.1 dnspython==2.9.2 email-validator==2.4.0
fastapi==0.136.3 gguf==0.19.0 googleapis-common-protos==1.76.0 httpcore2==2.16.2 httptools==0.9.0 httpx2==2.16.2
ijson==3.6.0 jiter==0.19.0 jmespath==1.1.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 lark==1.2.2
llguidance==1.7.6 lm-format-enforcer==0.11.3 loguru==0.7.3 mistral-common==1.13.1
model-hosting-container-standards==0.1.16 msgspec==0.22.0 multiprocess==0.70.19 openai==3.54.0 oss-harmony==0.0.11
outlines-core==0.2.14 partial-json-parser==0.2.1.1.post7 prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1
pycountry==26.2.16 pydantic==2.14.3 pydantic-core==2.50.4 pydantic-extra-types==2.11.1 python-json-logger==4.2.0
python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1
starlette==1.10.0 supervisor==4.3.0 truststore==0.10.5 typing-inspection==0.4.5 uvicorn==0.54.0 watchfiles==1.3.0
websockets==17.4 xgrammar==0.2.8
LIST
xargs -n1 <"$work/wheels" >"$work/requirements.txt"
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d "$work/whl" -r "$work/requirements.txt"
for wheel in "$work"/whl/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
cd "$work/site"
shopt -s nullglob
for folder in *.data/purelib *.data/platlib; do cp -r "$folder/." .; done
rm -r ./*.data mistral_common/data pycountry/locales
(cd vllm && rm -r vllm_flash_attn/_vllm_fa2_C* vllm-rs _moe_C_stable* _flashmla* _flashkda* _qutlass* _deepselect* \
    third_party/deep_gemm third_party/fmha_sm100)
find vllm -regex '.*\.\(cu\|cuh\|h\|hpp\|jpg\|png\)' -delete
python3 "$here/prune_fatbin.py" "${2:-90}" vllm/*.so vllm/vllm_flash_attn/*.so
rm -f "$out"/part.*
tar -cf - . | xz -T0 -6 | split -b 28M -d - "$out/part."
cat >"$out/unpack.sh" <<'UNPACK'
#!/usr/bin/env bash
set -euo pipefail
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$kit/site"
cat "$kit"/part.* | xz -dc | tar -C "$kit/site" -xf -
export PYTHONPATH="$kit/site"
python3 -m pip install -q --no-deps --no-build-isolation --no-index -e .
python3 -c "import torch, vllm, vllm._C_stable_libtorch; print(torch.__version__, vllm.__version__)
print(torch.cuda.get_device_name())"
echo "type: export PYTHONPATH=$PYTHONPATH"
UNPACK
ls -l "$out"
