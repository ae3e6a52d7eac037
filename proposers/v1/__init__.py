"""Proposer for vLLM's V1 model runner (a CPU without Triton)."""
