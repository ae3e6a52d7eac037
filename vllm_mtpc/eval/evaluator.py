"""A head attached to its target, as `vllm-mtpc eval` and `doctor` use it; each family of heads has an `Evaluator`.

Steps do not start everywhere equally often: an accepted draft is skipped over. The steps are followed through each text
(exactly, by the probability that a step starts at each position); tokens/step is the number of tokens divided by the
number of steps, as a server counts it.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from vllm_mtpc.checkpoint import read_config, resolve_head, resolve_verifier
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.engine.served import Served
from vllm_mtpc.engine.served_target import load_served_target, must_be_served
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.text import Samples, Sampling, generate, join
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.heads.ptp.student import UNUSED_U
from vllm_mtpc.hf import Target, choose_device, load_target
from vllm_mtpc.hf.model import target_config
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.kernels.uniform import uniform
from vllm_mtpc.report import Bar

if TYPE_CHECKING:
    from typing import Self

TOLERANCE = 0.02  # relative, of tokens/step
ERRORS = 3.0  # standard errors that are still noise
BATCH = 8
# Log-probabilities (nats) this close are a tie: rounding of the target's dtype decides between the tokens.
TIE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Tokens/step of a head at one temperature. s.e.: standard error over sequences."""

    tokens_per_step: float  # the target's own token included; plain decoding is 1.0
    standard_error: float
    per_position: list[float]  # unconditional: P(drafts 1..k are all accepted), k = 1..K, over steps
    sequences: int
    steps: float  # counted or expected number

    @property
    def shown(self) -> str:
        return f"{self.tokens_per_step:.3f} ± {self.standard_error:.3f}"

    @classmethod
    def of(cls, starts: Tensor, alive: Tensor, **more: Any) -> Self:
        """Compute metrics of texts; `more`: fields of a subclass.

        starts[S, T]: P(a step starts at t). alive[S, T, K]: P(drafts 1..k of it are accepted), also past the end.
        """
        steps = starts.sum(1)  # [S]
        value, error = ratio((starts * (1 + alive.sum(-1))).sum(1), steps)
        total, per_position = steps.sum(), (starts[..., None] * alive).sum((0, 1))
        found = {"tokens_per_step": value, "standard_error": error, "per_position": (per_position / total).tolist()}
        return cls(**found, sequences=len(steps), steps=total.item(), **more)


def exact_counts(alive: Tensor) -> Tensor:
    """P(exactly k drafts are accepted) [S, T, K + 1], k = 0..K; alive[S, T, K]: P(the first k are)."""
    edge = alive[..., :1]
    return -torch.diff(alive, prepend=torch.ones_like(edge), append=torch.zeros_like(edge))


def step_starts(alive: Tensor, valid: Tensor) -> Tensor:
    """Return P(a step starts at each position) [S, T], the first one certain, 0 outside of valid[S, T].

    alive[S, T, K] = P(the first k drafts of a step at t are accepted).
    """
    sequences, length, drafts = alive.shape
    exactly = exact_counts(alive)  # the step advances by 1 + k
    starts = alive.new_zeros(sequences, length + drafts + 1)
    starts[:, 0] = 1
    for t in range(length):
        starts[:, t + 1 : t + drafts + 2] += starts[:, t : t + 1] * exactly[:, t]
    return starts[:, :length] * valid


def check_drafts(window: int, num_drafts: int | None, default: int) -> int:
    """Return the number of drafts K. Raises UsageError outside 1 .. window - 1."""
    if num_drafts is not None and not 1 <= num_drafts <= window - 1:
        raise UsageError(
            f"num_drafts={num_drafts}: the head's window is {window} and its first token is the target's own; "
            f"allowed are 1 to {window - 1}"
        )
    return default if num_drafts is None else num_drafts


def ratio(numerator: Tensor, denominator: Tensor) -> tuple[float, float]:
    """Return the ratio of sums over independent sequences [S] and its standard error (linearised; nan for one)."""
    value = (numerator.sum() / denominator.sum()).item()
    residual = numerator - value * denominator
    spread = residual.std().item() if len(residual) > 1 else math.nan
    return value, spread * math.sqrt(len(residual)) / denominator.sum().item()


def shown_shares(values: Sequence[float]) -> str:
    """Format probabilities as one cell of a table: .93 .81 .60"""
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)


class Requests(NamedTuple):
    """The requests that vLLM answered."""

    prompts: Sequence[Sequence[int]]
    num_drafts: int
    top_k: int = 0
    top_p: float = 1.0
    seeds: Sequence[int] | None = None  # of the requests, where the family needs them
    draft_pass: str | None = None  # of --draft-pass


@dataclass(frozen=True)
class Chain:
    """Whether the served text is the Hugging Face target's."""

    tokens: int
    differing: int  # tokens that the target does not pick: greedy, or with the seed of the request
    surprise: float  # sampled: (-log p of the text - entropy) in standard errors; 0 on average for the target's text

    @property
    def fault(self) -> str | None:
        """Return what is wrong: more than 1 % other tokens, or a sampled text of another distribution."""
        if self.differing > max(1, 0.01 * self.tokens):
            return f"{self.differing} of {self.tokens} served tokens are not the target's"
        if abs(self.surprise) > 5:
            return f"the sampled text is {self.surprise:+.1f} standard errors from the target's distribution"
        return None


@dataclass(frozen=True)
class Diagnosis:
    """Served and expected tokens/step at one temperature."""

    served: Served
    predicted: StepMetrics
    noise: float  # standard error of the served tokens/step given the text
    chain: Chain

    @property
    def difference(self) -> float:
        """Served divided by expected tokens/step, minus one; both over the steps that drafted."""
        return self.served.acceptance.tokens_per_drafted_step / self.predicted.tokens_per_step - 1

    @property
    def differs(self) -> bool:
        """Whether served and expected tokens/step differ by more than tolerance and noise."""
        off = abs(self.served.acceptance.tokens_per_drafted_step - self.predicted.tokens_per_step)
        return off > max(TOLERANCE * self.predicted.tokens_per_step, ERRORS * self.noise)

    @property
    def fault(self) -> str | None:
        """Return what is wrong; None if served and expected agree, even on a quantised target's text."""
        asked, counted = len(self.predicted.per_position), self.served.acceptance
        verified = counted.draft_tokens / max(1, counted.drafts)
        if round(verified) != asked:
            return f"vLLM verified {verified:.1f} drafts per step, expected were {asked}"
        if not self.differs:
            return None
        return self.chain.fault or "vLLM does not accept the expected number of drafts"


class Evaluator(Protocol):
    """A head attached to its target. The commands do not depend on its family."""

    folder: Path
    config: Any  # of the family
    target: Target
    seeded: ClassVar[bool] = False  # served text is compared draft by draft, so requests need seeds
    needs_modules: ClassVar[bool] = False  # the head reads more of its target than states, which vLLM may compute

    @classmethod
    def attach(cls, folder: Path, target: Target) -> Evaluator:
        """Load the head of a folder for a loaded target of matching sizes."""

    @staticmethod
    def default_sampling(config: Any) -> tuple[float, int, float]:
        """Return the default temperature, top-k and top-p."""
        return 1.0, 0, 1.0

    @staticmethod
    def serving(args: Namespace, config: Any, num_drafts: int, max_num_seqs: int) -> dict[str, Any]:
        """Return options with which vLLM verifies every draft. Raises UsageError for options of other families."""

    def sampling(self, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        """Return the sampling of text and drafts, as the head is served by default."""
        return Sampling(temperature, top_p, top_k=top_k)

    def measure(self, prompts: Sequence[Tensor], temperature: float, num_drafts: int, args: Namespace) -> Any:
        """Let the target write text at one temperature, and evaluate the head on it."""
        sampling = self.sampling(temperature, args.top_p, args.top_k)
        generator = torch.Generator(self.target.device).manual_seed(args.seed)
        with Bar(total=len(prompts), desc=f"T={temperature:g} text", unit="text") as bar:
            how = {"overhang": num_drafts, "progress": bar.update}
            samples = generate(self.target, prompts, args.new_tokens, sampling, generator, **how)
        return self.evaluate(samples, sampling, num_drafts, args.seed)

    def evaluate(self, samples: Samples, sampling: Sampling, num_drafts: int, seed: int) -> Any:
        """Evaluate the head on text of the target; the result has `temperature` and `figures`, its StepMetrics."""

    def title(self, num_drafts: int) -> str:
        """Describe the head in one line."""

    def rows(self, result: Any) -> dict[str, str]:
        """Return the column of the table for the result of one temperature, by the names of the rows."""

    def warnings(self, results: Sequence[Any]) -> list[str]:
        """Return warnings about the head that follow from the results, a line each."""
        return []

    def predict(
        self, samples: Samples, sampling: Sampling, requests: Requests, u: Tensor | None
    ) -> tuple[StepMetrics, float]:
        """Return the expected counters along served text, and the standard error of the served tokens/step given it."""

    def compare(self, requests: Requests, served: Served) -> Diagnosis:
        """Compute the counters that are expected along the served text."""
        sampling = self.sampling(served.temperature, requests.top_p, requests.top_k)
        pairs = zip(requests.prompts, served.outputs, strict=True)
        texts = [torch.tensor([*prompt, *output]) for prompt, output in pairs]
        count = max(map(len, texts)) + requests.num_drafts + 1
        u = None if requests.seeds is None else request_u(sampling, requests.seeds, count, self.target.device)
        samples = self.continue_served(texts, requests, sampling, u)
        predicted, noise = self.predict(samples, sampling, requests, u)
        return Diagnosis(served, predicted, noise, self.check_chain(samples, sampling, u))

    def continue_served(self, texts: list[Tensor], requests: Requests, sampling: Sampling, u: Tensor | None) -> Samples:
        """Return the served texts as samples of the target.

        vLLM counts the drafts of a text's last step also past its end, where their tokens are dropped: the target
        continues the text for that step.
        """
        generator, pieces = torch.Generator(self.target.device).manual_seed(0), []
        more: dict[str, Any] = {"overhang": requests.num_drafts, "stops": set()}
        for start in range(0, len(texts), BATCH):
            part = texts[start : start + BATCH]
            how: Any = sampling
            if u is not None:
                how = CoupledSampling(sampling, u[start : start + BATCH], torch.tensor([len(text) for text in part]))
            pieces.append(generate(self.target, part, 0, how, generator, **more))
        return replace(join(pieces), prompt_lengths=torch.tensor([len(prompt) for prompt in requests.prompts]))

    @torch.inference_mode()
    def check_chain(self, samples: Samples, sampling: Sampling, u: Tensor | None = None) -> Chain:
        """Compare every token of the continuations with the target's distribution, and with the token that u picks.

        u[S, L]: of seeded requests; u[:, k] picks tokens[:, k].
        """
        tie, count, differing = TIE.get(self.target.dtype, max(TIE.values())), 0, 0
        excess = variance = 0.0
        for row, (place, tokens, logits) in enumerate(samples.continuations(self.target)):
            log_p = sampling.log_probs(logits)
            chosen = log_p.gather(-1, tokens[:, None])[:, 0]
            count += len(tokens)
            if sampling.greedy:
                differing += int((log_p.amax(-1) - chosen > tie).sum())
                continue
            if u is not None:
                differing += int((pick(log_p, u[row, place].to(log_p.device)) != tokens).sum())
            p, nats = log_p.exp(), -log_p.clamp(min=-1e4)  # -log p(x)
            mean = (p * nats).sum(-1, keepdim=True)  # of x ~ p
            excess += (-chosen - mean[:, 0]).clamp(max=30.0).sum().item()  # a token of no probability is 30 nats
            variance += (p * (nats - mean) ** 2).sum().item()
        return Chain(count, differing, excess / math.sqrt(variance) if variance else 0.0)


def request_u(sampling: Sampling, seeds: Sequence[int], count: int, device: torch.device) -> Tensor:
    """Return u [B, count] float32 of the first tokens of B requests with seeds; greedy: 0.5."""
    if sampling.greedy:
        return torch.full((len(seeds), count), UNUSED_U, device=device)
    at = torch.arange(count, device=device) - 1
    return torch.stack([uniform(torch.full_like(at, seed), at) for seed in seeds])


class CoupledSampling:
    """A ``Sampling`` that picks tokens by u[B, L], starting at the columns at[B]."""

    def __init__(self, sampling: Sampling, u: Tensor, at: Tensor) -> None:
        self.sampling, self.log_probs, self.u, self.at = sampling, sampling.log_probs, u, at.to(u.device)

    def pick(self, log_probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        u = self.u.gather(1, self.at[:, None])[:, 0]
        self.at = self.at + 1
        return log_probs.argmax(-1) if self.sampling.greedy else pick(log_probs, u)


def resolve(name: str) -> tuple[Path, AnyHeadConfig]:
    """Return folder and config of a head without loading it. Raises CheckpointError or HeadConfigError."""
    folder = resolve_head(name)
    return folder, read_config(folder)


def target_of(folder: Path, config: AnyHeadConfig, name: str | None) -> str:
    """Return the target's name: ``name``, or the head's verifier."""
    return name or resolve_verifier(folder, config.speculators_config.verifier.name_or_path)


def load(
    name: str, target: str | None = None, dtype: str = "auto", device: str = "auto", engine: Any = None
) -> Evaluator:
    """Load a head and its target, which computes in ``dtype``; ``engine``: options of a target that vLLM must run."""
    (folder, config), on = resolve(name), choose_device(device)
    target_dtype, target = dtype if dtype == "auto" else getattr(torch, dtype), target_of(folder, config, target)
    family, hosted = FAMILIES[config.speculators_model_type].evaluator, getattr(config, "hosted", None)
    needs_modules = family.needs_modules or getattr(config, "lora_layers", 0)
    if hosted or (not needs_modules and must_be_served(target_config(target), engine or {})):
        drafter = hosted.serving(folder) if hosted else None
        return attach(folder, load_served_target(target, target_dtype, on, engine or {}, drafter))
    return attach(folder, load_target(target, target_dtype, on, attention="torch"))


def attach(folder: Path, target: Target) -> Evaluator:
    """Load the head of a folder for a loaded target. Raises UsageError where their sizes differ."""
    config = read_config(folder)
    for name in ("vocab_size", "hidden_size"):
        ours, theirs = getattr(config, name), getattr(target, name)
        if ours != theirs:
            raise UsageError(
                f"head {folder} has {name}={ours}, but target {target.name} has {theirs}; give --target the one it was "
                f"trained for ({config.speculators_config.verifier.name_or_path})"
            )
    return FAMILIES[config.speculators_model_type].evaluator.attach(folder, target)
