"""The Grafana board and the Prometheus rules: alerts by Prometheus itself, sums over replicas.

`test_running_server.py` compares their names with the metrics of a server.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docs" / "prometheus-rules.yml"
PANELS = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))["panels"]
RECORDED = [rule["expr"] for rule in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"][0]["rules"]]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]] + RECORDED
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
      - {series: 'vllm_mtpc:spec_decode_steps_total{model_name="stale"}', values: '0+100x60'}
      - {series: 'vllm:spec_decode_num_draft_tokens_total{model_name="good",replica="a"}', values: '0+350x60'}
      - {series: 'vllm:spec_decode_num_draft_tokens_total{model_name="good",replica="b"}', values: '42000+350x60'}
      - {series: 'vllm:spec_decode_num_accepted_tokens_total{model_name="good",replica="a"}', values: '0+125x60'}
      - {series: 'vllm:spec_decode_num_accepted_tokens_total{model_name="good",replica="b"}', values: '42000+125x60'}
      - {series: 'vllm_mtpc:spec_decode_steps_total{model_name="good",replica="a"}', values: '0+50x60'}
      - {series: 'vllm_mtpc:spec_decode_steps_total{model_name="good",replica="b"}', values: '42000+50x60'}
      - {series: 'vllm_mtpc:spec_decode_drafts_pruned_total{model_name="good",by="budget"}', values: '0+900x60'}
      - {series: 'vllm_mtpc:spec_decode_drafts_pruned_total{model_name="stale",by="schedule"}', values: '0+900x60'}
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


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_is_aggregated_over_replicas(expression: str) -> None:
    aggregated = re.findall(r"\b(?:sum|avg)(?: by \([a-z_, ]+\))? ?\((?:rate\()?vllm(?:_mtpc)?:spec", expression)
    assert len(aggregated) == len(re.findall(r"vllm(?:_mtpc)?:spec", expression))
    assert "replica" not in expression
