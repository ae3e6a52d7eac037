"""Measuring: engines in processes of their own, vLLM's own counters of accepted drafts, and where a result came from.

``serve`` runs ``vllm serve`` and talks to it over HTTP, ``offline`` runs ``LLM.generate``; both return passes with
the same fields, timed the same way with and without drafts.
"""
