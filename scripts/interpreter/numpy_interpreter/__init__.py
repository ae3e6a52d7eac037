"""A fast interpreter of Triton kernels: their own source, run on numpy arrays.

Triton's interpreter builds an object per value and checks types again for every operation. Here a kernel is rewritten
once (`functions.py`): its `tl` becomes `language.py`, its device functions become plain Python functions, and what it
computes with is a `Value` (`values.py`): a numpy array or scalar with a type. Types and casts are `kinds.py`, memory is
`memory.py`, launches are `launch.py`.

Results equal those of Triton's interpreter bit for bit: each operation makes the numpy call that Triton's makes, types
are promoted by Triton's own rules, instances run one after the other in the same order. What Triton's gets wrong (it
computes with the bits of bfloat16 numbers, cuts where a GPU rounds) is wrong here too. `check.py` compares both, launch
by launch; tests/interpreter does so with every kernel that runs here.

A kernel falls back to Triton's interpreter where its source, or that of a device function it calls, uses what
`language.py` does not have (sorting, custom reductions, tensor descriptors, chained comparisons; transposition, after
which numpy adds in the order of Triton's intermediate copies), which is seen before it runs; or where a launch raises
before it has written anything. One that raises later ends in Triton's
`InterpreterError`: what was written is not taken back.

MTPC_INTERPRETER chooses: unset or `numpy` this one, `lanes` this one with all instances at once (see `lanes.py`),
`triton` Triton's own, `check` and `check-once` both (see `check.py`).
"""

from __future__ import annotations

import os


def install() -> None:
    """Has Triton's interpreted kernels run here, in this process, as MTPC_INTERPRETER says."""
    chosen = os.environ.get("MTPC_INTERPRETER") or "numpy"
    if chosen == "triton":
        return
    if chosen not in ("numpy", "lanes", "check", "check-once"):
        raise SystemExit(f"MTPC_INTERPRETER={chosen}: give numpy, lanes, triton, check or check-once")
    from triton.runtime.interpreter import InterpretedFunction

    from numpy_interpreter import check, launch

    launch.is_at_once = chosen == "lanes"
    if chosen in ("numpy", "lanes"):
        InterpretedFunction.run = launch.run
    else:
        check.install()
