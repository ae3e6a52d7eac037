"""The unit-test inputs of all kernels of this package, launched once: `python -m tests.interpreter.own_kernels`.

With MTPC_INTERPRETER=check each launch is compared (see scripts/interpreter). PLANTS are faults of the fast
interpreter: `python -m tests.interpreter.own_kernels PLANT` launches two kernels with one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import numpy as np
import torch

from tests.interpreter import odd_kernels
from tests.kernels import draft_runner, filter_runner, interpreted, test_couple, test_draft, test_filter, test_leaf
from tests.kernels import test_triton as test_others


def launch_all() -> None:
    odd_kernels.launch_all()
    interpreted._launch(test_couple.CASES, {"couple": "accept"}, "cpu")
    interpreted._launch(test_others.CASES, {}, "cpu")
    interpreted._launch({name: ("leaf", case) for name, case in test_leaf.TERMS.items()}, {"leaf": "terms"}, "cpu")
    interpreted._launch({name: ("leaf", case) for name, case in test_leaf.LOGITS.items()}, {"leaf": "logits"}, "cpu")
    filter_runner._launch(test_filter.CASES, "cpu")
    draft_runner._draft_all(test_draft.CASES, "cpu")


def _plant(name: str) -> None:
    from numpy_interpreter import functions, language
    from numpy_interpreter.kinds import FLOAT32
    from numpy_interpreter.values import Value

    def other_order(x: Value, axis: int | None = None) -> Value:
        return language._sum(Value(np.flip(x.data, axis).copy(), x.kind), axis)

    def other_dtype(x: Value) -> Value:
        return Value(np.exp(x.data.astype(np.float64)).astype(np.float32), FLOAT32)

    def lost(pointer: Value, value: Value, mask: Value | None = None) -> None:
        if pointer.shape:
            language.memory.store(pointer, value, mask)

    faults: dict[str, tuple[str, Callable]] = {
        "order": ("sum", other_order),
        "dtype": ("exp", other_dtype),
        "lost store": ("store", lost),
    }
    setattr(functions._LANGUAGE, *faults[name])


PLANTS = ("order", "dtype", "lost store")


def main(plant: str | None = None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # masked lanes: -inf - -inf among them
    if plant is None:
        return launch_all()
    _plant(plant)
    generator = torch.Generator().manual_seed(0)
    logits, u = torch.randn(4, 5001, generator=generator), torch.rand(4, generator=generator)
    interpreted._launch({"pick": ("pick", (logits, u))}, {}, "cpu")


if __name__ == "__main__":
    main(*sys.argv[1:])
