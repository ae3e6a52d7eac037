"""`vllm-mtpc play`: a page on which plain vLLM and a head continue the same prompt, step by step."""
