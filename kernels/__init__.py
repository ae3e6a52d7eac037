"""Accelerator kernels, imported as ``vllm_mtpc.kernels``. See README.md here for how an operation is laid out."""
