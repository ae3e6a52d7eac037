"""Training of PTP heads: what the one trainer (`vllm_mtpc.train.loop`) is given for them."""
