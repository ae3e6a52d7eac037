"""Options of `vllm-mtpc regenerate`, and its prompts: of data, or those that the target writes.

Prompts of data are conversations up to the answer, or pieces of text. Conversations that the target writes alone are
the user's turns, then the answers (Magpie, arXiv 2406.08464): after the chat template's text up to the user's content,
a chat model writes what a user would. Everything that decides a conversation follows from the seed and its number, so
that a stopped run continues with the same text.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_mtpc.data.sources import FORMS, chat_prompt, exact_ids, is_chat, read_records, render_chat, special_ids
from vllm_mtpc.errors import UsageError
from vllm_mtpc.files import replace_file
from vllm_mtpc.flags import JsonDict
from vllm_mtpc.report import Bar

Messages = list[dict[str, Any]]
Prompt = tuple[tuple[int, ...], Messages | None]  # token ids; the conversation they render
# Asks for texts by token ids, a seed and sampling; is sent their ids and why they ended, None: no room; returns a value
Turns = Generator[tuple[list[int], int, dict[str, Any]], tuple[list[int], str | None], dict[str, Any]]

# Chunked prefill sets a generator's offset, which generators on a CPU do not have. By default vLLM reserves nearly all
# memory, and does not start if other processes use some of it.
ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": 1 << 30}
RESOURCES = ("tensor_parallel_size", "gpu_memory_utilization", "kv_cache_memory_bytes")  # they do not change the text
TEMPERATURES = (0.6, 0.8, 1.0, 0.0)  # of the answers to the target's own prompts, in turn
CONTENT = "XQZSENTINELXQZ"  # of a user's turn; the template's text around it is read
USER_TEMPERATURES, USER_SAMPLING = (0.8, 1.0), {"top_p": 0.95, "top_k": 0, "max_tokens": 256}
SECOND_TURN = 3  # every third conversation has one
LOOP_TOKENS, LOOP_SHARE = 32, 0.5  # a turn of so many tokens with a smaller share of distinct trigrams is a loop


class RegenerateOptions(BaseModel):
    """Prompts from data or by the target, and its responses. A field is a flag of `vllm-mtpc regenerate`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(min_length=1, description="model that writes: folder or hub name")
    prompts: Literal["data", "self"] = Field("data", description="self: the target writes prompts, --limit of them")
    data: list[str] = Field([], description="where prompts come from, as for vllm-mtpc train; with prompts self: more")
    out: Path = Field(description="file of responses (.jsonl), continued if it is there")
    temperature: float = Field(1.0, ge=0, description="of sampling; 0: greedy; prompts self: 0.6, 0.8, 1 and 0 in turn")
    top_p: float = Field(1.0, gt=0, le=1, description="1: off")
    top_k: int = Field(0, ge=0, description="0: off")
    max_tokens: int = Field(512, ge=1, description="tokens of a response at most")
    prompt_tokens: int = Field(32, ge=1, description="tokens of a prompt cut from text")
    crops: int = Field(0, ge=0, description="prompts cut from random places of each text; 0: one, its beginning")
    limit: int | None = Field(None, ge=1, description="prompts at most, picked at random; prompts self: conversations")
    seed: int = Field(0, ge=0, description="decides which prompts are cut and what is sampled")
    split: str = Field("train", description="split of a datasets name")
    dtype: str = Field("auto", description="auto, float32, bfloat16 or float16")
    ignore_eos: bool = Field(False, description="write on after the end-of-text token")
    engine: JsonDict = Field({}, description='more of vllm.LLM, as {"tensor_parallel_size": 2}')

    @model_validator(mode="after")
    def _has_prompts(self) -> RegenerateOptions:
        if self.prompts == "data" and not self.data:
            raise ValueError("data is missing; type --data NAMES, or --prompts self --limit N without data")
        if self.prompts == "self" and self.limit is None:
            raise ValueError("prompts self without limit; type --limit N, the number of conversations")
        return self

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures of the answers to own prompts, in turn."""
        return (self.temperature,) if "temperature" in self.model_fields_set else TEMPERATURES

    def meta(self) -> dict[str, Any]:
        """Return the settings that determine the text: a file is continued with equal ones only."""
        engine = {key: value for key, value in self.engine.items() if key not in RESOURCES}
        own = {"temperatures": list(self.temperatures)} if self.prompts == "self" else {}
        return {**self.model_dump(mode="json", exclude={"out", "prompts"}), "engine": engine, **own}

    def arguments(self, has_tokenizer: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of the engine and of the requests' sampling."""
        from vllm_mtpc.hf import choose_device

        engine = {
            "model": self.target,
            "dtype": self.dtype,
            "skip_tokenizer_init": not has_tokenizer,
            "disable_log_stats": True,
            "seed": self.seed,
            **(ON_CPU if choose_device("auto").type == "cpu" else {}),
            **self.engine,
        }
        return engine, self.model_dump(include={"temperature", "top_p", "top_k", "ignore_eos", "max_tokens"})


class Request(NamedTuple):
    """One response to generate. `id` depends only on the prompt's ids, the number of the sample and the seed."""

    id: str
    prompt_ids: list[int]
    messages: Messages | None

    def turns(self) -> Turns:
        """Ask for the response; return the answer. One without `response_ids` had no room."""
        tokens, reason = yield self.prompt_ids, int(self.id[:8], 16), {}
        return {"id": self.id, **({"response_ids": tokens, "finish_reason": reason} if reason else {})}

    def line(self, answer: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        line = {"id": self.id, "prompt_ids": self.prompt_ids, "response_ids": answer["response_ids"]}
        line["finish_reason"] = answer["finish_reason"]
        if self.messages is not None and tokenizer is not None:
            text = tokenizer.decode(answer["response_ids"], skip_special_tokens=True)
            line["messages"] = [*self.messages, {"role": "assistant", "content": text}]
        return line


def collect(options: RegenerateOptions, tokenizer: Any) -> list[Request]:
    """Return all requests of a run in the order of the data; raises UsageError if there are none in it.

    A repeated prompt gets another sample; at temperature 0, where its text would be the same, it is left out.
    """
    if options.prompts == "self":  # the limit is of the target's own prompts
        options = options.model_copy(update={"limit": None})
        if not options.data:
            return []
    prompts = _sample(list(_prompts(options, tokenizer)), options)
    if not prompts:
        raise UsageError(
            f"{', '.join(options.data)}: no prompts; expected is text of at least one token, or conversations with a "
            "turn before the assistant's; name other data"
        )
    requests: list[Request] = []
    seen: Counter[tuple[int, ...]] = Counter()
    for ids, messages in prompts:
        if options.temperature == 0 and seen[ids]:
            continue
        what = json.dumps([list(ids), seen[ids], options.seed]).encode()
        requests.append(Request(hashlib.sha256(what).hexdigest()[:32], list(ids), messages))
        seen[ids] += 1
    return requests


def _sample(items: list[Any], options: RegenerateOptions) -> list[Any]:
    if options.limit is None or options.limit >= len(items):
        return items
    return [items[index] for index in sorted(random.Random(options.seed).sample(range(len(items)), options.limit))]


def _prompts(options: RegenerateOptions, tokenizer: Any) -> Iterator[Prompt]:
    cut = _cutter(options, tokenizer)
    records = _sample(list(read_records(options.data, options.split)), options)
    for origin, record in Bar(records, "prompts", unit=" records"):
        if "prompt_ids" in record:
            if ids := exact_ids(record, "prompt_ids"):
                yield tuple(ids), None
        elif tokenizer is None:
            raise UsageError(f"{origin}: needs a tokenizer, and the target has none; give prompt_ids")
        elif "messages" in record:
            if not is_chat(messages := record["messages"]):
                raise UsageError(f"{origin}: messages must be a list of objects with role and content; correct it")
            turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            before = messages[: turns[-1]] if turns else messages  # the target generates the last turn again
            if before and before[-1]["role"] != "assistant":
                yield tuple(chat_prompt(before, tokenizer, f"{origin}: ")), before
        elif isinstance(record.get("text"), str):
            yield from cut(tokenizer(record["text"], verbose=False)["input_ids"])
        else:
            raise UsageError(f"{origin}: keys {', '.join(record)}; a record must be one of {FORMS}")


def _cutter(options: RegenerateOptions, tokenizer: Any) -> Callable[[list[int]], Iterator[Prompt]]:
    """Return a function that yields the prompts of a text: its beginning, or crops at positions drawn with the seed.

    Every second crop starts at a line of the text. The tokenizer's begin-of-text token is repeated before the crops of
    a text that has it, unless it is the end-of-text token too. A text shorter than `prompt_tokens` is one prompt.
    """
    length, texts = options.prompt_tokens, count()
    begin, end = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))

    @cache
    def ends_line(token: int) -> bool:
        return tokenizer is not None and tokenizer.decode([token]).endswith("\n")

    def cut(tokens: list[int]) -> Iterator[Prompt]:
        generator = random.Random(f"{options.seed}:{next(texts)}")
        if tokens and tokens[-1] == end:
            tokens = tokens[:-1]
        last = len(tokens) - length
        if not options.crops or last <= 0:
            if tokens:
                yield tuple(tokens[:length]), None
            return
        lead = [begin] if tokens[0] == begin != end else []
        lines = [place for place in range(1, last + 1) if ends_line(tokens[place - 1])]
        for crop in range(options.crops):
            start = generator.choice(lines) if crop % 2 and lines else generator.randint(0, last)
            yield tuple([*lead, *tokens[start : start + length - len(lead)]] if start else tokens[:length]), None

    return cut


@dataclass(frozen=True)
class Conversation:
    """One conversation to write; `ids` are those of its answers."""

    number: int
    ids: list[str]
    writer: SelfPrompts

    @property
    def id(self) -> str:
        """The id of its last answer: if it is there, the conversation is complete."""
        return self.ids[-1]

    def turns(self) -> Turns:
        return {"id": self.id, **(yield from self.writer.write(self))}


class SelfPrompts:
    """The conversations of a run; none unless `prompts` is self.

    A target without a chat template, or whose template has no special token after the user's content, writes texts from
    its begin-of-text token. Raises UsageError if it has neither.
    """

    def __init__(self, options: RegenerateOptions, tokenizer: Any) -> None:
        self.out, self.temperatures, self.tokenizer = options.out, options.temperatures, tokenizer
        self.side = self.out.with_name(self.out.name + ".dropped.json")
        self.conversations: list[Conversation] = []
        self.done: set[str] = set()
        self.seen: set[str] = set()
        self.dropped: dict[str, str] = {}  # reasons by id of the conversation
        if options.prompts == "data":
            return
        roles = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
        begin = next((token for token in roles if token is not None), None)
        self.special = set() if tokenizer is None else special_ids(tokenizer)
        after = [] if getattr(tokenizer, "chat_template", None) is None else self._parts([])[1]
        self.end = next((token for token in after if token in self.special), None)
        if self.end is None and begin is None:
            raise UsageError(f"target {options.target} has no token that begins a text; type --data NAMES as prompts")
        self.begin: list[Any] = [begin]
        for number in range(options.limit or 0):
            turns = 1 if self.end is None or number % SECOND_TURN else 2
            names = [f"self:{options.seed}:{number}:{turn}".encode() for turn in range(turns)]
            ids = [hashlib.sha256(name).hexdigest()[:32] for name in names]
            self.conversations.append(Conversation(number, ids, self))

    def _parts(self, messages: Messages) -> tuple[list[int], list[int]]:
        """Return the token ids of the template before and after the content of a user's turn that follows messages."""
        text = render_chat([*messages, {"role": "user", "content": CONTENT}], self.tokenizer, "", tokenize=False)
        before, found, after = text.partition(CONTENT)
        if not found:
            raise UsageError("the target's chat template leaves out the content of a user's turn; type --data NAMES")
        return self._encode(before.rstrip(" ")), self._encode(after)  # the content's first token has the space

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def write(self, conversation: Conversation) -> Turns:
        """Ask for all turns; return the `lines` of a conversation, and in `dropped` why the next one is missing."""
        number = conversation.number
        if self.end is None:
            warm = [one for one in self.temperatures if one] or self.temperatures  # greedy texts would be all the same
            ids, reason = yield self.begin, int(conversation.id[:8], 16), {"temperature": warm[number % len(warm)]}
            text = {"id": conversation.id, "prompt_ids": self.begin, "response_ids": ids, "finish_reason": reason}
            return {"lines": [text] if ids else [], "dropped": None if ids else "text empty"}
        messages, lines = Messages(), Messages()
        user = {"temperature": USER_TEMPERATURES[number % 2], **USER_SAMPLING, "stop_token_ids": [self.end]}
        answer = {"temperature": self.temperatures[number // 2 % len(self.temperatures)], "stop_token_ids": [self.end]}
        for id in conversation.ids:
            ids, reason = yield self._parts(messages)[0], int(id[:8], 16), user
            if fault := self.fault(ids, reason):
                return {"lines": lines, "dropped": f"user's turn {fault}"}
            content = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
            messages = [*messages, {"role": "user", "content": content}]
            request = Request(id, chat_prompt(messages, self.tokenizer), messages)
            ids, reason = yield request.prompt_ids, int(id[8:16], 16), answer
            if fault := self.fault(ids, reason):
                return {"lines": lines, "dropped": f"answer {fault}"}
            lines.append(request.line({"response_ids": ids, "finish_reason": reason}, self.tokenizer))
            messages = lines[-1]["messages"]
        return {"lines": lines, "dropped": None}

    def fault(self, ids: list[int], reason: str | None) -> str | None:
        """Return why a turn is dropped, or None. Text that spells a special token would become that token."""
        if reason != "stop":
            return "unfinished"
        turn = ids[:-1]  # without the token that ended it
        text = self.tokenizer.decode(turn)
        if not text.strip():
            return "empty"
        if self.special & {*turn, *self._encode(text)}:
            return "with special tokens"
        trigrams = set(zip(turn, turn[1:], turn[2:], strict=False))
        return "loop" if len(turn) >= LOOP_TOKENS and len(trigrams) < LOOP_SHARE * len(turn) else None

    def resume(self, done: set[str]) -> set[str]:
        """Return the ids that need no answer: `done` of the file's lines, and those of dropped conversations."""
        own, self.done = {id for conversation in self.conversations for id in conversation.ids}, done
        if not done & own:
            return done
        with self.out.open("rb") as file:
            self.seen = {_key(line) for line in map(json.loads, file) if line["id"] in own}
        self.dropped = json.loads(self.side.read_bytes()) if self.side.exists() else {}
        return done | self.dropped.keys()

    def keep(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the new lines of a conversation, without those of a turn of the user that was written before."""
        kept, fault = [], answer["dropped"]
        for line in answer["lines"]:
            if line["id"] in self.done:
                continue
            if (key := _key(line)) in self.seen:
                fault = "user's turn duplicate" if "messages" in line else "text duplicate"
                break
            self.seen.add(key)
            kept.append(line)
        if fault:
            self.dropped[answer["id"]] = fault
        return kept

    def close(self) -> None:
        """Write the dropped conversations beside the file of answers."""
        if self.conversations:
            replace_file(self.side, json.dumps(self.dropped, indent=0).encode())

    @property
    def report(self) -> str:
        counts = Counter(self.dropped.values()).most_common()
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts) or "none"
        return f"{len(self.conversations):,} conversations of the target; dropped: {reasons}"


def _key(line: dict[str, Any]) -> str:
    return line["messages"][-2]["content"].strip().lower() if "messages" in line else str(line["response_ids"])
