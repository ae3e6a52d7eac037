"""The table of what is tested where: a cell that loses its proof is named, and slow tests keep their day."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import support

CELLS = {
    "streams": {"V1, CPU": ["tests/a/test_a.py::test_one[v1]"], "V2, interpreted": ["tests/a/test_a.py::test_one[v2*"]},
    "seeds": {"V1, CPU": ["tests/test_cli.py::test_slow"], "GPU": ["gpu-kernels.json"]},
}
CASE = '<testcase classname="tests.a.test_a" name="{}">{}</testcase>'
SLOW = '<properties><property name="slow" value="True"/></properties>'


def outcomes(tmp_path: Path, *cases: str) -> tuple[str, list[support.Outcome]]:
    file = tmp_path / "tests.xml"
    file.write_text(f'<testsuites><testsuite timestamp="2026-01-02T03:04:05">{"".join(cases)}</testsuite></testsuites>')
    return support.read_run(file)


def test_cells_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_cli.py").write_text("\ndef test_slow() -> None: ...\n")
    passing = [CASE.format("test_one[v1]", ""), CASE.format("test_one[v2, both]", SLOW)]
    day, found = outcomes(tmp_path, *passing)
    older = {"seeds: V1, CPU": "2025-12-31"}
    cells, lost = support.proved(CELLS, found, day, older, whole=True)
    gpu = cells.pop("seeds: GPU")
    assert not lost and gpu.startswith("20")
    assert cells == {"streams: V1, CPU": "always", "streams: V2, interpreted": "2026-01-02", **older}
    assert "| streams | ✓ | 2026-01-02 |" in support.table(CELLS, cells)

    def lose(*cases: str, known: dict[str, str] = older, whole: bool = True) -> list[str]:
        return [
            line.partition(",")[0]
            for line in support.proved(CELLS, outcomes(tmp_path, *cases)[1], day, known, whole)[1]
        ]

    assert lose(passing[0]) == ["streams: V2"]  # not run, and never proved
    assert lose(CASE.format("test_one[v1]", "<failure/>"), passing[1]) == ["streams: V1"]
    assert lose(CASE.format("test_one[v1]", "<skipped/>"), passing[1]) == ["streams: V1"]
    (tmp_path / "tests" / "a").mkdir()
    (tmp_path / "tests" / "a" / "test_a.py").write_text("\ndef test_one(runner: str) -> None: ...\n")
    assert lose(passing[1], known={**older, "streams: V1, CPU": "always"}) == ["streams: V1"]
    assert not lose(passing[1], known={**older, "streams: V1, CPU": "always"}, whole=False)  # of slow tests alone
    (tmp_path / "tests" / "test_cli.py").write_text("def test_other() -> None: ...\n")
    assert lose(*passing) == ["seeds: V1"]


def test_every_cell_has_a_column_and_its_tests_a_file() -> None:
    for columns in support.read_yaml(support.CELLS).values():
        assert set(columns) <= set(support.COLUMNS)
        for name in (one for proofs in columns.values() for one in proofs if "::" in one):
            file, _, test = name.partition("::")
            assert f"def {test.partition('[')[0]}(" in (support.ROOT / file).read_text(encoding="utf-8"), name
