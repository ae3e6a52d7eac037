"""Prompts for regeneration: conversations up to the answer, or pieces of text."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_mtpc.data.sources import FORMS, exact_ids, load_documents, read_records
from vllm_mtpc.errors import UsageError
from vllm_mtpc.progress import Bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vllm_mtpc.batch.regenerate import RegenerateOptions

Messages = list[dict[str, Any]]
Prompt = tuple[tuple[int, ...], Messages | None]  # token ids; the conversation they render


@dataclass(frozen=True)
class Request:
    """One response to be written. `id` depends on the prompt's ids, the number of the sample and the seed alone."""

    id: str
    prompt_ids: list[int]
    messages: Messages | None

    def line(self, answer: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """The line of the output file for this request's answer."""
        line = {"id": self.id, "prompt_ids": self.prompt_ids, "response_ids": answer["response_ids"]}
        line["finish_reason"] = answer["finish_reason"]
        if self.messages is not None and tokenizer is not None:
            text = tokenizer.decode(answer["response_ids"], skip_special_tokens=True)
            line["messages"] = [*self.messages, {"role": "assistant", "content": text}]
        return line


def load_tokenizer(target: str) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer, or None: token ids can be continued without one."""
    from vllm_mtpc.hf.names import tokenizer_if_any

    return tokenizer_if_any(target)


def collect(options: RegenerateOptions, tokenizer: PreTrainedTokenizerBase | None) -> list[Request]:
    """All requests of a run, in the order of the data; raises UsageError without any.

    A prompt that occurs again gets further samples; at temperature 0, where those would be the same text, it is left
    out.
    """
    prompts = list(_prompts(options, tokenizer))
    if not prompts:
        raise UsageError(
            f"{', '.join(options.data)}: no prompts; expected is text of at least one token, or conversations with a "
            "turn before the assistant's; name other data"
        )
    if options.limit is not None and options.limit < len(prompts):
        prompts = [prompts[index] for index in _some(len(prompts), options.limit, options.seed)]
    requests: list[Request] = []
    seen: Counter[tuple[int, ...]] = Counter()
    for ids, messages in prompts:
        if options.temperature == 0 and seen[ids]:
            continue
        for _ in range(options.samples):
            requests.append(Request(_request_id(ids, seen[ids], options.seed), list(ids), messages))
            seen[ids] += 1
    return requests


def _request_id(prompt_ids: Sequence[int], sample: int, seed: int) -> str:
    return hashlib.sha256(json.dumps([list(prompt_ids), sample, seed]).encode()).hexdigest()[:32]


def _prompts(options: RegenerateOptions, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Prompt]:
    """Prompts of every record, in order; with a limit, of no more records than that."""
    records = list(read_records(options.data, options.split))
    if options.limit is not None and options.limit < len(records):
        records = [records[index] for index in _some(len(records), options.limit, options.seed)]
    cutter = _Cutter(options, tokenizer)
    for source in Bar(records, desc="prompts", unit=" records", mininterval=1):
        record = source.record
        if "prompt_ids" in record:
            if ids := exact_ids(record, "prompt_ids"):
                yield tuple(ids), None
        elif "bin" in record:
            documents = load_documents([str(record["bin"])], tokenizer)
            for number in range(len(documents)):
                yield from cutter.cut(documents[number][0])
        elif tokenizer is None:
            raise UsageError(f"{source.origin}: needs a tokenizer, and the target has none; give prompt_ids")
        elif "messages" in record:
            yield from _of_chat(source.origin, record["messages"], tokenizer)
        elif isinstance(record.get("text"), str):
            yield from cutter.cut(np.asarray(tokenizer(record["text"], verbose=False)["input_ids"], np.int64))
        else:
            raise UsageError(f"{source.origin}: keys {', '.join(record)}; a record must be one of {FORMS}")


def _of_chat(origin: str, messages: Messages, tokenizer: PreTrainedTokenizerBase) -> Iterator[Prompt]:
    """The conversation up to the last assistant's turn, which the target is to write anew."""
    if not isinstance(messages, list) or not all(isinstance(turn, dict) and "role" in turn for turn in messages):
        raise UsageError(f"{origin}: messages must be a list of objects with role and content; correct it")
    last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    before = messages[:last]
    if not before or before[-1]["role"] == "assistant":
        return
    try:
        ids = tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # templates are programs: they raise what they like
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(
            f"{origin}: the target's chat template does not take this conversation ({reason}); "
            "correct it, or give text or prompt_ids"
        ) from None
    yield tuple(ids), before


def _some(count: int, limit: int, seed: int) -> list[int]:
    return sorted(random.Random(seed).sample(range(count), limit))


class _Cutter:
    """Cuts prompts from text: its beginning, or crops at places that the seed and the text's number decide."""

    def __init__(self, options: RegenerateOptions, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.length, self.crops, self.seed, self.tokenizer = (
            options.prompt_tokens,
            options.crops,
            options.seed,
            tokenizer,
        )
        self._texts = 0
        self._breaks: dict[int, bool] = {}

    def cut(self, tokens: np.ndarray) -> Iterator[Prompt]:
        """Prompts of `prompt_tokens` tokens of a document [T]; a shorter document is one prompt as a whole.

        Every second crop starts a line where there is one. A document's first token is put before its crops if it is
        the tokenizer's begin-of-text token and no end, as serving would.
        """
        generator = random.Random(f"{self.seed}:{self._texts}")
        self._texts += 1
        begin, end = (getattr(self.tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))
        if len(tokens) and tokens[-1] == end:
            tokens = tokens[:-1]
        lead = [begin] if begin is not None and begin != end and len(tokens) and tokens[0] == begin else []
        if self.crops == 0 or len(tokens) <= self.length:
            starts = [0] if len(tokens) else []
        else:
            starts = self._starts(tokens, generator)
        for start in starts:
            ids = [*lead, *tokens[start : start + self.length - len(lead)].tolist()] if start else tokens[: self.length]
            yield tuple(int(token) for token in ids), None

    def _starts(self, tokens: np.ndarray, generator: random.Random) -> list[int]:
        last = len(tokens) - self.length
        lines = np.flatnonzero(self._ends_line(tokens[:last])) + 1
        return [
            int(generator.choice(lines)) if crop % 2 and len(lines) else generator.randint(0, last)
            for crop in range(self.crops)
        ]

    def _ends_line(self, tokens: np.ndarray) -> np.ndarray:
        """[T] bool: the token ends a line; none where there is no tokenizer."""
        if self.tokenizer is None:
            return np.zeros(len(tokens), bool)
        unique, places = np.unique(tokens, return_inverse=True)
        for token in unique.tolist():
            if token not in self._breaks:
                self._breaks[token] = self.tokenizer.decode([token]).endswith("\n")
        return np.array([self._breaks[token] for token in unique.tolist()])[places]
