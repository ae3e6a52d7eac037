"""Arithmetic of drafting, without vLLM: drafts by batch size and the online plan."""
