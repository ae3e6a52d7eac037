"""Accelerator kernels, imported as ``vllm_mtpc.kernels``. See README.md here for how an operation is laid out.

No kernel lives here yet: what runs everywhere is the PyTorch path in ``vllm_mtpc/circuits``.
"""
