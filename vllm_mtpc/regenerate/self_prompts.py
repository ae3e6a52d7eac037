"""Conversations that the target writes alone: the user's turns, then the answers (Magpie, arXiv 2406.08464).

After the chat template's text up to the user's content, a chat model writes what a user would. Everything that decides
a conversation follows from the seed and its number, so that a stopped run continues with the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from vllm_mtpc.data.sources import chat_prompt, render_chat, special_ids
from vllm_mtpc.errors import UsageError
from vllm_mtpc.files import replace_file
from vllm_mtpc.regenerate.options import RegenerateOptions
from vllm_mtpc.regenerate.prompts import Messages, Request, Turns

CONTENT = "XQZSENTINELXQZ"  # of a user's turn; the template's text around it is read
USER_TEMPERATURES, USER_SAMPLING = (0.8, 1.0), {"top_p": 0.95, "top_k": 0, "max_tokens": 256}
SECOND_TURN = 3  # every third conversation has one
LOOP_TOKENS, LOOP_SHARE = 32, 0.5  # a turn of so many tokens with a smaller share of distinct trigrams is a loop


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
    its begin-of-text token.

    Raises:
        UsageError: the target has no tokenizer, or neither a template nor such a token.
    """

    def __init__(self, options: RegenerateOptions, tokenizer: Any) -> None:
        self.out, self.temperatures = options.out, options.temperatures
        self.side = self.out.with_name(self.out.name + ".dropped.json")
        self.tokenizer = tokenizer
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
        """What was dropped, in one line."""
        counts = Counter(self.dropped.values()).most_common()
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts) or "none"
        return f"{len(self.conversations):,} conversations of the target; dropped: {reasons}"


def _key(line: dict[str, Any]) -> str:
    return line["messages"][-2]["content"].strip().lower() if "messages" in line else str(line["response_ids"])
