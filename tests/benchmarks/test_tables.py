"""Tables of benchmarks/RESULTS.md are those of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import hosted, served_states


def read(root: Path, name: str) -> dict[str, Any]:
    return json.loads((root / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_tables_are_computed_from_their_files(root: Path) -> None:
    written = (root / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert hosted.table(read(root, "hosted")) in written
    states = read(root, "served-states") | {"served": read(root, "served-int8")["served"]}
    assert served_states.table(states) in written
