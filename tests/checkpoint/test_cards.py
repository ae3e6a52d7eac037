"""What the hub reads of a head's card."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.files import front_matter_of
from vllm_mtpc import demo
from vllm_mtpc.checkpoint.save import front_matter


@pytest.mark.parametrize("name, shown", [("org/model", "org/model"), (None, "OWNER/NAME")])
def test_every_key_is_there(tmp_path: Path, name: str | None, shown: str) -> None:
    (tmp_path / "README.md").write_text(front_matter(["mtpc", "a"], name) + "\n# A head\n")
    assert front_matter_of(tmp_path) == {
        "library_name": "vllm",
        "pipeline_tag": "text-generation",
        "tags": ["mtpc", "a"],
        "license": "unknown",
        "base_model": shown,
    }


@pytest.mark.parametrize("name", demo.NAMES)
def test_packaged_cards(name: str) -> None:
    found = front_matter_of(demo.path(name))
    assert (found["license"], found["pipeline_tag"]) == ("apache-2.0", "text-generation")
    assert name == "target" or "base_model" in found
