"""Training of the packaged demo: a byte-level target and four MtPC heads (``python -m vllm_mtpc.train``)."""
