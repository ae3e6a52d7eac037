"""vLLM model classes this package adds: byte-level targets that vLLM does not know.

`registration.py` tells vLLM about them; nothing here is imported before a model of theirs is served.
"""
