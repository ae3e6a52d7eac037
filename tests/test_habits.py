"""What users of vLLM, transformers and speculators type: it works, or one line names what does."""

from __future__ import annotations

import re
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from benchmarks.demo import demo_heads
from tests.support.configs import engine_config
from vllm_mtpc import plugin
from vllm_mtpc.cli import main
from vllm_mtpc.proposers.patches.patch import apply
from vllm_mtpc.proposers.patches.vllm_patches import WITH_HEAD
from vllm_mtpc.proposers.worker import counts

TARGET, HEAD = demo_heads.path("target"), demo_heads.path("btree")


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> None:
    plugin.register()
    apply(*WITH_HEAD)


def speculative_config(*words: str) -> Any:
    """Return the speculative config of `vllm serve TARGET` with these arguments."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    small = ("--dtype", "float32", "--max-model-len", "64", "--kv-cache-memory-bytes", "64M", "--skip-tokenizer-init")
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", str(TARGET), *small, *words]))
    return args.create_engine_config().speculative_config


def test_spec_method_and_spec_model_flags_serve_a_head() -> None:
    spec = speculative_config("--spec-method", "mtpc", "--spec-model", str(HEAD), "--spec-tokens", "3")
    assert (spec.method, spec.model_folder, spec.num_speculative_tokens) == ("mtpc", str(HEAD), 3)


@pytest.mark.parametrize("words", [("--spec-model", str(HEAD)), ("-sc", f'{{"model": "{HEAD}"}}')])
def test_method_is_that_of_the_head_without_a_method(words: tuple[str, ...]) -> None:
    spec = speculative_config(*words)
    assert (spec.method, spec.model_folder) == ("mtpc", str(HEAD))


def test_ptp_is_a_choice_of_spec_method(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Model Runner V1") as caught:  # a CPU's: past argparse, and one line
        speculative_config("--spec-method", "ptp", "--spec-model", str(demo_heads.path("o-ptp")))
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(SystemExit):
        speculative_config("--spec-method", "nonsense", "--spec-model", str(HEAD))


def test_draft_model_of_another_kind_is_left_to_vllm() -> None:
    with pytest.raises(Exception, match="nowhere"):
        engine_config(TARGET, {"model": str(TARGET / "nowhere"), "num_speculative_tokens": 2})


def test_demo_answers_chats() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "def read(path):"}], tokenize=False)
    assert text == "def read(path):\n"


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("train --learning_rate 0.1 --nonsense", 2, "train: error: unknown argument --nonsense"),
        ("train --model M --output-dir O", 2, r"unknown argument --model \(did you mean --target\?\)"),
        ("train --target T --data D --output-dir O", 2, r"unknown argument --output-dir \(did you mean --out\?\)"),
        ("train", 2, "--target, --data, --out missing"),
        ("doctor", 2, "doctor: error: the following arguments are required: HEAD"),
        ("eval nowhere --data D", 1, "no head at nowhere"),
        ("serve HEAD", 2, r"unknown command serve \(did you mean vllm serve HEAD\?\)"),
        ("evla", 2, r"unknown command evla \(did you mean eval\?\)"),
    ],
)
def test_error_is_one_line_with_the_exit_code_of_its_kind(words: str, code: int, line: str, capsys: Any) -> None:
    try:
        assert main(words.split()) == code
    except SystemExit as stop:
        assert stop.code == code
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith("vllm-mtpc") and re.search(line, printed)


def loggers() -> dict[str, Any]:
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    return {"prometheus": PrometheusStatLogger, "ray": RayPrometheusStatLogger}


@pytest.mark.parametrize("kind", ["prometheus", "ray"])
@pytest.mark.parametrize(("method", "counted"), [("mtpc", 10), ("ngram", None)])
def test_counters_have_our_prefix_and_for_one_release_that_of_vllm(kind: str, method: str, counted: int | None) -> None:
    registry = prometheus_client.CollectorRegistry()

    class Prom(loggers()[kind]._spec_decoding_cls):
        @staticmethod
        def _counter_cls(*args: Any, **kwargs: Any) -> prometheus_client.Counter:
            return prometheus_client.Counter(*args, **kwargs, registry=registry)

    spec = SimpleNamespace(method=method, num_speculative_tokens=2)
    prom = Prom(spec, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}, is_diffusion=False)
    for engine in (0, 0, 1):
        stats = SpecDecodingStats.new(2)
        counts.append_counts(stats, {"steps": 5, "budget": 3})
        prom.observe(stats, engine)
    labels = {"model_name": "m", "engine": "0"}
    for prefix in ("vllm_mtpc", "vllm"):
        assert registry.get_sample_value(f"{prefix}:spec_decode_steps_total", labels) == counted
        pruned = {
            name: registry.get_sample_value(f"{prefix}:spec_decode_drafts_pruned_total", {**labels, "by": name})
            for name in counts.PRUNED_BY
        }
        assert pruned == {name: counted and (6 if name == "budget" else 0) for name in counts.PRUNED_BY}
    assert registry.get_sample_value("vllm:spec_decode_num_drafts_total", labels) == 0


@pytest.mark.parametrize(("name", "drafts"), [("btree", 7), ("late", 7)])
def test_speculators_reads_configs_of_heads(name: str, drafts: int) -> None:
    library = pytest.importorskip("speculators", reason="the library speculators is not installed")
    import_module("vllm_mtpc.speculators")
    config = library.SpeculatorModelConfig.from_pretrained(demo_heads.path(name))
    assert config.speculators_config.proposal_methods[0].speculative_tokens == drafts
    assert config.window == drafts + 1
