"""A fast interpreter of Triton kernels: runs their source on numpy arrays.

Triton's interpreter builds an object per value and checks types again for every operation. Here a kernel is rewritten
once (`functions.py`): its `tl` becomes `language.py`, its device functions become plain Python functions, and its
values become `Value` (`values.py`): a numpy array or scalar with a type. Types and casts are in `kinds.py`, memory in
`memory.py`, launches in `launch.py`.

Results equal those of Triton's interpreter bit for bit: each operation makes the numpy call that Triton's makes, types
are promoted by Triton's own rules, instances run one after the other in the same order. Errors of Triton's interpreter
(it computes with the bits of bfloat16 numbers, and truncates where a GPU rounds) are reproduced. tests/kernels compares
our kernels with their definitions in both.

A kernel falls back to Triton's interpreter if it, or a device function it calls, uses functions that `language.py` does
not have (sorting, custom reductions, tensor descriptors, chained comparisons; transposition, after which numpy adds in
the order of Triton's intermediate copies), or if a launch raises before it has written anything. A launch that raises
later ends in Triton's `InterpreterError`; its writes are not undone.

MTPC_INTERPRETER selects the interpreter: `numpy` (default), `lanes` (all instances at once, see `lanes.py`), `triton`
(Triton's own).
"""

from __future__ import annotations

import os


def install() -> None:
    """Has Triton's interpreted kernels run here, in this process, as MTPC_INTERPRETER says."""
    chosen = os.environ.get("MTPC_INTERPRETER") or "numpy"
    if chosen not in ("numpy", "lanes", "triton"):
        raise SystemExit(f"MTPC_INTERPRETER={chosen}: give numpy, lanes or triton")
    from triton.runtime.interpreter import InterpretedFunction

    from numpy_interpreter import launch

    launch.is_at_once = chosen == "lanes"
    InterpretedFunction.run = launch.tritons_run if chosen == "triton" else launch.run
