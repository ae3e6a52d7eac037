"""Arithmetic of drafting, without vLLM: drafts by batch size, and the groups of rows of PTP heads."""
