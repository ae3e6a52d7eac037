"""CONTRIBUTING.md's own circuit: registered as it says there, it is a distribution; incomplete ones are refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vllm_mtpc.circuits
from tests.support import circuit_checks
from tests.support.enumeration import CIRCUITS, make, random_params
from vllm_mtpc.circuits import Circuit, Latents, get_circuit
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.kernels.filter import Instruction, Op

torch.set_num_threads(1)
NAME = "pairs"
TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = TEXT.split("## Add a circuit\n")[1].split("\n## ")[0]
FILE, LINE = (re.sub(r"(?m)^   ", "", block) for block in re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL))


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The fenced blocks as the file and the line of the registry that they are."""
    folder = tmp_path_factory.mktemp("circuit")
    (folder / f"{NAME}.py").write_text(FILE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_mtpc.circuits, "__path__", [*vllm_mtpc.circuits.__path__, str(folder)])
        for name, where in eval(f"{{{LINE}}}").items():
            patch.setitem(vllm_mtpc.circuits.CIRCUITS, name, where)
        yield
        sys.modules.pop("vllm_mtpc.circuits.pairs", None)


@pytest.mark.parametrize("n, r, vocab", [(2, 3, 4), (3, 2, 4), (5, 3, 3), (6, 2, 3)])
def test_recipe_circuit_equals_enumeration(n, r, vocab):
    circuit = make(NAME, n, r)
    circuit_checks.check_enumeration((NAME, circuit, random_params(circuit, vocab, batch=2, seed=n)))


def test_trained_cp_becomes_the_recipe_circuit():
    circuit_checks.check_growth_from_a_cp("linear", NAME, 4, 1)
    circuit_checks.check_growth_from_an_ff("linear", NAME)


CONDITION = [Instruction(Op.CONDITION)]
CHAIN = Latents([0], [0, 0, 1])


def chain(*program):
    return {"latents": CHAIN, "program": [*program]}


def build(**parts):
    """A circuit over three tokens with these parts."""
    return type("Mine", (Circuit,), {"name": "mine", **parts})(3, 2)


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
