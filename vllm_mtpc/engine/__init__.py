"""`vllm serve` as a child process: what replicas on Ray and batch jobs ask."""
