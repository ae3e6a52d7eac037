"""tests/claims.md lists the tests of this commit."""

from __future__ import annotations

from pathlib import Path

from tests.support import claims


def test_list_of_claims_is_current(root: Path) -> None:
    written = (root / "tests" / "claims.md").read_text(encoding="utf-8")
    assert written == claims.page(), "type: python -m tests.support.claims --write tests/claims.md"
