# vLLM's image with this package; models and heads are named as for `vllm serve`.
#
#   python -m build --wheel && docker build --tag mtpc-server .
#   docker run --gpus all -p 8000:8000 mtpc-server MODEL --speculative-config '{"method": "mtpc", "model": "HEAD"}'
FROM vllm/vllm-openai:v0.32.0
RUN --mount=type=bind,source=dist,target=/dist python3 -m pip install --no-cache-dir /dist/*.whl
