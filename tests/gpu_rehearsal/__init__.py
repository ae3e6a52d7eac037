"""The start and the steps of a GPU engine, rehearsed on a machine without a GPU.

    python -m tests.gpu_rehearsal HEAD [--json FILE]        see `scripts/rehearse_gpu.sh`

vLLM's own Model Runner V2 runs on its CUDA platform. Tensors on "cuda" have no data (FakeTensors); tensors on the host
are real. Every Triton launch goes through Triton's own binder, and every new variant is translated for sm_90
(`tests/kernels/test_compiled.py` compiles kernels to machine code). Phases:
load, profile, graph memory, KV cache, warm-up, capture, steps.

It finds: operations and launches that mix devices, argument types that a kernel refuses, waits of the host for the
device, pageable copies, compilation in a step, operations that PyTorch compiles with NVRTC at run time. It counts GPU
operations of each draft outside of CUDA graphs.

With `--compile` Dynamo traces the target, and vLLM splits and captures it in pieces. With `--ranks 2` the engine is the
first of two tensor-parallel ranks, whose collectives return at once.

Not covered: values, the kernels of `vllm._C` and FlashAttention (their place is taken by functions that check devices
and dtypes), inductor, grammars (only drafts with masks), NCCL.
"""
