"""An incomplete circuit is refused in one line where it is defined or constructed."""

from __future__ import annotations

import pytest

from vllm_mtpc.circuits import Circuit, Latents
from vllm_mtpc.kernels.filter import Instruction, Op

CONDITION = [Instruction(Op.CONDITION)]
CHAIN = Latents([0], [0, 0, 1])


def build(**parts):
    """A circuit over three tokens with these parts."""
    return type("Mine", (Circuit,), {"name": "mine", **parts})(3, 2)


def test_complete_circuit_is_constructed():
    assert build(latents=CHAIN, program=[[], CONDITION, [*CONDITION, Instruction(Op.TRANSITION, 0)], []]).num_inner == 1


@pytest.mark.parametrize(
    "parts, words",
    [
        ({}, "latents.*program"),
        ({"latents": CHAIN}, "program"),
        ({"num_inner": 0, "advance": None, "joint": None}, "latents.*program"),
        ({"latents": None, "program": []}, "Mine, window=3: latents must be Latents"),
        ({"latents": CHAIN, "program": None}, "Mine, window=3: program must be 4 lists"),
        ({"latents": CHAIN, "program": [[]] * 3}, "program must be 4 lists"),
        ({"latents": CHAIN, "program": [[], CONDITION, CONDITION, CONDITION]}, "the last one empty"),
        (
            {"latents": CHAIN, "program": [[], CONDITION, [Instruction(Op.TRANSITION, 1)], []]},
            r"program\[2\]: TRANSITION 1, of 1 inner",
        ),
        ({"latents": CHAIN, "program": [[], CONDITION, [Instruction(Op.TRANSITION)], []]}, "TRANSITION -1"),
        ({"latents": CHAIN, "program": [[], [Instruction(Op.SIBLING)], CONDITION, []]}, r"program\[1\]: SIBLING pops"),
        ({"latents": Latents([0], [0, 1]), "program": [[]] * 4}, "3 numbers from 0 to 1"),
        ({"latents": Latents([0], [0, 1, 2]), "program": [[]] * 4}, "3 numbers from 0 to 1"),
        ({"latents": Latents([2, 1], [0, 1, 2]), "program": [[]] * 4}, "parents of latents form a cycle"),
    ],
)
def test_incomplete_circuit_is_refused_in_one_line(parts, words):
    with pytest.raises((TypeError, ValueError), match=words) as caught:
        build(**parts)
    assert "\n" not in str(caught.value)
