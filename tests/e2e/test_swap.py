"""Heads that are swapped while an engine runs: the text stays plain vLLM's, and what does not fit changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Call, Engine, Reply, beside_plain
from tests.support.models import make_head, make_ptp_head, make_target
from tests.support.requests import ACCEPTED, COLUMNS

PROMPTS = [[3, 9, 4], [20, 21, 22, 23, 24], [7, 7, 1, 12]]
OPTIONS = {"mtpc": {"method": "mtpc"}, "ptp": {"method": "ptp", "max_aux_rows": 32}}
OTHERS = {"mtpc": "mtpc-other", "ptp": "ptp-other"}
REFUSED = {  # by method: heads that do not fit, and what is said
    "mtpc": {
        "short": "has window=3 and its first token is the target's own, so allowed are 1 to 2",
        "of another vocabulary": "has vocab_size=40, but target",
        "ptp": "is of method 'ptp', not 'mtpc'",
        "nowhere": "nowhere",
        "cut off": "cut off",
    },
    "ptp": {"of another rank": "it has lora_rank=2, the served head 4", "mtpc": "is of method 'mtpc', not 'ptp'"},
}


def call(is_drawn: bool, *swap: str) -> Call:
    how = {"temperature": 1.0, "seed": 5} if is_drawn else {"temperature": 0.0}
    return Call(PROMPTS, [{"max_tokens": 24, "ignore_eos": True, "detokenize": False, **how}] * 3, swap=swap)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swap")
    target = make_target(folder / "target", 48, seed=3)
    make_head(folder / "mtpc", target, "btree", 4, 2)
    make_head(folder / "mtpc-other", target, "hmm", 5, 3)
    make_head(folder / "mtpc-same", target, "btree", 4, 2, is_bad=True)
    make_head(folder / "short", target, "hmm", 3, 2)
    make_head(folder / "of another vocabulary", make_target(folder / "other target", 40, seed=3), "hmm", 4, 2)
    make_ptp_head(folder / "ptp", target, "o-ptp", 4, scale=0.01)
    make_ptp_head(folder / "ptp-other", target, "o-ptp", 4, scale=0.3)
    make_ptp_head(folder / "of another rank", target, "o-ptp", 4, scale=0.01, rank=2)
    make_head(folder / "cut off", target, "hmm", 4, 2)
    weights = folder / "cut off" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.fixture(scope="module")
def replies(folder: Path) -> Any:
    """By runner and head: to each of `calls`, greedy then drawn, then to heads that are refused, then greedy again."""
    made: dict[tuple[str, str], tuple[list[Reply], list[Reply]]] = {}

    def of(runner: str, head: str) -> tuple[list[Reply], list[Reply]]:
        if (runner, head) not in made:
            own, other = str(folder / head), str(folder / OTHERS[head])
            calls = [call(drawn, *swap) for drawn in (False, True) for swap in ((), (other,), (own, other))]
            greedy = call(False)
            bad = [replace(greedy, is_refused=True, swap=(str(folder / name),)) for name in REFUSED[head]]
            spec = {**OPTIONS[head], "model": own, "num_speculative_tokens_per_batch_size": "off"}
            if runner == "v1":
                spec["min_survival"] = 0.0
            arguments = {"skip_tokenizer_init": True, "max_model_len": 64}
            plain = Engine(str(folder / "target"), [greedy, call(True)], arguments)
            ours = Engine(plain.model, [*calls, *bad, greedy], {**arguments, "speculative_config": spec})
            made[runner, head] = beside_plain(ours, plain, runner)
        return made[runner, head]

    return of


@pytest.mark.feature("a head swapped while serving", "exact")
@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_text_is_the_same(replies: Any, runner: str, head: str) -> None:
    ours, plain = replies(runner, head)
    for number in (0, 1, 2, -1):
        assert ours[number].tokens == plain[0].tokens, number
    for number in (3, 4, 5):  # PTP's seeded text is its own, whatever is drafted
        assert ours[number].tokens == (ours[3] if head == "ptp" else plain[1]).tokens, number
    assert ours[-1].metrics[ACCEPTED] > ours[2].metrics[ACCEPTED] > ours[0].metrics[ACCEPTED] > 0


@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_the_other_head_drafts(replies: Any, folder: Path, runner: str, head: str) -> None:
    ours, _ = replies(runner, head)
    first, *swapped = (ours[number].recorded for number in (0, 1, 2))
    assert first == [] and swapped[0][0]["head"] == str(folder / OTHERS[head])
    heads = {str(folder / head), str(folder / OTHERS[head])}
    assert len(swapped[1]) >= 4 and {one["head"] for one in swapped[1]} == heads
    drafted = [reply.metrics["vllm:spec_decode_num_drafts"] for reply in ours[:2]]
    accepted = [reply.metrics[ACCEPTED] for reply in ours[:2]]
    # of another head, so another number of drafts is accepted
    assert accepted[1] / drafted[1] != accepted[0] / drafted[0]


def test_heads_of_equal_shape_are_swapped_where_graphs_hold_their_addresses(folder: Path) -> None:
    """As on a GPU, in `benchmarks/gpu/run.sh tests` too: the new weights draft, a head of another shape is refused."""
    own, same, other = (str(folder / name) for name in ("mtpc", "mtpc-same", "mtpc-other"))
    greedy = call(False)
    calls = [greedy, call(False, same), replace(greedy, is_refused=True, swap=(other,)), call(False, own, same)]
    arguments = {"skip_tokenizer_init": True, "max_model_len": 64}
    plain = Engine(str(folder / "target"), [greedy], arguments)
    spec = {"method": "mtpc", "model": own, "num_speculative_tokens_per_batch_size": "off"}
    ours = Engine(plain.model, calls, {**arguments, "speculative_config": spec}, injected="keeps_shapes")
    first, swapped, refused, in_turns = (found := beside_plain(ours, plain, "v2"))[0]
    assert all(reply.tokens == found[1][0].tokens for reply in (first, swapped, in_turns))
    assert swapped.recorded[0]["head"] == same and len(in_turns.recorded) >= 3
    # a head that says what the target finds least likely: none of its drafts is kept
    accepted = [reply.metrics[ACCEPTED] for reply in (first, swapped)]
    assert accepted[1] - accepted[0] < accepted[0] / 4
    assert "for which memory and CUDA graphs were made; allowed are heads of equal shape" in refused.error
    assert "it has window=5, the served head 4" in refused.error and "\n" not in refused.error


@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_what_does_not_fit_is_refused(replies: Any, runner: str, head: str) -> None:
    ours, _ = replies(runner, head)
    for reply, (name, said) in zip(ours[6:-1], REFUSED[head].items(), strict=True):
        assert "the head is not swapped" in reply.error and "drafts on: " in reply.error, name
        assert said in reply.error and "\n" not in reply.error, (name, reply.error)
