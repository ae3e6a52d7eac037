"""`vllm-mtpc bench serve`: ways of decoding, the comparison of them, and its tables."""
