"""The table of what is tested where names tests that exist; `.ci/run` compares it with their outcomes."""

from __future__ import annotations

from benchmarks import support


def test_every_cell_has_a_column_and_its_tests_a_file() -> None:
    for columns in support.read_yaml(support.CELLS).values():
        assert set(columns) <= set(support.COLUMNS)
        for name in (one for proofs in columns.values() for one in proofs if "::" in one):
            file, _, test = name.partition("::")
            assert f"def {test.partition('[')[0]}(" in (support.ROOT / file).read_text(encoding="utf-8"), name
