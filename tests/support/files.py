"""Parts of documents: the front matter of a head's card, rows of the table of options in docs/training.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vllm_mtpc.train.options import TrainOptions


def front_matter_of(folder: Path) -> dict[str, Any]:
    """The YAML in front of a folder's README.md."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def row(name: str) -> str:
    """The line of docs/training.md about an option."""
    field = TrainOptions.model_fields[name]
    words = {None: "", False: "off", True: "on"}
    shown = "" if field.default in ([], {}) else words.get(field.default, f"`{field.default}`")
    if type(field.default) in (int, float):  # 0 and 1 are no words
        shown = f"`{field.default}`"
    description = field.description.replace("|", "\\|")
    return f"| `{name}` | {'required' if field.is_required() else shown} | {description} |"
