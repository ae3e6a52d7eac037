"""What `vllm-mtpc top` reads from a server's metrics."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from rich.console import Console

from vllm_mtpc import cli, top


class Metrics:
    """A server's registry with vLLM's names, for two engines."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ["model_name", "engine"]

        def made(kind: type, name: str, *more: str, **options: object) -> object:
            return kind(name, "help", [*labels, *more], registry=self.registry, **options)

        self.running = made(Gauge, "vllm:num_requests_running")
        self.tokens = made(Counter, "vllm:generation_tokens")
        self.drafts = made(Counter, "vllm:spec_decode_num_drafts")
        self.drafted = made(Counter, "vllm:spec_decode_num_draft_tokens")
        self.accepted = made(Counter, "vllm:spec_decode_num_accepted_tokens")
        self.seconds = made(Counter, "vllm:spec_decode_draft_seconds")
        self.passes = made(Counter, "vllm:spec_decode_draft_passes")
        self.steps = made(Counter, "vllm:spec_decode_steps")
        self.cut = made(Counter, "vllm:spec_decode_drafts_cut", "by")
        self.at = made(Counter, "vllm:spec_decode_num_accepted_tokens_per_pos", "position")
        self.first = made(Histogram, "vllm:time_to_first_token_seconds", buckets=(0.1, 0.2, 0.4))

    def step(self, engine: str, drafted: int, accepted: int) -> None:
        self.drafts.labels("m", engine).inc()
        self.drafted.labels("m", engine).inc(drafted)
        self.accepted.labels("m", engine).inc(accepted)
        for position in range(12):
            self.at.labels("m", engine, str(position)).inc(position < accepted)
        self.tokens.labels("m", engine).inc(1 + accepted)
        self.steps.labels("m", engine).inc()

    def look(self, now: float) -> top.Look:
        return top.Look.parse(generate_latest(self.registry).decode(), now)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def test_figures_are_of_the_time_between_two_looks(metrics: Metrics) -> None:
    metrics.step("0", drafted=7, accepted=7)  # before the first look: not counted
    metrics.first.labels("m", "0").observe(0.39)
    before = metrics.look(10.0)
    metrics.running.labels("m", "0").set(2)
    metrics.running.labels("m", "1").set(1)
    metrics.step("0", drafted=4, accepted=3)
    metrics.step("1", drafted=2, accepted=0)
    metrics.steps.labels("m", "1").inc(3)  # without drafts: the schedule and the plan left them out
    metrics.tokens.labels("m", "1").inc(3)
    metrics.cut.labels("m", "1", "schedule").inc(21)
    metrics.cut.labels("m", "0", "survival").inc(3)
    metrics.seconds.labels("m", "0").inc(0.006)
    metrics.passes.labels("m", "0").inc(2)
    for seconds in (0.15, 0.15, 0.15, 0.3):
        metrics.first.labels("m", "0").observe(seconds)
    figures = top.Between(before, metrics.look(12.0)).figures()
    assert figures["running"] == 3 and figures["seconds"] == 2
    assert figures["tokens_per_second"] == 4  # 4 + 1 + 3 tokens
    assert figures["tokens_per_step"] == 1.6 and figures["drafts_per_step"] == 1.2  # over all five steps
    assert figures["drafts_cut"] == {"schedule": 0.7, "survival": 0.1, "budget": 0}  # of 30 there was room for
    assert figures["accepted_share"] == 0.5
    assert figures["draft_pass_seconds"] == pytest.approx(0.003)
    # in the order of their numbers: "10" does not come before "2"
    assert figures["acceptance_per_position"] == [0.5] * 3 + [0.0] * 9
    # 3 of 4 lie between 0.1 and 0.2: the median is the second of them; 0.95 lies in the last bucket
    assert figures["latency_seconds"]["first token"]["p50"] == pytest.approx(0.1 + 0.1 * 2 / 3)
    assert figures["latency_seconds"]["first token"]["p95"] == pytest.approx(0.2 + 0.2 * 0.8)
    assert figures["latency_seconds"]["whole request"] == {"p50": None, "p95": None}


def test_a_server_started_again_counts_from_its_start(metrics: Metrics) -> None:
    for _ in range(5):
        metrics.step("0", 4, 4)
    before, again = metrics.look(0.0), Metrics()
    again.step("0", 4, 1)
    figures = top.Between(before, again.look(1.0)).figures()
    assert figures["tokens_per_step"] == 2 and figures["tokens_per_second"] == 2


def test_without_drafts(metrics: Metrics) -> None:
    figures = top.Between(metrics.look(0.0), metrics.look(1.0)).figures()
    assert figures["tokens_per_step"] is None and figures["acceptance_per_position"] == []
    console = Console(width=100, record=True)
    console.print(top.screen(figures, "http://x"))
    assert "tokens/step" in (text := console.export_text()) and "none" in text


@pytest.fixture
def server(metrics: Metrics) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(generate_latest(metrics.registry) if self.path == "/metrics" else b"nothing")

        def log_message(self, *args: object) -> None:
            """Silent."""

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_once(server: str, metrics: Metrics, capsys: pytest.CaptureFixture[str]) -> None:
    metrics.step("0", 4, 2)
    metrics.step("0", 4, 1)
    assert cli.main(["top", f"{server}/", "--once"]) == 0
    screen = capsys.readouterr().out
    assert "tokens/step" in screen and "2.50" in screen and "draft 1" in screen and "█" * top.BAR in screen
    assert cli.main(["top", server, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens_per_step"] == 2.5


def test_live(server: str, metrics: Metrics, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    looks = iter([None, None])

    def sleep(seconds: float) -> None:
        if next(looks, "end") == "end":
            raise KeyboardInterrupt
        metrics.step("0", 4, 3)

    monkeypatch.setattr(top.time, "sleep", sleep)
    assert cli.main(["top", server, "--json"]) == 130
    assert [json.loads(line)["tokens_per_step"] for line in capsys.readouterr().out.splitlines()] == [4.0, 4.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:9"], "name a server that runs, e.g. http://localhost:8000"),
        (["no address"], "name a server that runs"),
        (["http://127.0.0.1:9", "--interval", "0"], "seconds above 0 are allowed"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", *arguments]) == 1
    assert message in (error := capsys.readouterr().err) and error.count("\n") == 1


def test_another_server_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(top.urllib.request, "urlopen", lambda *args, **more: io.BytesIO(b"# nothing"))
    assert cli.main(["top", "http://localhost:1", "--once"]) == 1
    assert "no metrics of vLLM" in capsys.readouterr().err
