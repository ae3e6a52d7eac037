"""Speculator for vLLM's Model Runner V2."""
