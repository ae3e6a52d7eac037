"""`vllm serve` as a child process, its counters, and the provenance of results."""
