"""benchmarks/gpu/window.py: when a comparison has failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.gpu.window import Window
from vllm_mtpc.bench.comparison import Comparison, Pass
from vllm_mtpc.bench.decodings import Decoding
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.served import Load, PassResult

PLAIN, BTREE, CP = Decoding("plain", None), *(Decoding(name, {}, is_required=True) for name in ("btree", "cp"))


@pytest.mark.parametrize(
    ("measured", "differing", "dtype", "fault"),
    [
        ({"plain": 0, "btree": 10, "cp": 10}, 0, "float32", None),
        ({"plain": 0, "btree": 10, "cp": 10}, 1, "float32", "cp: 3 of 4 answers equal plain's"),
        ({"plain": 0, "btree": 10, "cp": 10}, 1, "bfloat16", None),  # two tokens may be as likely as each other
        ({"plain": 0, "btree": 10, "cp": 0}, 0, "float32", "cp did not run, or drafted nothing"),
        ({"plain": 0, "btree": 10}, 0, "float32", "cp did not run, or drafted nothing"),  # its engine failed
        ({}, 0, "float32", "nothing was compared with plain vLLM"),
    ],
)
def test_window_that_compares_too_little_has_failed(
    measured: dict[str, int], differing: int, dtype: str, fault: str | None
) -> None:
    """measured: drafts of each engine's passes."""
    window = object.__new__(Window)
    window.args, window.decodings, passes = SimpleNamespace(dtype=dtype), [PLAIN, BTREE, CP], []
    for one in window.decodings:
        if one.name in measured:
            result = PassResult(1.0, 100, Acceptance(measured[one.name], 0, 0, (), 20))
            passes.append(Pass(one, Load(1, 0.0, 4, 2), 0, result, 1.0))
    window.found, window.identical = Comparison(passes=passes), {"btree": (4, 4), "cp": (4 - differing, 4)}
    assert fault in (window.faults() or [None])
