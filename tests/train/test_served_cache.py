"""`vllm-mtpc cache --states vllm`: in one process and on Ray, resumed, and with engines and actors that are killed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.tiny_targets import make_family
from tests.support.clusters import cluster
from vllm_mtpc.cli import main
from vllm_mtpc.data.rows import Rows
from vllm_mtpc.engine.served_target import load_served_target
from vllm_mtpc.hf import Target, load_target
from vllm_mtpc.train import cache, run
from vllm_mtpc.train.cache import Computed
from vllm_mtpc.train.options import parse
from vllm_mtpc.train.run import ShardWriter, read_data

SEQ, WIDTH, DOCUMENTS = 64, 32, 400
SHARD_ROWS = 32
ATOL = 1e-4  # float32: sums in another order; the states are of order 1
PATIENCE_S = 300.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target and data, whose caches have shards of 32 rows."""
    make_family("Llama", tmp_path / "target")
    generator = torch.Generator().manual_seed(4)
    with (tmp_path / "data.jsonl").open("w") as file:
        for number in range(DOCUMENTS):
            ids = torch.randint(48, (20 + number % 40,), generator=generator).tolist()
            file.write(json.dumps({"prompt_ids": ids[:2], "response_ids": ids[2:]}) + "\n")
    monkeypatch.setattr(cache, "SHARD_BYTES", SHARD_ROWS * SEQ * WIDTH * 4)
    return tmp_path


def shared(place: Path) -> dict[str, Any]:
    data = str(place / "data.jsonl")
    return {"target": str(place / "target"), "data": [data], "validation_data": [data], "seq_len": SEQ, "device": "cpu"}


def write(place: Path, *more: str, states: str = "vllm") -> int:
    flags = {name: value[0] if isinstance(value, list) else value for name, value in shared(place).items()}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return main(["cache", *words, "--out", str(place / "cache"), "--states", states, *more])


def assert_states_of_transformers(place: Path) -> None:
    """Every state that predicts a token of its document is that of transformers; the others are zero."""
    target = load_target(place / "target", torch.float32)
    rows, _, _ = read_data(parse({**shared(place), "out": place / "head"}), target, lambda *_: None)
    files = sorted((place / "cache").glob("shard-*"))
    assert sorted((place / "cache").iterdir()) == [place / "cache" / "index.json", *files]
    found = torch.cat([load_file(file)["hidden"] for file in files])
    predicts = torch.zeros_like(rows.document, dtype=torch.bool)
    predicts[:, :-1] = (rows.document[:, 1:] == rows.document[:, :-1]) & (rows.document[:, 1:] >= 0)
    expected = Computed(target, rows).hidden(torch.arange(len(rows.tokens)))
    torch.testing.assert_close(found[predicts], expected[predicts], rtol=0, atol=ATOL)
    assert not found[~predicts].any()
    assert len(files) >= 6 and predicts.sum() > 10_000


def wait(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_engine(watcher: int) -> None:
    """End the process group of the `vllm serve` that vllm_mtpc.engine.process started in this process."""
    (server,) = psutil.Process(watcher).children()
    os.killpg(server.pid, signal.SIGKILL)


@pytest.fixture
def one_actor_here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One actor in this process for Ray's, with a target of transformers for an engine."""

    def map_here(worker: Any, arguments: Any, options: Any, items: Any) -> Iterator[dict[str, Any]]:
        assert options.replicas == 2 and options.num_gpus(has_gpus=True) == 0
        rows = sum(len(pickle.loads(item["shard"]).rows.tokens) for item in items)
        assert sum(len(item["shard"]) for item in items) < rows * SEQ * 9 + 4096 * len(items), "more than its own rows"
        one = worker(*arguments)
        yield from map(one, reversed(items))

    monkeypatch.setattr(run, "map_on_ray", map_here)
    monkeypatch.setattr(run, "read_target", lambda options, device: load_target(options.target, torch.float32))


@pytest.mark.usefixtures("one_actor_here")
def test_missing_shards_alone_are_written_on_ray(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = cache.save_file

    def save(tensors: Any, path: Path, metadata: Any) -> None:
        if path.name.startswith("shard-00001"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "save_file", save)
        assert write(place, "--ray", "2") == 1
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert "hidden states cannot be written ([Errno 28] No space left on device); finished shards are intact" in last
    kept = {file: file.stat().st_mtime_ns for file in (place / "cache").glob("shard-*")}
    assert len(kept) >= 4 and not (place / "cache" / "shard-00000.safetensors").exists()
    assert write(place, "--ray", "2") == 0
    assert "tokens/s" in capsys.readouterr().err
    monkeypatch.setattr(Computed, "hidden", lambda *_: pytest.fail("computed again"))
    assert write(place, "--ray", "2") == 0
    assert {file: file.stat().st_mtime_ns for file in kept} == kept


@pytest.mark.parametrize(("engines", "states"), [("2", "transformers"), ("2", "auto"), ("-1", "vllm")])
def test_ray_without_states_of_vllm_is_refused(
    place: Path, engines: str, states: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(place, "--ray", engines, states=states) == 1
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert f"--ray {engines}: allowed are 0 and more engines of vLLM; type --states vllm --ray 2" in last


@pytest.mark.slow
def test_served_cache_is_that_of_transformers_and_resumes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = cache.save_file, []

    def save(tensors: Any, path: Path, metadata: Any) -> None:
        seen.append(path.name[:11])
        if seen[3:] == ["shard-00003"]:  # the first time
            raise KeyboardInterrupt
        real(tensors, path, metadata)

    monkeypatch.setattr(cache, "save_file", save)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        raise SystemExit(write(place))
    assert len(list((place / "cache").glob("shard-*"))) == 3
    assert write(place) == 0
    assert {name: count for name, count in Counter(seen).items() if count > 1} == {"shard-00003": 2}
    assert_states_of_transformers(place)


class NotedWriter(ShardWriter):
    """Makes a file for each attempt: NAME-PID in the folder `attempts` next to the cache."""

    def __call__(self, item: dict[str, bytes]) -> dict[str, Any]:
        path = pickle.loads(item["shard"]).path
        (path.parent.with_name("attempts") / f"{path.stem}-{os.getpid()}").touch()
        return super().__call__(item)


@pytest.mark.slow
def test_killed_actor_and_engine_lose_one_shard(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two nodes: the first actor to finish a shard loses its engine, the other one is killed."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    attempts, killed = place / "attempts", {}
    attempts.mkdir()

    def pids() -> dict[str, int]:
        """Of the last attempts at shards."""
        files = sorted(attempts.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        return {file.name[:11]: int(file.name[12:]) for file in files}

    def kill() -> None:
        wait(lambda: list((place / "cache").glob("shard-*.safetensors")) and len(set(pids().values())) > 1)
        done = next((place / "cache").glob("shard-*.safetensors")).stem
        first = pids()[done]
        (second,) = set(pids().values()) - {first}
        killed["shard"] = [name for name, pid in pids().items() if pid == second][-1]
        os.kill(second, signal.SIGKILL)
        (engine,) = psutil.Process(first).children()
        kill_engine(engine.pid)
        killed["first"] = first

    killer = threading.Thread(target=kill)
    monkeypatch.setattr(run, "ShardWriter", NotedWriter)
    with cluster(2, cpus=1, VLLM_CPU_OMP_THREADS_BIND="nobind"):
        killer.start()
        assert write(place, "--ray", "2") == 0
        killer.join()
        assert killed["first"] in pids().values()
    assert_states_of_transformers(place)
    tried = Counter(file.name[:11] for file in attempts.iterdir())
    assert {name for name, count in tried.items() if count > 1} == {killed["shard"]}


@pytest.mark.slow
def test_killed_engine_of_a_target_is_started_again(place: Path) -> None:
    target = load_served_target(place / "target", torch.float32, "cpu", {})
    texts = [[(7 * number + at * at) % 41 + 1 for at in range(2 + number % 90)] for number in range(300)]

    def end() -> None:
        kill_engine(target.recorder.server.client.process)

    found = []
    for number, recorded in enumerate(target.recorder.record(texts)):
        found.append(recorded.states)
        if number in (0, 70):  # other texts are at the engine
            end()
    end()  # between calls
    found += [recorded.states for recorded in target.recorder.record(texts[:5])]
    target.recorder.close()
    plain: Target = load_target(place / "target", torch.float32)
    for text, states in zip([*texts, *texts[:5]], found, strict=True):
        expected = plain.hidden(torch.tensor([text]))[0, :-1]
        torch.testing.assert_close(states, expected, rtol=0, atol=ATOL)


def test_pickled_shard_has_its_own_rows_only(tmp_path: Path) -> None:
    rows = Rows(*(torch.zeros(10_000, 8, dtype=torch.int32)[:4] for _ in range(3)))
    shard = cache.Shard(tmp_path, rows, torch.float32, (), {})
    assert len(pickle.dumps(shard.copy())) < 4096 < len(pickle.dumps(shard))
