"""A server for all runs of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import serve
from vllm_mtpc.engine import server
from vllm_mtpc.engine.server import VllmServer
from vllm_mtpc.regenerate import command


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, VllmServer]]:
    """Servers by their words: the first run with some words starts one, later ones share it."""
    found: dict[str, VllmServer] = {}
    with contextlib.ExitStack() as running, pytest.MonkeyPatch.context() as patch:

        @contextlib.contextmanager
        def run_once(words: list[str], log: Path) -> Iterator[VllmServer]:
            if str(words) not in found:
                found[str(words)] = running.enter_context(server.run_server(words, log))
            yield found[str(words)]

        patch.setattr(server, "PROGRAM", serve.program())
        patch.setattr(command, "run_server", run_once)
        yield found
