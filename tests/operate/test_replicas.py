"""The page of several replicas' metrics, and that the dashboard and the rules sum over them. Needs no Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_mtpc.ray_serve.deployments import with_replicas

DOCS = Path(__file__).parents[2] / "docs"
PANELS = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))["panels"]
RULES = yaml.safe_load((DOCS / "prometheus-rules.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]] + [rule["expr"] for rule in RULES]


def page(count: int) -> str:
    registry = CollectorRegistry()
    Counter("vllm:steps", "Steps", ["model_name"], registry=registry).labels('a "b"\n\\').inc(count)
    Histogram("vllm:seconds", "Seconds", registry=registry, buckets=[1, 2]).observe(count)
    return generate_latest(registry).decode()


def test_each_sample_keeps_its_value_under_the_name_of_its_replica() -> None:
    texts = {"one": page(1), "other": page(42), "silent": ""}
    whole = with_replicas(texts).decode()
    found = {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in text_string_to_metric_families(whole)
        for one in family.samples
    }
    expected = {
        (one.name, tuple(sorted({**one.labels, "replica": replica}.items()))): one.value
        for replica, text in texts.items()
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }
    assert found == expected and len(found) == 16
    headers = [line for line in whole.splitlines() if line.startswith("# TYPE")]
    assert len(headers) == len(set(headers)) == 4  # each family once, as the format wants


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_is_aggregated_over_replicas(expression: str) -> None:
    aggregated = re.findall(r"\b(?:sum|avg)(?: by \([a-z_, ]+\))? ?\((?:rate\()?vllm:", expression)
    assert len(aggregated) == expression.count("vllm:")
    assert "replica" not in expression
