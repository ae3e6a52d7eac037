"""The dashboard asks for metrics that this vLLM has, or that this package adds."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUFFIX = re.compile(r"_(total|bucket)$")

NO_VLLM = "vllm is not installed, whose metrics are looked up: run scripts/setup.sh"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=NO_VLLM)
def test_every_metric_exists() -> None:
    sources = Path(importlib.util.find_spec("vllm").origin).parent / "v1"
    text = "".join((sources / file).read_text() for file in ("metrics/loggers.py", "spec_decode/metrics.py"))
    text += "".join(file.read_text() for file in (ROOT / "proposers" / "seam").glob("*.py"))
    names = set(re.findall(r'"(vllm:\w+)"', text))
    assert {"vllm:generation_tokens", "vllm:spec_decode_num_drafts"} <= names
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"vllm:\w+", expression)}
    assert len(asked) > 8
    for name in asked:
        assert SUFFIX.sub("", name) in names or name in names, name


def test_panels_are_told_apart() -> None:
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    for key in ("id", "title", "gridPos"):
        assert len({str(panel[key]) for panel in panels}) == len(panels)
