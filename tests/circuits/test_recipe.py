"""CONTRIBUTING.md's own circuit, trunk and leaves, registered as it documents; incomplete circuits are refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vllm_mtpc.circuits
import vllm_mtpc.heads.leaves
import vllm_mtpc.heads.trunk
from tests.support import circuit_checks, heads_zoo
from tests.support.enumeration import CIRCUITS, make, random_params
from vllm_mtpc.checkpoint import load_head, save_head
from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.circuits.base import Circuit, Latents
from vllm_mtpc.cli import main
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.init import init_from_lm_head
from vllm_mtpc.heads.leaves import LEAVES
from vllm_mtpc.heads.trunk import TRUNKS
from vllm_mtpc.kernels.filter import Instruction, Op

torch.set_num_threads(1)
NAME = "pairs"
TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
PARTS = {  # by the title of its recipe: package and registry
    "Add a circuit": (vllm_mtpc.circuits, vllm_mtpc.circuits.CIRCUITS),
    "Add a trunk": (vllm_mtpc.heads.trunk, TRUNKS.places),
    "Add leaves": (vllm_mtpc.heads.leaves, LEAVES.places),
}


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The fenced blocks as the file and the line of the registry that they are."""
    with pytest.MonkeyPatch.context() as patch:
        for title, (package, registry) in PARTS.items():
            section = TEXT.split(f"## {title}\n")[1].split("\n## ")[0]
            blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
            file, line = (re.sub(r"(?m)^   ", "", block) for block in blocks)
            folder = tmp_path_factory.mktemp("part")
            patch.setattr(package, "__path__", [*package.__path__, str(folder)])
            for name, where in eval(f"{{{line}}}" if ":" in line.split('"')[2] else f"dict({line})").items():
                (folder / f"{name}.py").write_text(file, encoding="utf-8")
                patch.setitem(registry, name, where)
                patch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
        yield


@pytest.mark.parametrize("n, r, vocab", [(2, 3, 4), (3, 2, 4), (5, 3, 3), (6, 2, 3)])
def test_recipe_circuit_equals_enumeration(n, r, vocab):
    circuit = make(NAME, n, r)
    circuit_checks.check_enumeration((NAME, circuit, random_params(circuit, vocab, batch=2, seed=n)))


def test_trained_cp_becomes_the_recipe_circuit():
    circuit_checks.check_growth_from_a_cp("linear", NAME, 4, 1)
    circuit_checks.check_growth_from_an_ff("linear", NAME)


@pytest.mark.parametrize("ids", [None, [0, 2]], ids=["all ids", "draft vocabulary"])
@pytest.mark.parametrize("trunk", ["dense", "none", "mlp"])
@pytest.mark.parametrize("leaves", ["biases", "own"])
def test_recipe_trunk_and_leaves_make_a_head(tmp_path, monkeypatch, trunk, leaves, ids):
    """Of the recipe's circuit: it grows from a trained ff, is a distribution, is saved and drafts."""
    parts = {"trunk": {"kind": trunk}, "leaves": {"kind": leaves}}
    monkeypatch.setitem(heads_zoo.OPTIONS, "recipe", parts)
    circuit_checks.check_growth_from_an_ff("recipe", NAME)
    config = heads_zoo.configure("recipe", NAME, columns=ids and len(ids))
    head = heads_zoo.build("recipe", NAME, ids=ids, std=0.3)
    init_from_lm_head(head, heads_zoo.LM_HEAD, seed=0)
    save_head(tmp_path, config, head, {}, "card", torch.float32)
    loaded = load_head(tmp_path)[1]
    heads_zoo.bind_target(loaded)
    first = torch.arange(heads_zoo.B)
    params, again = (made(heads_zoo.hidden_states(), first) for made in (head, loaded))
    assert torch.equal(params.leaf, again.leaf) and torch.equal(params.inner, again.inner)
    torch.testing.assert_close(params.leaf.exp().sum(-1), torch.ones(params.leaf.shape[:-1]))
    found = loaded.draft_params(heads_zoo.hidden_states(), first, 2)
    torch.testing.assert_close(found.leaf.log_softmax(-1), params.leaf[:, 1 - params.skip :][:, :2])


def test_help_lists_the_recipes(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "own, lm_head, biases: rank of the term that the token before adds" in printed


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
