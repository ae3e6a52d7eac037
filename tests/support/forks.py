"""Functions in a process of their own, forked from one that has imported vLLM and done nothing else.

Importing vLLM takes 20 CPU-seconds, a fork of a process that has imported it none. The processes of a pytest run share
such a server for each model runner. It starts no thread (OpenMP's would not survive a fork) and no engine, so that
every fork begins as a new process would. Each connection has a process of its own, which forks for one task at a time.
Model Runner V2 runs its Triton kernels interpreted (scripts/interpreter): the same kernels as on a GPU, slowly.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.connection import Client, Connection, wait
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
INTERPRETER = os.pathsep.join(filter(None, [str(ROOT / "scripts" / "interpreter"), os.environ.get("PYTHONPATH")]))
# Variables that vLLM and Triton read while they are imported; a call's own are set in its fork.
V2 = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(INTERPRETER)}
ENVIRONMENTS = {"v1": {}, "v2": V2}
INTERPRETERS = {"v2 at once": {"MTPC_INTERPRETER": "lanes"}}  # of forks of "v2": for many requests
# MTPC_TEST_GPU=1: on a GPU, nothing interpreted. What has imported vLLM may have touched the GPU, which a fork must not
# inherit: each imports it again. Attention on float32, Triton's, would multiply in TF32, whose errors of 1e-3 turn a
# greedy token now and then, as a drafted token is verified by other launches than a plain one.
ON_GPU = os.environ.get("MTPC_TEST_GPU") == "1"
if ON_GPU:
    ENVIRONMENTS = {
        name: {"VLLM_USE_V2_MODEL_RUNNER": runner, "TRITON_F32_DEFAULT": "ieee"}
        for name, runner in (("v1", "0"), ("v2", "1"))
    }
QUIET = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
IMPORTED = (
    ()
    if ON_GPU
    else (
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.llama",
        "vllm.v1.worker.cpu_worker",
        "vllm.distributed.elastic_ep.elastic_execute",
        "vllm.entrypoints.anthropic.protocol",
        "vllm.model_executor.layers.quantization.online.base",
        "tests.support.engine",
        "vllm_mtpc.plugin",
        "vllm_mtpc.proposers.worker.load",
    )
)
ENDS_WITHIN_S = 60.0  # a fork that has answered
CONNECTS_WITHIN_S = 60.0  # the process that started a server
FOLDER = Path(tempfile.gettempdir(), f"mtpc-forks-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}")


def call(runner: str, function: str, *arguments: Any, timeout: float = 1200, **environment: str) -> Any:
    """What "module:name"(*arguments) returns in a fork of the runner's server.

    Raises RuntimeError with the end of the fork's output where it ended without an answer, TimeoutError where it took
    longer; nothing that the fork started is left running.
    """
    name, environment = runner.split()[0], INTERPRETERS.get(runner, {}) | environment
    server = _connection(address(name))
    server.send((function, pickle.dumps(arguments), environment, timeout))
    try:
        kind, answer = server.recv()
    except (EOFError, ConnectionError):
        raise RuntimeError(f"the server of forks for {name} has ended") from None
    if kind == "answer":
        return pickle.loads(answer)
    if kind == "timeout":
        raise TimeoutError(f"{function} took more than {timeout:.0f} s; its output ends with:\n{answer}")
    raise RuntimeError(f"the process of {function} {kind}:\n{answer}")


@functools.cache
def _connection(name: str) -> Connection:
    return Client(name, "AF_UNIX")


def address(runner: str) -> str:
    """Return the socket of the server for a runner and this PYTHONPATH; start one if there is none.

    It ends with the last process that is connected to it.
    """
    path = os.environ.get("PYTHONPATH", "")
    name = Path(FOLDER, f"{runner}-{hashlib.sha256(path.encode()).hexdigest()[:8]}")
    with _lock(name):
        if not name.exists():
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(name))
                listener.listen()
                command = [sys.executable, "-m", "tests.support.forks", str(listener.fileno()), str(name), *IMPORTED]
                environment = {**os.environ, **QUIET, **ENVIRONMENTS[runner]}
                subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=[listener.fileno()])
    return str(name)


@contextlib.contextmanager
def _lock(name: Path) -> Iterator[None]:
    name.parent.mkdir(mode=0o700, exist_ok=True)
    with name.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(listener: socket.socket, name: Path, modules: list[str]) -> None:
    """The server: a process for each connection, until none is left."""
    _prepare(modules)
    context, processes = multiprocessing.get_context("fork"), list[Any]()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            ready = wait([listener, *(one.sentinel for one in processes)], None if processes else CONNECTS_WITHIN_S)
            processes = [one for one in processes if one.exitcode is None]
            if listener in ready:
                connection = Connection(listener.accept()[0].detach())
                processes.append(context.Process(target=_serve, args=(listener, connection)))
                processes[-1].start()
                connection.close()
                continue
            with _lock(name):
                if not processes and not wait([listener], 0):
                    name.unlink(missing_ok=True)
                    return


def _serve(listener: socket.socket, connection: Connection) -> None:
    """One fork for each task, until the process at the other end closes the connection."""
    listener.close()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            task = connection.recv()
            if task[0] == "vllm":
                return _serve_vllm(connection, *task[1:])
            with tempfile.TemporaryFile() as log:
                connection.send(_in_a_fork(connection, task, log))


def _prepare(modules: list[str]) -> None:
    warnings.simplefilter("ignore")
    for module in modules:
        import_module(module)
    if "vllm" in sys.modules:
        # or every fork does so, for 350 loggers
        import_module("vllm.logger").configure_logging_if_needed(import_module("vllm.config.logging").LoggingConfig())
        _replace_kernels_once()
        inspect_models_here()
    gc.collect()
    gc.freeze()  # or every engine that starts walks through all that was imported, five times
    # vLLM thaws it when an engine ends: the next one in the same fork would take 2 s longer.
    gc.freeze = gc.unfreeze = lambda: None


def inspect_models_here() -> None:
    """Import a model's class where vLLM inspects it by a process of 15 CPU-seconds, unless its cache has the result."""
    registry = sys.modules.get("vllm.model_executor.models.registry")
    if registry is not None and not ON_GPU:
        registry._run_in_subprocess = lambda inspect: inspect()


def _replace_kernels_once() -> None:
    """Every engine replaces kernels all over the loaded modules: a served process does so once, a test's many times."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    once = functools.cache(platform.register_triton_kernel_overrides)
    platform.register_triton_kernel_overrides = staticmethod(once)
    once()


def _in_a_fork(connection: Connection, task: tuple[Any, ...], log: IO[bytes]) -> tuple[str, Any]:
    answers, theirs = multiprocessing.Pipe(duplex=False)
    *what, timeout = task
    fork = multiprocessing.get_context("fork").Process(target=_run, args=(*what, theirs, log.fileno()))
    fork.start()
    theirs.close()
    try:
        ready = wait([connection, answers], timeout=timeout)
        if connection in ready:  # the test process has ended
            raise EOFError
        if not ready:
            return "timeout", _end_of(log)
        answer = None
        with contextlib.suppress(EOFError):
            answer = answers.recv_bytes()
        fork.join(ENDS_WITHIN_S)
        if fork.exitcode is None:
            return "has answered, but does not end", _end_of(log)
        return (f"ended with {fork.exitcode}", _end_of(log)) if answer is None else ("answer", answer)
    finally:
        fork.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(fork.pid, signal.SIGKILL)  # whatever it has started and left
        fork.join()


def _serve_vllm(connection: Connection, words: list[str], environment: dict[str, str], folder: str) -> None:
    """Run the command line of vLLM in a fork for tests/support/serve.py: its files, its signals, its exit code."""
    files = [recv_handle(connection) for _ in range(3)]
    fork = multiprocessing.get_context("fork").Process(target=_run_vllm, args=(words, environment, folder, files))
    fork.start()
    for file in files:
        os.close(file)
    try:
        while fork.exitcode is None:
            if connection in wait([connection, fork.sentinel]):
                os.kill(fork.pid, connection.recv())
        connection.send(fork.exitcode)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(fork.pid, signal.SIGKILL)


def _run_vllm(words: list[str], environment: dict[str, str], folder: str, files: list[int]) -> None:
    """vLLM spawns its engine on a CPU, which imports all of vLLM again: here it is a fork."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = ["vllm", *words]
    get_context: Any = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)
    import_module("vllm.entrypoints.cli.main").main()


def _end_of(log: IO[bytes], size: int = 8000) -> str:
    log.seek(0)
    return log.read()[-size:].decode(errors="replace")


def _run(function: str, arguments: bytes, environment: dict[str, str], answers: Connection, log: int) -> None:
    os.setsid()  # a group of its own, to be ended as one
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    if interpreter := sys.modules.get("numpy_interpreter"):
        interpreter.install()  # the one that the fork's environment names
    module, _, name = function.partition(":")
    answers.send_bytes(pickle.dumps(getattr(import_module(module), name)(*pickle.loads(arguments))))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3:])
