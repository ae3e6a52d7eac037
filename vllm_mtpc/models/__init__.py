"""vLLM model classes this package adds: byte-level targets that vLLM does not know.

`registration.py` registers them with vLLM. Their modules are imported when such a model is served.
"""
