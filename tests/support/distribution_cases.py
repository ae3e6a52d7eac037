"""Distributions of whole engines against enumeration: what is asked, and how far the answers are.

A target of three tokens has 729 texts of six, whose probabilities are written down. A case is one engine: a head, the
kinds of request that it is asked together, an injected fault, options.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaForCausalLM

from tests.support import backbones
from tests.support.engine import Call, Engine, Reply, build, run
from tests.support.hosted import make_eagle3
from tests.support.models import make_head, make_ptp_head, sample_target
from tests.support.requests import ALL_DRAFTS

# One false alarm in about 3 million runs for a normal statistic; seeds are fixed, so a test that
# passed once passes again.
SIGMAS = 5.0
PREFIXES = (1, 2, 3, 4)  # tokens of the marginals that are compared besides the whole texts
LEVEL = 1e-6  # of all of them together


AT_ONCE = 50  # answers of one request: vLLM looks at its parameters once, a millisecond and more


def asking(
    prompt: list[int], sampling: dict[str, Any] | Sequence[dict[str, Any]], count: int, at_once: int = AT_ONCE
) -> Call:
    """`count` independent answers to a prompt, a multiple of at_once; of several kinds of request: for each, in turns.

    A seed is that of the first request of its kind; answers of one request have seeds that follow each other.
    """
    assert count % at_once == 0
    kinds = [sampling] if isinstance(sampling, dict) else sampling
    asked = [request for turn in range(count // at_once) for kind in kinds for request in _turn(kind, turn, at_once)]
    return Call([prompt] * len(asked), asked)


def _turn(kind: dict[str, Any], turn: int, at_once: int) -> list[dict[str, Any]]:
    """The requests for at_once answers. vLLM takes greedy requests for one answer alone."""
    if kind.get("temperature") == 0:
        return [kind] * at_once
    return [{**kind, "n": at_once, **({"seed": kind["seed"] + turn * at_once} if "seed" in kind else {})}]


def draws_of(reply: Reply) -> list[list[int]]:
    """All answers of a call."""
    return [sample for samples in reply.tokens for sample in samples]


def draws_by_kind(reply: Reply, kinds: int, at_once: int = AT_ONCE) -> list[list[list[int]]]:
    """Answers of a call by kind of request, in the order in which `asking` was given the kinds."""
    draws = draws_of(reply)
    return [[text for at, text in enumerate(draws) if at // at_once % kinds == kind] for kind in range(kinds)]


UNLIKE_VLLM = ("bad_word", "allowed", "stop", "drafts")


@dataclass(frozen=True)
class Setting:
    """What a request asks for. bad_word, allowed: token ids. stop: ends a text of at least min_tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_word: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    min_tokens: int = 0
    stop: int | None = None
    seed: int | None = None
    drafts: int | None = None  # asked for; None: as many as the engine makes

    def sampling(self) -> dict[str, Any]:
        """Arguments of SamplingParams; words are spelled as `models.make_tokenizer` does."""
        given = {name: value for name, value in vars(self).items() if name not in UNLIKE_VLLM}
        if self.seed is None:
            del given["seed"]
        if self.bad_word:
            given["bad_words"] = ["".join(chr(ord("a") + token) for token in self.bad_word)]
        if self.allowed:
            given["allowed_token_ids"] = list(self.allowed)
        if self.stop is not None:
            given["stop_token_ids"] = [self.stop]
        if self.drafts is not None:
            given["extra_args"] = {"mtpc_drafts": self.drafts}
        return {**given, "ignore_eos": True, "detokenize": False}


SETTINGS = {
    "T=1": Setting(),
    "T=0.7": Setting(temperature=0.7),
    "T=0.3, top-p 0.9": Setting(temperature=0.3, top_p=0.9),
    "T=1.3, top-p 0.8": Setting(temperature=1.3, top_p=0.8),
    "top-k 2": Setting(top_k=2),
    "greedy": Setting(temperature=0.0),
    "presence": Setting(presence_penalty=1.5),
    "repetition": Setting(repetition_penalty=2.0),
    "frequency": Setting(frequency_penalty=1.5),
    "bad words": Setting(bad_word=(0, 1)),
    "allowed ids": Setting(allowed=(0, 2)),
    "min_tokens, stop": Setting(min_tokens=3, stop=2),
    "seeded": Setting(seed=1000),
}
MIXED = tuple(SETTINGS)  # 13 kinds of request
SETTINGS["T=0.7, top-p 0.9"] = Setting(temperature=0.7, top_p=0.9)
SETTINGS |= {f"{count} drafts": Setting(drafts=count) for count in range(3)}


@torch.no_grad()
def exact_distribution(model: LlamaForCausalLM, prompt: list[int], length: int, setting: Setting) -> np.ndarray:
    """Probabilities [V ** length] of all texts, in lexicographic order, float64; one that has ended goes on with 0."""
    vocab_size = model.config.vocab_size
    sequences = torch.tensor(list(itertools.product(range(vocab_size), repeat=length)))
    tokens = torch.cat([torch.tensor(prompt).expand(len(sequences), -1), sequences], dim=1)
    logits = model(tokens).logits[:, len(prompt) - 1 : -1].double()  # [S, length, V]
    logits = _forbidden(_penalised(logits, prompt, sequences, setting), sequences, setting)
    probs = _processed(logits, setting).gather(2, sequences[..., None])[..., 0]
    if setting.stop is not None:
        ended = (sequences == setting.stop).cumsum(1) - (sequences == setting.stop).long() > 0
        probs = torch.where(ended, (sequences == 0).double(), probs)
    return probs.prod(dim=1).numpy()


def _penalised(logits: torch.Tensor, prompt: list[int], sequences: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Presence and frequency count the tokens before the position, repetition the prompt too."""
    tokens = torch.nn.functional.one_hot(sequences, logits.shape[-1])
    counts = tokens.cumsum(1) - tokens
    seen = counts > 0
    seen[..., prompt] = True
    repeated = torch.where(logits > 0, logits / setting.repetition_penalty, logits * setting.repetition_penalty)
    logits = torch.where(seen, repeated, logits)
    return logits - setting.frequency_penalty * counts - setting.presence_penalty * (counts > 0)


def _forbidden(logits: torch.Tensor, sequences: torch.Tensor, setting: Setting) -> torch.Tensor:
    """-inf where a token is not allowed, would end a bad word (in the answer, not in the prompt), or ends too early."""
    is_out = torch.zeros_like(logits, dtype=torch.bool)
    if setting.allowed:
        is_out[..., [token for token in range(logits.shape[-1]) if token not in setting.allowed]] = True
    if setting.stop is not None:
        is_out[:, : setting.min_tokens, setting.stop] = True
    if setting.bad_word:
        *start, last = setting.bad_word
        for k in range(len(start), sequences.shape[1]):
            is_out[:, k, last] |= (sequences[:, k - len(start) : k] == torch.tensor(start)).all(dim=1)
    return logits.masked_fill(is_out, -torch.inf)


def _processed(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """Temperature, the top_k most probable, then the nucleus: the fewest most probable tokens with mass >= top_p."""
    if setting.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    probs = (logits / setting.temperature).softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True)
    ordered[..., setting.top_k or ordered.shape[-1] :] = 0.0
    ordered /= ordered.sum(-1, keepdim=True)
    outside = ordered.cumsum(-1) - ordered >= setting.top_p
    kept = ordered.masked_fill(outside, 0.0)
    return torch.zeros_like(probs).scatter(-1, order, kept / kept.sum(-1, keepdim=True))


def total_variation(draws: Sequence[Sequence[int]], distribution: np.ndarray, vocab_size: int) -> float:
    """Distance of the draws' empirical distribution from `distribution`, in [0, 1]; a text that has ended goes on with
    0."""
    length = round(np.log(len(distribution)) / np.log(vocab_size))
    padded = np.array([[*draw, *[0] * (length - len(draw))] for draw in draws])
    index = padded @ (vocab_size ** np.arange(length)[::-1])
    empirical = np.bincount(index, minlength=len(distribution)) / len(draws)
    return float(np.abs(empirical - distribution).sum() / 2)


def of_the_first(distribution: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """The distribution of the first `length` tokens, for runs too short to fill every cell."""
    return distribution.reshape(vocab_size**length, -1).sum(axis=1)


def noise_floor(distribution: np.ndarray, count: int) -> float:
    """Largest total variation that `count` exact draws show by chance: mean + SIGMAS deviations, simulated."""
    distribution = distribution / distribution.sum()
    counts = np.random.default_rng(0).multinomial(count, distribution, size=200)
    distances = np.abs(counts / count - distribution).sum(axis=1) / 2
    return float(distances.mean() + SIGMAS * distances.std())


class Comparison(NamedTuple):
    """Draws against a distribution, of their first `tokens` tokens."""

    tokens: int
    distance: float
    floor: float


def prefix_floor(distribution: np.ndarray, count: int) -> float:
    """Largest total variation of a marginal of few cells by chance: mean + McDiarmid's bound at LEVEL.

    One draw changes the total variation by 1 / count at most, so it exceeds its mean by t with probability
    exp(-2 count t^2) at most. The tail of few cells is heavier than that of a normal distribution.
    """
    distribution = distribution / distribution.sum()
    counts = np.random.default_rng(0).multinomial(count, distribution, size=200)
    mean = np.abs(counts / count - distribution).sum(axis=1).mean() / 2
    return float(mean + np.sqrt(np.log(len(PREFIXES) / LEVEL) / (2 * count)))


def compare(draws: Sequence[Sequence[int]], distribution: np.ndarray, vocab_size: int) -> Comparison:
    """Compare the marginals of the first tokens and the whole texts; returns the one that exceeds its floor most."""
    length, found = round(np.log(len(distribution)) / np.log(vocab_size)), list[Comparison]()
    for tokens in (*(one for one in PREFIXES if one < length), length):
        marginal = of_the_first(distribution, tokens, vocab_size)
        floor = (noise_floor if tokens == length else prefix_floor)(marginal, len(draws))
        distance = total_variation([draw[:tokens] for draw in draws], marginal, vocab_size)
        found.append(Comparison(tokens, distance, floor))
    return max(found, key=lambda one: one.distance / one.floor if one.floor else 0.0)


def is_distributed(draws: Sequence[Sequence[int]], distribution: np.ndarray, vocab_size: int) -> bool:
    """Whether draws are as close to `distribution` as exact draws are."""
    found = compare(draws, distribution, vocab_size)
    print(f"{len(draws)} draws, first {found.tokens} tokens: TV {found.distance:.5f}, allowed {found.floor:.5f}")
    return found.distance < found.floor


VOCAB, LENGTH, PROMPT, WINDOW = 3, 6, [0, 1], 4
CIRCUITS = {"ff": 1, "cp": 3, "hmm": 3, "btree": 3}  # their components
HEADS = [f"{circuit}, {fit}" for circuit in CIRCUITS for fit in ("good", "bad")]
OPTIONS = {
    "good": {},
    "bad": {},
    "tokens": {"leaves": {"token_rank": 2}},
    "bad tokens": {"leaves": {"token_rank": 2}},
    "loud tokens": {"leaves": {"token_rank": 2}, "token_scale": 10.0},
    "mlp": {"trunk": {"kind": "mlp"}},
    "two ids": {"ids": [0, 2], "leaves": {"token_rank": 2}},  # x_1 may be the third
}
PTP = ("o-ptp", "c-ptp", "late")
PLANNED = dict.fromkeys(ALL_DRAFTS)  # no options: the defaults
BATCH = 1024  # V2: chosen; a step that runs all instances of a launch at once costs about the same for fewer
PAIR = slice(1, 4)  # the tokens of two answers that are looked at together: of a step's drafts, and after


@dataclass(frozen=True)
class Case:
    """head: one of HEADS, "backbone", a variant of PTP, or none. together: requests whose answers must be independent
    (1: each is looked at by itself), and whether they are samples of one request. is_fault: the injected fault must be
    found. times: more draws, for a small fault."""

    head: str | None
    settings: tuple[str, ...] = MIXED
    injected: str | None = None
    is_fault: bool = False
    together: int = 1
    is_one_request: bool = False
    times: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    runner: str = "v2 at once"


def _cases() -> dict[str, Case]:
    one, three, ptp = ("T=1",), ("T=1", "T=1.3, top-p 0.8", "bad words"), ("T=1", "T=0.7", "T=0.7, top-p 0.9")
    asked = ("0 drafts", "1 drafts", "2 drafts", "T=1")
    cases = {f"13 kinds, {head}": Case(head) for head in HEADS}
    cases |= {
        "fault: scored at another temperature": Case("btree, good", one, "other temperature", True),
        "fault: a cut that looks at the drawn token": Case("btree, good", one, "drawn cut", True),
        "fault: drafting stream = sampling stream": Case(
            "btree, bad", ("T=1.3, top-p 0.8",), "one stream", True, times=4
        ),
        "fault: the recovered token is dropped": Case("btree, good", one, "drop_recovered_v2", True),
        "coupled": Case("btree, good", three, options={"verify": "coupled"}),
        "fault: coupled, noise of the first row": Case(
            "btree, good", one, "noise of the first row", True, options={"verify": "coupled"}
        ),
        "pairs of concurrent requests": Case("btree, good", one, together=2),
        "pairs of siblings, n=4": Case("btree, good", ("seeded",), together=2, is_one_request=True),
        "3, 1, 0, 2 drafts in turns": Case("btree, good", three, "switching"),
        "the plan changes the number of drafts": Case("btree, good", three, "changing costs", options=PLANNED),
        "each asks for its number of drafts": Case("btree, good", asked),
        "the same, block verification": Case("btree, good", asked, options={"rejection_sample_method": "block"}),
        "fault: drafts not asked for verified as forbidden": Case(
            "btree, bad", ("1 drafts",), "surplus drafts as forbidden", True
        ),
        "o-ptp": Case("o-ptp", ptp),
        "c-ptp": Case("c-ptp", ptp),
        "late": Case("late", ptp),
        "fault: o-ptp, u squared": Case("o-ptp", one, "squared_u", True),
        "ptp's sampler without drafts": Case(None, injected="coupled_without_drafts"),
        "block verification": Case("btree, good", three, options={"rejection_sample_method": "block"}),
        "fault: block verification, noise of positions": Case(
            "btree, bad", one, "noise of positions", True, times=2, options={"rejection_sample_method": "block"}
        ),
        "no head": Case(None),
        "leaves look at the token before": Case("btree, bad tokens", three),
        "fault: drafts scored without the token before": Case("hmm, loud tokens", one, "scored without tokens", True),
        "head in bfloat16": Case("btree, good", ("T=0.7",), options={"head_dtype": "bfloat16"}),
        "backbone": Case("backbone", three),
        "hosted on EAGLE-3": Case("hosted", three),
        "fault: hosted, the recovered token is dropped": Case("hosted", one, "drop_recovered_v2", True),
        "draft vocabulary": Case("hmm, two ids", (*three, "seeded")),
        "fault: draft vocabulary, the recovered token is dropped": Case("hmm, two ids", one, "drop_recovered_v2", True),
        "draft vocabulary, block verification": Case(
            "hmm, two ids", three, options={"rejection_sample_method": "block"}
        ),
        "trunk mlp": Case("hmm, mlp", three),
        "fault: trunk mlp, the recovered token is dropped": Case("hmm, mlp", one, "drop_recovered_v2", True),
    }
    cases |= {f"V1: 13 kinds, {head}": Case(head, options=ALL_DRAFTS, runner="v1") for head in HEADS if "good" in head}
    cases["V1: leaves look at the token before"] = Case("hmm, tokens", three, options=ALL_DRAFTS, runner="v1")
    too = ("draft vocabulary", "trunk mlp", "the plan changes the number of drafts")
    cases |= {f"V1: {name}": replace(cases[name], runner="v1") for name in too}
    for name in ("", "draft vocabulary, ", "trunk mlp, "):
        fault = f"fault: {name}the recovered token is dropped"
        cases[f"V1: {fault}"] = replace(cases[fault], injected="drop_recovered", runner="v1")
    cases["V1: fault: a cut by the drawn token"] = Case("btree, good", one, "drawn cut v1", True, runner="v1")
    return cases


CASES = _cases()


def _make(folder: Path, target: LlamaForCausalLM, head: str) -> None:
    if (folder / head).exists():
        return
    if head in PTP:
        make_ptp_head(folder / head, target, head, WINDOW)
        return
    if head == "backbone":
        backbones.fit(folder / head, folder / "target", sample_target(target, 32, 12, 0).tolist(), WINDOW)
        return
    if head == "hosted":
        make_eagle3(folder / "eagle3", target)
        trunk = {"kind": "drafter", "method": "eagle3", "model": "../eagle3"}
        leaves = {"kind": "lm_head", "expander_rank": 4, "component_rank": 2}
        make_head(folder / head, target, "hmm", WINDOW, 3, trunk=trunk, leaves=leaves)
        return
    circuit, fit = head.split(", ")
    make_head(folder / head, target, circuit, WINDOW, CIRCUITS[circuit], is_bad="bad" in fit, **OPTIONS[fit])


def engine(folder: Path, target: LlamaForCausalLM, case: Case, count: int, length: int) -> Engine:
    """Asks `count` answers of `length` tokens of each kind."""
    kinds = [{**SETTINGS[name].sampling(), "max_tokens": length} for name in case.settings]
    if case.head is not None:
        _make(folder, target, case.head)
    # rows for every request of a batch: by default so large a one drafts nothing
    ptp = {"method": "ptp", "draft_pass": "merged", "max_aux_rows": 4 * BATCH}
    spec = {**(ptp if case.head in PTP else ALL_DRAFTS), **case.options}
    arguments = {"max_model_len": 32, "block_size": 32, "max_num_seqs": BATCH, "kv_cache_memory_bytes": 1 << 28}
    calls = [asking(PROMPT, kinds, count, _at_once(case))]
    return build(folder, case.head, calls, case.injected, spec, max_num_batched_tokens=BATCH * WINDOW, **arguments)


def _at_once(case: Case) -> int:
    return AT_ONCE if case.together == 1 else 4 if case.is_one_request else 1


def measure(folder: Path, target: LlamaForCausalLM, name: str, count: int, length: int = LENGTH) -> None:
    """Assert of `count` answers, or pairs of them, to each kind of request of a case: their first `length` tokens.

    Their total variation is at most the largest that exact draws show by chance; with a fault it is larger.
    """
    case = CASES[name]
    count *= case.times
    made = engine(folder, target, case, count * case.together, length if case.together == 1 else LENGTH)
    (reply,) = run({"one": made}, case.runner, async_scheduling=False, timeout=20_000)["one"]
    draws = draws_by_kind(reply, len(case.settings), _at_once(case))
    distributions = [exact_distribution(target, PROMPT, LENGTH, SETTINGS[name]) for name in case.settings]
    if case.together > 1:  # tokens of answers that ran at once, side by side; each answer is looked at once
        pairs = [zip(texts[::2], texts[1::2], strict=True) for texts in draws]
        draws = [[[*one[PAIR], *other[PAIR]] for one, other in texts] for texts in pairs]
        distributions = [_independent(distribution) for distribution in distributions]
    else:
        draws = [[text[:length] for text in texts] for texts in draws]
        distributions = [of_the_first(distribution, length, VOCAB) for distribution in distributions]
    rows = []
    for kind, texts, exact in zip(case.settings, draws, distributions, strict=True):
        found = compare(texts, exact, VOCAB)
        is_kept = found.distance <= found.floor
        verdict = ("missed" if is_kept else "found") if case.is_fault else ("kept" if is_kept else "broken")
        rows.append({"setting": kind, "draws": len(texts), **found._asdict(), "verdict": verdict})
    assert reply.accepted or not case.head, "no draft was accepted: the head is not tested"
    assert {row["verdict"] for row in rows} <= {"kept", "found"}, rows


def _independent(distribution: np.ndarray) -> np.ndarray:
    shape = (VOCAB**PAIR.start, VOCAB ** (PAIR.stop - PAIR.start), -1)
    of_one = distribution.reshape(shape).sum(axis=(0, 2))
    return np.outer(of_one, of_one).ravel()
