"""Everything that knows vLLM's internals; imported as `vllm_mtpc.proposers`."""
