"""PTP heads under a grammar, and on a target with quantised weights."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.support.engine import Call, Engine, Reply, run
from tests.support.models import make_head, make_ptp_head, make_target
from tests.support.quantised import quantise
from tests.support.requests import SCHEMA, TEXT
from vllm_mtpc import demo

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reply]:
    folder = tmp_path_factory.mktemp("quantised")
    target = make_target(folder / "float", 48, seed=3)
    quantise(folder / "float", folder / "target")
    make_ptp_head(folder / "o-ptp", target, "o-ptp", 5, scale=0.01)
    make_head(folder / "btree", target, "btree", 4, 2)

    grammar = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60}
    schema = Call([list(TEXT.encode())] * 3, [{"temperature": 0.0, **grammar}, *sampled(2, **grammar)])
    plain = Call([[3, 9, 4], [20, 21, 22, 23, 24]] * 2, [*[{"temperature": 0.0, "max_tokens": 16}] * 2, *sampled(2)])
    whitespace = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}

    def with_head(method: str, model: Any, **options: Any) -> dict[str, Any]:
        return {"speculative_config": {"method": method, "model": str(model), **options}}

    def on_demo(**arguments: Any) -> Engine:
        return Engine(str(demo.path("target")), [schema], {"max_model_len": 256, **whitespace, **arguments})

    def on_quantised(**arguments: Any) -> Engine:
        arguments |= {"skip_tokenizer_init": True, "max_model_len": 96, "dtype": "bfloat16"}  # what its kernel reads
        return Engine(str(folder / "target"), [plain], arguments)

    o_ptp = {"num_speculative_tokens": 3, "max_aux_rows": 24, "draft_pass": "merged"}
    replies = run(
        {
            "schema plain": on_demo(),
            "schema ptp": on_demo(**with_head("ptp", demo.path("o-ptp"), **o_ptp)),
            "int8 plain": on_quantised(),
            "int8 ptp": on_quantised(**with_head("ptp", folder / "o-ptp", **o_ptp)),
            "int8 two passes": on_quantised(**with_head("ptp", folder / "o-ptp", **o_ptp | {"draft_pass": "two-pass"})),
            "int8 btree": on_quantised(**with_head("mtpc", folder / "btree")),
        },
        "v2",
    )
    for name, reply in replies.items():
        assert not isinstance(reply, str), (name, reply)
    return {name: reply[0] for name, reply in replies.items()}


def sampled(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"temperature": 1.0, "seed": 5 + n, "max_tokens": 16, **more} for n in range(count)]


@pytest.mark.column("ptp on V2")
@pytest.mark.feature("JSON schema", "exact")
@pytest.mark.feature("synchronous scheduling", "exact")
def test_output_under_a_grammar_is_valid(answers: dict[str, Reply]) -> None:
    reply = answers["schema ptp"]
    for texts, finish in zip(reply.texts, reply.finish, strict=True):
        assert finish[0] == "stop"
        jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert reply.tokens[0] == answers["schema plain"].tokens[0]
    assert reply.metrics[ACCEPTED] > 0


@pytest.mark.feature("8-bit target (int8, compressed-tensors)", "exact")
@pytest.mark.parametrize(
    "head",
    [
        pytest.param("ptp", marks=pytest.mark.column("ptp on V2")),
        pytest.param("two passes", marks=pytest.mark.column("ptp on V2")),
        pytest.param("btree", marks=pytest.mark.column("mtpc on V2")),
    ],
)
def test_greedy_text_of_a_quantised_target(answers: dict[str, Reply], head: str) -> None:
    reply = answers[f"int8 {head}"]
    assert reply.tokens[:2] == answers["int8 plain"].tokens[:2]
    assert reply.metrics[ACCEPTED] > 0


def test_sampled_text_of_a_quantised_target_does_not_depend_on_the_pass(answers: dict[str, Reply]) -> None:
    assert answers["int8 ptp"].tokens[2:] == answers["int8 two passes"].tokens[2:]
