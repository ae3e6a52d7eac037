"""The front matter of a head's card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def front_matter_of(folder: Path) -> dict[str, Any]:
    """The YAML in front of a folder's README.md."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])
