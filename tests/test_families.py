"""The table of families: a config is read by the class that its entry names."""

from __future__ import annotations

from pathlib import Path

from vllm_mtpc.checkpoint import read_config
from vllm_mtpc.families import FAMILIES, Family


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
