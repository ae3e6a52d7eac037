"""`vllm serve` as a fork of a process that has imported vLLM: in the place of `vllm_mtpc.engine.server.PROGRAM`."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Client
from multiprocessing.reduction import send_handle


def program() -> tuple[str, ...]:
    from tests.support import forks

    return sys.executable, __file__, forks.address("v1"), "serve"


def main(address: str, *words: str) -> int:
    with Client(address, "AF_UNIX") as connection:
        connection.send(("vllm", words, dict(os.environ), os.getcwd()))
        for file in range(3):
            send_handle(connection, file, None)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: connection.send(number))
        code = connection.recv()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
