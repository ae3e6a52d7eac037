"""Text that the target writes: sampling, and continuations of prompts with every hidden state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vllm_mtpc.data.sources import Documents
from vllm_mtpc.engine.served_target import ServedTarget
from vllm_mtpc.errors import UsageError
from vllm_mtpc.heads.ptp.distribution import processed
from vllm_mtpc.hf import Session, Target

GREEDY_BELOW = 1e-5  # vLLM's own threshold


@dataclass(frozen=True)
class Sampling:
    """How next tokens are sampled: temperature (0: greedy), top-p (1: off) and top-k (0: off).

    ``greedy_drafts``: drafts are the most likely tokens of the circuit at every temperature. Top-p and top-k do not
    apply to drafts of circuits. Raises UsageError where a value is not allowed.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    greedy_drafts: bool = False
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature}: allowed are 0 (greedy) and above; set it to 1")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p}: allowed are values above 0 up to 1 (off); set it to 1")
        if self.top_k < 0:
            raise UsageError(f"top_k={self.top_k}: allowed are 0 (off) and above; set it to 0")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return log p [..., V] float32 of logits[..., V]; -inf outside top-k and top-p. Greedy: at temperature 1."""
        if self.greedy:
            return logits.float().log_softmax(-1)
        return processed(logits, self.temperature, self.top_k, self.top_p)

    def draft_log_probs(self, log_q: Tensor) -> Tensor:
        """Return the log-distribution [..., V] of a draft: softmax(log_q / T), or one token for greedy drafts."""
        if self.greedy_drafts:
            return torch.full_like(log_q, -torch.inf).scatter(-1, log_q.argmax(-1, keepdim=True), 0.0)
        return (log_q if self.greedy or self.temperature == 1 else log_q / self.temperature).log_softmax(-1)

    def pick(self, log_probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return a token [B] int64 per row of log_probs[B, V]: the most likely one if greedy, else a draw."""
        if self.greedy:
            return log_probs.argmax(-1)
        return torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]


@dataclass(frozen=True)
class Samples:
    """S texts, each a prompt and a continuation; hidden[:, t] is the hidden state after tokens[:, : t + 1].

    Tokens after the end of a text (``lengths``) are the target's continuation: a server drafts past the end in its last
    step, and counts whether those drafts are accepted.
    """

    tokens: Tensor  # [S, L] int64, on the CPU; -1: not known
    hidden: Tensor  # [S, L - 1, D] in the target's dtype, on the CPU, after the final norm; 0 where not known
    prompt_lengths: Tensor  # [S] int64
    lengths: Tensor  # [S] int64, prompt and continuation, an end-of-text token included
    bytes_per_token: float | None = None  # UTF-8 bytes per token of the continuations
    draft: Tensor | None = None  # [S, L - 1, W] what the head's trunk reads, if not `hidden` (`Trunk.windows`)

    def starts(self, num_drafts: int) -> tuple[Tensor, Tensor]:
        """Return where a server may start a step of K drafts: first position [S] and number of positions [S].

        From the end of the prompt on, x_1 must not end the text, and the window of 1 + K tokens must be known. Raises
        UsageError where there is no such position.
        """
        first, known = self.prompt_lengths - 1, (self.tokens >= 0).sum(1)
        last = torch.minimum(self.lengths - 3, known - num_drafts - 2)
        count = (last - first + 1).clamp(min=0)
        if not count.any():
            raise UsageError(
                f"no continuation has the {num_drafts + 1} known tokens after its prompt that a step of {num_drafts} "
                "drafts looks at; raise the number of new tokens"
            )
        return first, count

    def continuations(self, target: Target) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield for each text the place of its continuation, the continuation [C], and the target's logits [C, V]."""
        for row, (start, end) in enumerate(zip(self.prompt_lengths.tolist(), self.lengths.tolist(), strict=True)):
            logits = target.logits(self.hidden[row, start - 1 : end - 1].to(target.device))
            yield slice(start, end), self.tokens[row, start:end].to(target.device), logits


def prompts(documents: Documents, count: int, prompt_tokens: int, seed: int) -> list[Tensor]:
    """Return ``count`` prompts (1-D int64): the tokens before a document's first trained one, else a crop of its text.

    Crops have ``prompt_tokens`` tokens and start anywhere; shorter documents are skipped. The seed fixes the order of
    documents, which are used again where there are too few. Raises UsageError where no document gives a prompt.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    while len(found) < count:
        before = len(found)
        for index in torch.randperm(len(documents), generator=generator).tolist():
            tokens, trained = documents[index]
            first = int(trained.argmax()) if trained.any() else 0
            if first:
                found.append(torch.from_numpy(tokens[:first].copy()).long())
            elif len(tokens) >= prompt_tokens:
                start = int(torch.randint(len(tokens) - prompt_tokens + 1, (), generator=generator))
                found.append(torch.from_numpy(tokens[start : start + prompt_tokens].copy()).long())
            if len(found) == count:
                break
        if len(found) == before:
            raise UsageError(
                f"no document has {prompt_tokens} tokens to be a prompt; give longer text or lower --prompt-tokens"
            )
    return found


@torch.inference_mode()
def generate(
    target: Target,
    prompts: Sequence[Tensor],
    new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    *,
    overhang: int = 0,
    stops: set[int] | None = None,
    batch: int = 64,
    progress: Callable[[int], object] = lambda count: None,
) -> Samples:
    """Continue 1-D ``prompts`` by up to ``new_tokens`` tokens, and by ``overhang`` tokens past the end.

    ``stops``: tokens that end a text (None: those of the target; empty: none). ``progress`` receives the number of
    texts of each finished batch. A generator with a fixed seed (on the target's device) gives the same text.
    """
    stops = target.stop_ids if stops is None else stops
    if isinstance(target, ServedTarget):
        return _generate_served(target, prompts, new_tokens, sampling, generator, overhang, stops, progress)
    is_stop = torch.tensor(sorted(stops), device=target.device)
    pieces = []
    for start in range(0, len(prompts), batch):
        part, session = prompts[start : start + batch], Session(target)
        states, columns = [session.start(part)], list[Tensor]()  # [B, P, D]
        made = torch.full((len(part),), new_tokens, device=target.device)  # tokens up to the end of each text
        for count in range(1, new_tokens + overhang + 1):
            columns.append(sampling.pick(sampling.log_probs(session.logits(states[-1][:, -1])), generator))
            made = torch.where(torch.isin(columns[-1], is_stop), made.clamp(max=count), made)
            if count >= int(made.max()) + overhang:
                break
            states.append(session.read(columns[-1][:, None]))
        prompt_lengths = torch.tensor([len(prompt) for prompt in part])
        lengths, drawn = prompt_lengths + made.cpu(), torch.stack(columns, 1).cpu()
        texts = [torch.cat([prompt.cpu(), row]) for prompt, row in zip(part, drawn, strict=True)]
        tokens = pad_sequence(texts, True, -1)
        padded, hidden = (prompt_lengths.max() - prompt_lengths).tolist(), torch.cat(states, 1).cpu()
        hidden = pad_sequence([row[before:] for row, before in zip(hidden, padded, strict=True)], True)
        known = torch.arange(tokens.shape[1]) < (lengths + overhang)[:, None]
        pieces.append(Samples(tokens.where(known, -1), hidden, prompt_lengths, lengths))
        progress(len(part))
    return join(pieces, target)


def _generate_served(
    target: ServedTarget,
    prompts: Sequence[Tensor],
    new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    overhang: int,
    stops: set[int],
    progress: Callable[[int], object],
) -> Samples:
    """`generate` by vLLM, with the states of the same pass."""
    how = {"max_tokens": new_tokens + overhang, "temperature": sampling.temperature, "top_p": sampling.top_p}
    how |= {"top_k": sampling.top_k, "ignore_eos": True}
    first = generator.initial_seed() if generator else 0
    seeds, pieces = range(first, first + len(prompts)), []
    answers = target.recorder.record([prompt.tolist() for prompt in prompts], how, seeds)
    for prompt, found in zip(prompts, answers, strict=True):
        if len(found.tokens) < len(prompt) + new_tokens + overhang:
            more = f"{len(prompt)} tokens and {new_tokens + overhang} new ones are more than vLLM reads"
            raise UsageError(f"a prompt of {more}; lower the number of new ones, or raise max_model_len in --engine")
        response = found.tokens[len(prompt) :][:new_tokens]
        made = next((count for count, token in enumerate(response, 1) if token in stops), new_tokens)
        tokens = torch.tensor(found.tokens[: len(prompt) + made + overhang])
        hidden = target.columns(found.states, ())[: len(tokens) - 1]
        pieces.append(Samples(tokens[None], hidden[None], *torch.tensor([[len(prompt)], [len(prompt) + made]])))
        progress(1)
    return join(pieces, target)


def join(pieces: Sequence[Samples], target: Target | None = None) -> Samples:
    """Concatenate samples.

    The tokenizer of ``target`` counts the UTF-8 bytes (an incomplete character counts as its replacement).
    """
    joined = Samples(
        tokens=pad_sequence([row for piece in pieces for row in piece.tokens], True, -1),
        hidden=pad_sequence([row for piece in pieces for row in piece.hidden], True),
        prompt_lengths=torch.cat([piece.prompt_lengths for piece in pieces]),
        lengths=torch.cat([piece.lengths for piece in pieces]),
    )
    count = int((joined.lengths - joined.prompt_lengths).sum())
    if target is None or target.tokenizer is None or not count:
        return joined
    places = zip(joined.tokens, joined.prompt_lengths.tolist(), joined.lengths.tolist(), strict=True)
    texts = [target.tokenizer.decode(row[start:end].tolist()) for row, start, end in places]
    return replace(joined, bytes_per_token=sum(len(text.encode("utf-8", "replace")) for text in texts) / count)
