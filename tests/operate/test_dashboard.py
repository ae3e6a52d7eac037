"""The Grafana board and the Prometheus rules: Prometheus itself reads them, scrapes a real server and answers them.

They sum over the replicas of one page.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.child_process import group
from vllm_mtpc import demo
from vllm_mtpc.engine import server
from vllm_mtpc.errors import EngineFailed

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docs" / "prometheus-rules.yml"
PANELS = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))["panels"]
RECORDED = [rule["expr"] for rule in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"][0]["rules"]]
EXPRESSIONS = {
    f"{panel['title']} {target['refId']}": target["expr"].replace("$model", ".*").replace("$__rate_interval", "30s")
    for panel in PANELS
    for target in panel["targets"]
}
RULE_NAMES = [f"vllm_mtpc:{name}:rate5m" for name in ("tokens_per_step", "class_tokens_per_step", "drafts_accepted")]
NEEDS_PROMETHEUS = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="prometheus and promtool are not installed: apt install prometheus"
)
ALERTS = """
rule_files: [rules.yml]
evaluation_interval: 1m
tests:  # the replicas of "good" have equal rates: ratios of sums are then exact
  - interval: 1m
    input_series:
      - {series: 'vllm:spec_decode_num_draft_tokens_total{model_name="stale"}', values: '0+700x60'}
      - {series: 'vllm:spec_decode_num_accepted_tokens_total{model_name="stale"}', values: '0+75x60'}
      - {series: 'vllm:spec_decode_steps_total{model_name="stale"}', values: '0+100x60'}
      - {series: 'vllm:spec_decode_num_draft_tokens_total{model_name="good",replica="a"}', values: '0+350x60'}
      - {series: 'vllm:spec_decode_num_draft_tokens_total{model_name="good",replica="b"}', values: '42000+350x60'}
      - {series: 'vllm:spec_decode_num_accepted_tokens_total{model_name="good",replica="a"}', values: '0+125x60'}
      - {series: 'vllm:spec_decode_num_accepted_tokens_total{model_name="good",replica="b"}', values: '42000+125x60'}
      - {series: 'vllm:spec_decode_steps_total{model_name="good",replica="a"}', values: '0+50x60'}
      - {series: 'vllm:spec_decode_steps_total{model_name="good",replica="b"}', values: '42000+50x60'}
      - {series: 'vllm:spec_decode_drafts_pruned_total{model_name="good",by="budget"}', values: '0+900x60'}
      - {series: 'vllm:spec_decode_drafts_pruned_total{model_name="stale",by="schedule"}', values: '0+900x60'}
    promql_expr_test:
      - expr: vllm_mtpc:tokens_per_step:rate5m
        eval_time: 50m
        exp_samples:
          - {labels: 'vllm_mtpc:tokens_per_step:rate5m{model_name="stale"}', value: 1.75}
          - {labels: 'vllm_mtpc:tokens_per_step:rate5m{model_name="good"}', value: 3.5}
    alert_rule_test:
      - {eval_time: 20m, alertname: DraftsBringLittle, exp_alerts: []}
      - {eval_time: 50m, alertname: DraftsBringLittle, exp_alerts: [{exp_labels: {model_name: stale, severity: info}}]}
      - {eval_time: 50m, alertname: DraftsFindNoRoom, exp_alerts: [{exp_labels: {model_name: good, severity: info}}]}
"""


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, timeout=60)


@NEEDS_PROMETHEUS
def test_rules_alert_when_they_should(tmp_path: Path) -> None:
    """Annotations are left out of the comparison: they are prose."""
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    for rule in rules["groups"][0]["rules"]:
        rule.pop("annotations", None)
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    (tmp_path / "test.yml").write_text(ALERTS)
    assert promtool("check", "rules", RULES).returncode == 0
    done = promtool("test", "rules", tmp_path / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "test.yml").write_text(ALERTS.replace("value: 1.75", "value: 1.8"))
    assert promtool("test", "rules", tmp_path / "test.yml").returncode != 0  # it does compare


class Prometheus(server.Client):
    def ask(self, expression: str) -> list[dict[str, Any]]:
        return self.send("/api/v1/query?" + urllib.parse.urlencode({"query": expression})).json()["data"]["result"]

    def scrapes(self) -> float:
        """How often the server has been scraped; 0 where Prometheus does not answer yet."""
        try:
            return sum(float(one["value"][1]) for one in self.ask("count_over_time(up[5m])"))
        except (EngineFailed, ValueError):
            return 0.0


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus after some seconds of a server with a head under load."""
    folder = tmp_path_factory.mktemp("scraped")
    words = [str(demo.path("btree")), "--dtype", "float32", "--enforce-eager", "--served-model-name", "m"]
    words += ["--kv-cache-memory-bytes", str(1 << 26), "--max-model-len", "512"]
    with server.run_server(words, folder / "server.log") as client:
        port = server.free_port()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{client.port}"]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        with group(command, folder / "prometheus.log", {**os.environ}):
            made = Prometheus(port)
            load(client, lambda: made.scrapes() >= 6)
            yield made


def load(client: server.Client, is_enough: Callable[[], bool]) -> None:
    """Greedy, sampled and structured requests, some of which ask for few drafts."""
    base = {"model": "m", "prompt": "def read(path):\n    ", "max_tokens": 48, "temperature": 0}
    structured, few = {"structured_outputs": {"regex": "[a-z]{40,48}"}}, {"vllm_xargs": {"mtpc_drafts": 2}}
    until = time.monotonic() + 60

    def ask(more: dict[str, Any]) -> None:
        while time.monotonic() < until and not is_enough():
            client.complete(base | more)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, ({}, {"temperature": 1.0}, structured, few)))


@NEEDS_PROMETHEUS
@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXPRESSIONS, *RULE_NAMES])
def test_every_panel_and_rule_has_values(scraped: Prometheus, name: str) -> None:
    found = scraped.ask(EXPRESSIONS.get(name, name))
    assert found, name
    values = [float(one["value"][1]) for one in found]
    assert any(math.isfinite(value) for value in values), values
    if name == "Tokens per step A":
        assert 1.0 < values[0] < 8.0
    if name.startswith("Tokens per step by class"):
        assert {one["metric"]["request"] for one in found} == {"greedy", "sampled", "structured"}
        assert all(1.0 < value < 8.0 for value in values), values
    if name == "Drafts not verified A":
        assert {one["metric"]["by"] for one in found} == {"schedule", "confidence", "budget", "request"}
        assert next(float(one["value"][1]) for one in found if one["metric"]["by"] == "request") > 0


def page(count: int) -> str:
    registry = CollectorRegistry()
    Counter("vllm:steps", "Steps", ["model_name"], registry=registry).labels('a "b"\n\\').inc(count)
    Histogram("vllm:seconds", "Seconds", registry=registry, buckets=[1, 2]).observe(count)
    return generate_latest(registry).decode()


def samples(text: str, **labels: str) -> dict[tuple[Any, ...], float]:
    families = text_string_to_metric_families(text)
    every = [one for family in families for one in family.samples]
    return {(one.name, *sorted({**one.labels, **labels}.items())): one.value for one in every}


def test_each_sample_keeps_its_value_under_the_name_of_its_replica() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    from vllm_mtpc.ray_serve.deployments import with_replicas

    texts = {"one": page(1), "other": page(42), "silent": ""}
    whole = with_replicas(texts).decode()
    expected: dict[tuple[Any, ...], float] = {}
    for replica, text in texts.items():
        expected |= samples(text, replica=replica)
    assert samples(whole) == expected and len(expected) == 16
    headers = [line for line in whole.splitlines() if line.startswith("# TYPE")]
    assert len(headers) == len(set(headers)) == 4  # each family once, as the format wants


@pytest.mark.parametrize("expression", [*EXPRESSIONS.values(), *RECORDED])
def test_every_metric_is_aggregated_over_replicas(expression: str) -> None:
    aggregated = re.findall(r"\b(?:sum|avg)(?: by \([a-z_, ]+\))? ?\((?:rate\()?vllm:", expression)
    assert len(aggregated) == expression.count("vllm:")
    assert "replica" not in expression
