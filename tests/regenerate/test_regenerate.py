"""Responses are the target's own, written once each, and a run that was interrupted ends as if it had not been."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.demo.byte_target import build_tokenizer
from tests.support.models import make_target
from vllm_mtpc.cli import main
from vllm_mtpc.engine import server
from vllm_mtpc.errors import UsageError
from vllm_mtpc.regenerate import command as module
from vllm_mtpc.regenerate.command import regenerate
from vllm_mtpc.regenerate.prompts import RegenerateOptions, collect

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(scope="module")
def target(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_target(folder, vocab_size=257, seed=3)
    tokenizer.save_pretrained(folder)
    return folder


def write_lines(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_id(path: Path) -> list[dict[str, Any]]:
    return sorted(lines(path), key=lambda row: row["id"])


def texts(tmp_path: Path, count: int) -> str:
    return write_lines(tmp_path / "texts.jsonl", *({"text": f"{number}: a text of its own"} for number in range(count)))


def options(target: Path | str, data: str, out: Path, **more: Any) -> RegenerateOptions:
    return RegenerateOptions(**{"target": str(target), "data": [data], "out": out, "prompt_tokens": 6, **more})


class Engine:
    """Stands in for vLLM: answers with the prompt backwards; ends after `stop` answers."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.asked = stop, []

    def __call__(self, options: Any, requests: list[Any], has_tokenizer: bool, respond: None) -> Iterator[Any]:
        for number, request in enumerate(requests):
            if number == self.stop:
                raise KeyboardInterrupt
            self.asked.append(request.id)
            yield {"id": request.id, "response_ids": request.prompt_ids[::-1], "finish_reason": "length"}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(module, "_answers", engine)
    monkeypatch.setattr(module, "find_spec", lambda _: True)
    monkeypatch.setattr(module, "WAVE", 2)
    return engine


def test_prompts_are_taken_from_text(tmp_path, tokenizer):
    rows = [{"text": "hello world"}, {"text": "hi"}, {"text": ""}, {"prompt_ids": [7]}]
    (tmp_path / "plain.txt").write_text("plain text")
    how = options("t", write_lines(tmp_path / "d.jsonl", *rows), tmp_path)
    for data, prompts in ((how.data, [b"hello ", b"hi", b"\7"]), ([str(tmp_path / "plain.txt")], [b"plain "])):
        requests = collect(how.model_copy(update={"data": data}), tokenizer)
        assert [bytes(request.prompt_ids) for request in requests] == prompts


def test_crops_start_at_random_positions_and_lines(tmp_path, tokenizer):
    text = "".join(f"line {number:02d}\n" for number in range(40))
    data = write_lines(tmp_path / "d.jsonl", {"text": text}, {"text": "abc"})
    cut = [bytes(request.prompt_ids).decode() for request in collect(options("t", data, tmp_path, crops=40), tokenizer)]
    assert len(cut) == 41 and cut[-1] == "abc"  # a text without room for a crop is one prompt
    assert all(len(prompt) == 6 and prompt in text for prompt in cut[:-1])
    assert all(prompt.startswith("line ") for prompt in cut[1:-1:2])  # every second one begins a line
    assert not all(prompt.startswith("line ") for prompt in cut[0:-1:2])

    def prompts(**more: Any) -> list[list[int]]:
        return [r.prompt_ids for r in collect(options("t", data, tmp_path, crops=40, **more), tokenizer)]

    assert prompts() == prompts() != prompts(seed=1)
    some = prompts(limit=5)
    assert len(some) == 5 and all(prompt in prompts() for prompt in some)


class WithBegin:
    bos_token_id, eos_token_id = 1, 256

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, *text.encode()]}

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()


def test_begin_of_text_token_precedes_every_crop(tmp_path):
    data = write_lines(tmp_path / "d.jsonl", {"text": "some text\n" * 9})
    for request in collect(options("t", data, tmp_path, crops=9), WithBegin()):
        assert request.prompt_ids[0] == 1 and request.prompt_ids.count(1) == 1 and len(request.prompt_ids) == 6


def test_conversations_end_before_the_last_answer(tmp_path, tokenizer):
    def turn(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    one = [turn("system", "be kind"), turn("user", "hi"), turn("assistant", "yo"), turn("user", "bye")]
    two = [*one, turn("assistant", "old answer"), turn("user", "cut off")]
    open_end = [turn("user", "well?")]
    nothing = [turn("assistant", "I begin")]
    data = write_lines(tmp_path / "d.jsonl", *({"messages": m} for m in (two, open_end, nothing)))
    requests = collect(options("t", data, tmp_path), tokenizer)
    assert [bytes(request.prompt_ids).decode() for request in requests] == [
        "[system]be kind\n[user]hi\n[assistant]yo\n[user]bye\n[assistant]",
        "[user]well?\n[assistant]",
    ]
    line = requests[0].line({"response_ids": [*b"good bye", 256], "finish_reason": "stop"}, tokenizer)
    assert line["messages"] == [*one, turn("assistant", "good bye")]
    assert line["response_ids"] == [*b"good bye", 256] and line["finish_reason"] == "stop"


def test_samples_have_different_ids(tmp_path, tokenizer):
    data = write_lines(tmp_path / "d.jsonl", {"prompt_ids": [1, 2]}, {"prompt_ids": [1, 2]}, {"prompt_ids": [3]})
    requests = collect(options("t", data, tmp_path), tokenizer)
    assert len({request.id for request in requests}) == 3  # a prompt that occurs twice has two samples
    greedy = collect(options("t", data, tmp_path, temperature=0), tokenizer)
    assert [request.prompt_ids for request in greedy] == [[1, 2], [3]]
    other = collect(options("t", data, tmp_path, seed=1), tokenizer)
    assert not {request.id for request in other} & {request.id for request in requests}


def test_command_writes_every_response_and_its_settings(tmp_path, target, engine, capsys):
    data, out = texts(tmp_path, 5), tmp_path / "deep" / "out.jsonl"
    flags = f"--target {target} --data {data} --out {out} --prompt-tokens 6 --temperature 0 --limit 4 --ignore-eos"
    assert main(["regenerate", *flags.split()]) == 0
    assert str(out) in capsys.readouterr().out
    rows = lines(out)
    assert len(rows) == 4 and {*rows[0]} == {"id", "prompt_ids", "response_ids", "finish_reason"}
    assert {bytes(row["prompt_ids"]).decode() for row in rows} < {f"{number}: a t" for number in range(5)}
    assert all(row["response_ids"] == row["prompt_ids"][::-1] for row in rows)
    meta = json.loads(out.with_name("out.jsonl.meta.json").read_text())
    assert (meta["target"], meta["temperature"], meta["limit"], meta["ignore_eos"]) == (str(target), 0.0, 4, True)
    assert "torch" in meta["versions"]
    sent, sampling = options(target, data, out, engine='{"dtype": "float32"}', ignore_eos=True).arguments(True)
    assert (sent["dtype"], sampling["ignore_eos"]) == ("float32", True)  # --engine has precedence over other flags


@pytest.mark.parametrize("torn", ['{"id": "ab', '{"id": "ab", "prompt_ids": [1]}', "\udcff"])
def test_interrupted_run_is_resumed(tmp_path, target, engine, monkeypatch, torn):
    """A line that the interruption cut is removed, even where what is left of it is JSON."""
    how = options(target, texts(tmp_path, 9), tmp_path / "out.jsonl")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_answers", Engine(stop=4))
        regenerate(how)
    kept = lines(how.out)
    assert len(kept) == 4
    with how.out.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(torn)
    engine.asked.clear()
    regenerate(how)
    assert not set(engine.asked) & {row["id"] for row in kept}  # nothing is written twice
    assert lines(how.out)[: len(kept)] == kept
    whole = regenerate(options(target, texts(tmp_path, 9), tmp_path / "whole.jsonl"))
    assert by_id(how.out) == by_id(whole)
    engine.asked.clear()
    regenerate(how)
    assert engine.asked == []  # nothing is left to do


@pytest.mark.parametrize(
    ("texts_now", "more", "line", "message"),
    [
        (3, {"temperature": 0.5, "seed": 4}, "", r"temperature 1\.0 \(asked for: 0\.5\), seed 0 .*name another"),
        (4, {}, "", "made with other settings: prompts '"),  # a file of the same name with other content
        (3, {}, '{"text": "mine"}\n', "out.jsonl:4: not a response; remove the line"),
        (3, {}, None, "is there without out.jsonl.meta.json; name another file"),
        (3, {"engine": '{"max_model_len": 9}'}, "", "engine {} .asked for: {'max_model_len': 9}"),
        (3, {"engine": '{"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1000}'}, "", None),
    ],
)
def test_output_of_another_run_is_refused(tmp_path, target, engine, texts_now, more, line, message):
    out = regenerate(options(target, texts(tmp_path, 3), tmp_path / "out.jsonl"))
    if line is None:
        (tmp_path / "out.jsonl.meta.json").unlink()
    out.write_text(before := out.read_text() + (line or ""))
    with pytest.raises(UsageError, match=message) if message else contextlib.nullcontext():
        regenerate(options(target, texts(tmp_path, texts_now), out, **more))
    assert out.read_text() == before


def test_empty_data_and_missing_vllm_are_refused(tmp_path, target, engine, monkeypatch):
    data = write_lines(tmp_path / "d.jsonl", {"text": ""}, {"prompt_ids": []})
    with pytest.raises(UsageError, match=r"d.jsonl: no prompts"):
        regenerate(options(target, data, tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"vllm, which is not installed; type: scripts/setup\.sh"):
        regenerate(options(target, texts(tmp_path, 2), tmp_path / "out.jsonl"))


LENGTHS = [5, 40, 470, 300, 450, 460, 3, 479, 200, 480, 500] * 2  # of the prompts; 480 and above leave no room
ENGINE = json.dumps({"max_model_len": 480, "kv_cache_memory_bytes": 1 << 26})
VLLM = {"dtype": "float32", "max_tokens": 12, "ignore_eos": True, "engine": ENGINE}


@pytest.fixture(scope="module")
def written(target: Path, servers: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[float, Path]:
    """Whole runs at T = 0 and 1 over prompts of very different lengths, some without room."""
    folder, generator = tmp_path_factory.mktemp("written"), torch.Generator().manual_seed(5)
    prompts = [torch.randint(256, (length,), generator=generator).tolist() for length in LENGTHS]
    data = write_lines(folder / "d.jsonl", *({"prompt_ids": prompt} for prompt in prompts))
    outs = {temperature: folder / f"{temperature}.jsonl" for temperature in (0.0, 1.0)}
    return {t: regenerate(options(target, data, out, temperature=t, **VLLM)) for t, out in outs.items()}


def test_greedy_responses_equal_transformers(target, written):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    rows = lines(written[0.0])
    assert sorted(len(row["prompt_ids"]) for row in rows) == sorted(length for length in LENGTHS if length < 480)
    for row in rows:
        prompt = torch.tensor([row["prompt_ids"]])
        room = 480 - prompt.shape[1]
        expected = model.generate(prompt, max_new_tokens=min(12, room), do_sample=False, pad_token_id=256)
        assert row["response_ids"] == expected[0, prompt.shape[1] :].tolist()
        assert row["finish_reason"] == "length"


def test_resumed_run_writes_the_same_responses(target, written, servers, tmp_path):
    """Other requests share the batches of the second run; every response has its own seed."""
    whole, out = written[1.0], tmp_path / "out.jsonl"
    out.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:7]) + b'{"id": "torn')
    (tmp_path / "out.jsonl.meta.json").write_bytes(whole.with_name(whole.name + ".meta.json").read_bytes())
    regenerate(options(target, str(whole.parent / "d.jsonl"), out, temperature=1.0, **VLLM))
    assert by_id(out) == by_id(whole) and len(servers) == 1
    greedy = {tuple(row["prompt_ids"]): row["response_ids"] for row in lines(written[0.0])}
    assert any(row["response_ids"] != greedy[tuple(row["prompt_ids"])] for row in lines(out))
    assert not (tmp_path / "out.jsonl.log").exists()


def test_failed_engine_names_the_cause_and_the_log(tmp_path, target, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda _: True)
    fails = "import sys; sys.exit(f'vllm serve: error: invalid choice: {sys.argv[sys.argv.index(\"--dtype\") + 1]}')"
    monkeypatch.setattr(server, "PROGRAM", (sys.executable, "-c", fails))
    how = options(target, texts(tmp_path, 2), tmp_path / "out.jsonl", dtype="float33")
    with pytest.raises(UsageError, match=r"vLLM failed: .*float33.*its log is") as refused:
        regenerate(how)
    assert "\n" not in str(refused.value) and (tmp_path / "out.jsonl.log").is_file()
