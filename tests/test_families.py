"""The table of families: every entry names all parts of a family."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from vllm_mtpc import METHODS
from vllm_mtpc.checkpoint import read_config
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.families import FAMILIES, Family

PARTS = ("config", "check", "load", "evaluator", "trainer", "serving")


@pytest.mark.parametrize("method", METHODS)
def test_an_entry_has_all_parts(method):
    family = FAMILIES[method]
    assert tuple(family._places) == PARTS
    assert all(part in Family.__doc__ for part in PARTS)
    assert issubclass(family.config, AnyHeadConfig)
    assert list(inspect.signature(family.check).parameters) == ["folder", "config"]
    with pytest.raises(AttributeError, match="no 'job'"):
        family.job  # noqa: B018


def test_a_family_of_the_table_is_read_by_it(monkeypatch, tmp_path: Path):
    """A config of a third family is read by the class that its entry names; no other code knows the name."""
    (tmp_path / "config.json").write_text('{"speculators_model_type": "third"}')
    monkeypatch.setitem(FAMILIES, "third", Family(config="tests.test_families:Third"))
    assert read_config(tmp_path) == "read by the third"


class Third:
    @staticmethod
    def parse(values: dict[str, str], source: str) -> str:
        assert values == {"speculators_model_type": "third"} and source.endswith("config.json")
        return "read by the third"
