"""Toy vocabularies divided like large ones, for workers that import this as their `worker_extension_cls`."""

from __future__ import annotations

from vllm_mtpc.proposers.heads import load


class Divides:
    """Nothing is added to the worker; no leaf is small because its module was imported."""


load.is_small = lambda *sizes: False
