"""Byte-level targets that neither vLLM nor transformers has: EvaByte and Byte-Llama, one folder each.

`registration.py` is the only module that other packages import. It names the models to vLLM and to transformers, which
import them when such a target is used.
"""
