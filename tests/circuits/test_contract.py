"""An incomplete circuit and impossible sizes are refused."""

from __future__ import annotations

import pytest

from tests.support.enumeration import CIRCUITS
from vllm_mtpc.circuits import Circuit, Latents, circuit_class, get_circuit
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.kernels.filter import Instruction, Op

CONDITION = [Instruction(Op.CONDITION)]
CHAIN = Latents([0], [0, 0, 1])


def chain(*program):
    return {"latents": CHAIN, "program": [*program]}


def build(**parts):
    """A circuit over three tokens with these parts."""
    return type("Mine", (Circuit,), {"name": "mine", **parts})(3, 2)


def test_complete_circuit_is_constructed():
    assert build(**chain([], CONDITION, [*CONDITION, Instruction(Op.TRANSITION, 0)], [])).num_inner == 1


@pytest.mark.parametrize(
    "parts, words",
    [
        ({}, "latents.*program"),
        ({"latents": CHAIN}, "program"),
        ({"latents": None, "program": []}, "Mine, window=3: latents must be Latents"),
        ({"latents": CHAIN, "program": None}, "Mine, window=3: program must be 4 lists"),
        (chain([], [], []), "program must be 4 lists"),
        (chain([], CONDITION, CONDITION, CONDITION), "the last one empty"),
        (chain([], CONDITION, [Instruction(Op.TRANSITION, 1)], []), r"program\[2\]: TRANSITION 1, of 1 inner"),
        (chain([], CONDITION, [Instruction(Op.TRANSITION)], []), "TRANSITION -1"),
        (chain([], [Instruction(Op.SIBLING)], CONDITION, []), r"program\[1\]: SIBLING pops"),
        ({"latents": Latents([0], [0, 1, 2]), "program": [[]] * 4}, "3 numbers from 0 to 1"),
        ({"latents": Latents([2, 1], [0, 1, 2]), "program": [[]] * 4}, "parents of latents form a cycle"),
    ],
)
def test_incomplete_circuit_is_refused_in_one_line(parts, words):
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        build(**parts)
    assert "\n" not in str(caught.value)


SIZES = [(1, 1, "window=1"), (0, 1, "window=0"), (-3, 1, "window=-3"), (4, 0, "num_components=0")]
SIZES += [(4, -1, "num_components=-1"), (10**12, 1, "window=1000000000000")]  # at once: no tree of 10**12 regions
REFUSED = [(name, *size) for name in CIRCUITS for size in SIZES]
REFUSED += [("ff", 4, 8, "num_components=8.*exactly 1"), ("spn", 4, 8, f"'spn'.*{', '.join(CIRCUITS)}")]


@pytest.mark.parametrize("name, window, num_components, words", REFUSED)
def test_impossible_size_or_name_is_refused(name, window, num_components, words):
    with pytest.raises(HeadConfigError, match=words):
        get_circuit(name, window, num_components)


def test_circuit_name_equals_its_key():
    assert tuple(circuit_class(name).name for name in CIRCUITS) == CIRCUITS
