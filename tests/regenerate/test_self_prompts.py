"""A target without data writes its own prompts and answers: the same ones after an interruption, and no broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from benchmarks.demo.byte_target import build_tokenizer
from tests.support.models import make_target
from vllm_mtpc.cli import main
from vllm_mtpc.errors import UsageError
from vllm_mtpc.regenerate import command as module
from vllm_mtpc.regenerate.command import regenerate
from vllm_mtpc.regenerate.prompts import RegenerateOptions, SelfPrompts
from vllm_mtpc.train import command
from vllm_mtpc.train.options import parse

END = 256  # the only special token: it ends turns and texts
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"  # nothing ends a turn


def tokenizer_of(template: str | None) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def options(out: Path, count: int = 12, target: Path | str = "t", **more: Any) -> RegenerateOptions:
    return RegenerateOptions(target=str(target), prompts="self", limit=count, out=out, **more)


class Target:
    """Stands in for vLLM: turns are the seed's digits, or what `say` returns of (is user's, number, seed).

    It is interrupted after `stop` conversations.
    """

    def __init__(self, say: Callable[[bool, int, int], Any] = lambda *_: None, stop: int = 0) -> None:
        self.say, self.stop, self.asked = say, stop, []

    def ask(self, prompt: list[int], seed: int, sampling: dict[str, Any]) -> tuple[list[int], str]:
        self.asked.append((bytes(prompt[-12:]) if END not in prompt[-12:] else b"", seed, sampling))
        is_user = sampling.get("max_tokens") == 256
        return self.say(is_user, len(self.asked), seed) or ([*f" {seed} ".encode(), END], "stop")

    def __call__(self, options: Any, requests: list[Any], *_: Any) -> Iterator[Any]:
        for number, request in enumerate(requests, 1):
            yield module.answer_of(self.ask, request)
            if number == self.stop:
                raise KeyboardInterrupt


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that regenerates with a stand-in and returns the lines of the file."""

    def regenerated(target: Target, name: str = "out", template: str | None = CHAT, **more: Any) -> list[Any]:
        monkeypatch.setattr(module, "find_spec", lambda _: True)
        monkeypatch.setattr(module, "WAVE", 1)
        monkeypatch.setattr(module, "_answers", target)
        monkeypatch.setattr("vllm_mtpc.hf.model.tokenizer_if_any", lambda _: tokenizer_of(template))
        regenerate(options(tmp_path / f"{name}.jsonl", **more))
        return lines(tmp_path / f"{name}.jsonl")

    return regenerated


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def dropped(folder: Path, name: str = "out") -> dict[str, str]:
    return json.loads((folder / f"{name}.jsonl.dropped.json").read_text())


def test_user_turn_follows_the_template_and_answer_its_generation_prompt(run):
    target = Target()
    rows = run(target, count=1)  # the first conversation has a second turn
    users, answers = target.asked[0::2], target.asked[1::2]
    turns = [f"[user] {users[0][1]}", f"[assistant] {answers[0][1]}", f"[user] {users[1][1]}"]
    prompts = [turns[0], "<|endoftext|>".join(turns)]
    for row, prompt, answer in zip(rows, prompts, answers, strict=True):
        assert row["prompt_ids"] == build_tokenizer()(prompt + "<|endoftext|>[assistant]")["input_ids"]
        assert row["response_ids"] == [*f" {answer[1]} ".encode(), END] and row["finish_reason"] == "stop"
    assert [turn["role"] for turn in rows[1]["messages"]] == ["user", "assistant"] * 2
    assert rows[1]["messages"][:2] == rows[0]["messages"]
    assert users[0][0] == b"[user]"  # the space of the template is left to the first token of the content
    how = {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "max_tokens": 256, "stop_token_ids": [END]}
    assert [sampling for _, _, sampling in users] == [how] * 2
    assert [sampling for _, _, sampling in answers] == [{"temperature": 0.6, "stop_token_ids": [END]}] * 2


def test_temperatures_and_second_turns_alternate(run):
    target = Target()
    rows = run(target, count=24)
    assert len(rows) == 24 + 8 and len({row["id"] for row in rows}) == 32
    assert len({seed for _, seed, _ in target.asked}) == 64
    of = [sampling["temperature"] for _, _, sampling in target.asked]
    every = {(user, answer) for user in (0.8, 1.0) for answer in (0.6, 0.8, 1.0, 0.0)}
    assert set(zip(of[0::2], of[1::2], strict=True)) == every
    run(typed := Target(), "typed", temperature=0.0)
    assert {sampling["temperature"] for _, _, sampling in typed.asked[1::2]} == {0.0}


@pytest.mark.parametrize("stop", [1, 5, 8])
def test_interrupted_run_continues_with_the_same_text(run, tmp_path, stop):
    def say(is_user: bool, count: int, seed: int) -> Any:
        return None if seed % 5 else ([1], "length")

    whole = run(Target(say), "whole", count=20)
    with pytest.raises(KeyboardInterrupt):
        run(Target(say, stop), count=20)
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"id": "torn')
    assert run(Target(say), count=20) == whole
    assert dropped(tmp_path) == dropped(tmp_path, "whole") != {}
    run(finished := Target(), count=20)
    assert finished.asked == []  # dropped conversations are not asked for again
    assert run(Target(say), "longer", count=23)[: len(whole)] == whole
    assert not {row["id"] for row in run(Target(say), "other", seed=1)} & {row["id"] for row in whole}


def test_running_target_writes_the_same_conversations(run, monkeypatch):
    """Turn by turn for some conversations at a time, in groups of the same sampling."""

    def say(is_user: bool, count: int, seed: int) -> Any:
        return None if seed % 5 else ([1], "length")

    whole, target = run(Target(say), "whole", count=20), Target(say)

    def respond(prompts, sampling, seeds):
        assert sampling["top_k"] in (0, 3) and len(prompts) <= 7
        for prompt, seed in zip(prompts, seeds, strict=True):
            ids, reason = target.ask(prompt, seed, sampling)
            yield [*prompt, *ids], None, reason

    monkeypatch.setattr(module, "ROUND", 7)
    rows = run(lambda options, requests, *_: module._responses(requests, {"top_k": 3}, respond), count=20)
    assert sorted(rows, key=str) == sorted(whole, key=str)


def test_second_turn_is_written_where_an_interruption_cut_it(run, tmp_path):
    whole, out = run(Target(), count=1), tmp_path / "out.jsonl"
    out.write_text(out.read_text().splitlines(keepends=True)[0])
    assert run(Target(), count=1) == whole and dropped(tmp_path) == {}


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (([*b"half a tur"], "length"), "unfinished"),
        (([], None), "unfinished"),  # no room for a token
        (([END], "stop"), "empty"),
        (([*b" \n ", END], "stop"), "empty"),
        (([*b"a", END, *b"b", END], "stop"), "with special tokens"),
        (([*b"a<|endoftext|>b", END], "stop"), "with special tokens"),  # the template would make a token of it
        (([*b"ab" * 16, END], "stop"), "loop"),
        (([*b"ab" * 15, *b"a", END], "stop"), None),  # 31 tokens
    ],
)
def test_broken_turns_are_dropped(run, tmp_path, turn, reason, capsys):
    for at, who in ((3, "user's turn"), (4, "answer")):  # of the first conversation's second turn
        name = str(at)
        rows = run(Target(lambda _, count, seed: turn if count == at else None), name, count=2)  # noqa: B023
        assert list(dropped(tmp_path, name).values()) == ([f"{who} {reason}"] if reason else [])
        assert len(rows) == (2 if reason else 3)
        if reason:
            assert f"2 conversations of the target; dropped: {who} {reason} 1\n" in capsys.readouterr().err


def test_repeated_user_turn_is_dropped_across_an_interruption(run, tmp_path):
    def say(is_user: bool, count: int, seed: int) -> Any:
        return ([*(b" Hello\n" if count % 4 else b"hELLO"), END], "stop") if is_user else None

    with pytest.raises(KeyboardInterrupt):
        run(Target(say, stop=1), count=4)
    rows = run(Target(say), count=4)
    assert [row["messages"][0]["content"] for row in rows] == ["Hello"]
    assert list(dropped(tmp_path).values()) == ["user's turn duplicate"] * 4


def test_prompts_of_data_are_answered_too(run, tmp_path):
    chats = [{"messages": [{"role": "user", "content": content}]} for content in "abc"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    rows = run(target := Target(), count=2, data=[str(tmp_path / "d.jsonl")])
    assert [row["messages"][0]["content"] for row in rows[:3]] == [*"abc"]
    assert len(rows) == 3 + 3 and all(not sampling for _, _, sampling in target.asked[:3])


@pytest.mark.parametrize("template", [None, PLAIN])
def test_target_without_turns_writes_texts(run, template):
    target = Target(lambda is_user, count, seed: ([7, count % 11], "length"))
    rows = run(target, count=12, template=template)
    assert len(rows) == 11  # the last one repeats the first
    assert all(row["prompt_ids"] == [END] and row["finish_reason"] == "length" and len(row) == 4 for row in rows)
    assert {sampling["temperature"] for _, _, sampling in target.asked} == {0.6, 0.8, 1.0}


def test_missing_prompts_are_refused_in_one_line(capsys):
    for words, message in (
        ([], "data is missing; type --data NAMES, or"),
        (["--prompts", "self"], "self without limit"),
    ):
        assert main(["regenerate", "--target", "t", "--out", "o", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and len(error.splitlines()) == 1


def test_target_that_cannot_begin_is_refused(run, tmp_path):
    with pytest.raises(UsageError, match="no token that begins a text; type --data"):
        SelfPrompts(options(tmp_path / "out.jsonl"), None)
    with pytest.raises(UsageError, match="leaves out the content of a user's turn"):
        SelfPrompts(options(tmp_path / "out.jsonl"), tokenizer_of("{{ 'hello' }}"))
    with pytest.raises(UsageError, match="template refuses the messages: no users"):
        SelfPrompts(options(tmp_path / "out.jsonl"), tokenizer_of("{{ raise_exception('no users') }}"))
    with pytest.raises(UsageError, match=r"dropped: user's turn unfinished 2; .*type --data NAMES"):
        run(Target(lambda *_: ([1], "length")), count=2)


def test_train_writes_conversations_without_data(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("vllm_mtpc.regenerate.command.regenerate", lambda values, _: asked.append(values) or values.out)
    monkeypatch.setattr("vllm_mtpc.hf.model.target_config", lambda _: LlamaConfig())
    monkeypatch.setattr("vllm_mtpc.train.run.read_target", lambda *_: served)
    values, served = {"target": "t", "out": tmp_path, "prompts": "self"}, SimpleNamespace(respond=None)
    trained, target = command.with_responses(parse(values))
    assert trained.data == [str(tmp_path / "data" / "self.jsonl")] and target is None
    command.with_responses(parse(values | {"head": "ptp", "regenerate": 9, "temperature": 0.7}))
    assert [(found.limit, found.data) for found in asked] == [(20_000, []), (9, [])]
    assert [found.temperatures for found in asked] == [(0.6, 0.8, 1.0, 0.0), (0.7,)]  # PTP: sampled as trained
    assert command.with_responses(parse(values | {"states": "vllm"}))[1] is served  # it keeps the states
    for wrong in ({"target": "t", "out": "o"}, values | {"regenerate": 0}):
        with pytest.raises(UsageError, match="data is missing; type --data NAMES, or --prompts self"):
            parse(wrong)


def test_engine_writes_texts_of_a_target_without_template(servers, tmp_path):
    make_target(tmp_path / "target", vocab_size=257, seed=3)
    build_tokenizer().save_pretrained(tmp_path / "target")
    engine, out = json.dumps({"max_model_len": 64, "kv_cache_memory_bytes": 1 << 26}), tmp_path / "out.jsonl"
    how = options(out, 5, tmp_path / "target", max_tokens=12, dtype="float32", engine=engine)
    whole = lines(regenerate(how))
    assert len(whole) == 5 and all(row["prompt_ids"] == [END] and row["response_ids"] for row in whole)
    assert len({str(row["response_ids"]) for row in whole}) == 5
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:2]))
    assert lines(regenerate(how)) == whole and len(servers) == 1
