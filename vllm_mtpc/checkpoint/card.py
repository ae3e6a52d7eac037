"""What the hub reads of a head's README.md."""

from __future__ import annotations

from collections.abc import Sequence


def front_matter(tags: Sequence[str], base_model: str | None) -> str:
    """The YAML in front of a card; `base_model` is the target's name on the hub, None for a folder.

    The licence is its publisher's to choose. Both are filled in before a head is published (docs/training.md).
    """
    lines = [
        "---",
        "library_name: vllm",
        "pipeline_tag: text-generation",
        f"tags: [{', '.join(tags)}]",
        "license: unknown  # yours to choose; the target's own may bind it",
        f"base_model: {base_model}" if base_model else "base_model: OWNER/NAME  # the target on the hub",
        "---",
    ]
    return "\n".join(lines)
