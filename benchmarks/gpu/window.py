"""Compare plain vLLM, its methods and heads within minutes on one GPU: all engines start at once.

    python -m benchmarks.gpu.window --until 260 serve --heads HEAD ... --logs DIR --json FILE

The options are those of `vllm-mtpc bench serve`. Each engine is READY, or FAILED with the end of its log. Then greedy
answers are compared with plain vLLM's, and one engine at a time is measured. Each result is printed and written to
FILE, in the layout of `bench serve`, as soon as it is known.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.child_process import tail
from vllm_mtpc.bench import serve_command
from vllm_mtpc.bench.serve_command import COLUMN_DEFINITIONS, Comparison, Decoding, Pass, engine_arguments, make_rows
from vllm_mtpc.cli import guard
from vllm_mtpc.data import prompts
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.process import usable_cores
from vllm_mtpc.engine.served import complete_greedy, measure
from vllm_mtpc.engine.server import PROGRAM, VllmServer, free_port, serve_arguments
from vllm_mtpc.errors import EngineFailed, UsageError, first_line
from vllm_mtpc.report import SERVED, check_file, check_folder, write_json


class Window:
    """Engines that run at once, and their results so far: passes, greedy answers, and those that equal plain vLLM's."""

    def __init__(self, args: argparse.Namespace, on_gpu: bool) -> None:
        self.begun, self.args, self.about = time.monotonic(), args, provenance.collect()
        every, loads = serve_command.find_decodings(args, on_gpu), serve_command.make_loads(args)
        self.plain, self.decodings = every[0], [one for one in every if not one.fault]
        self.found = Comparison(loads, missing=[one for one in every if one.fault])
        count = max(load.prompts for load in loads)
        texts = prompts.load(args.data, args.target, count, args.prompt_tokens, args.max_prompt_tokens)
        self.texts = list(itertools.islice(itertools.cycle(texts), count))
        length = -(-(max(map(len, texts)) + args.max_tokens + serve_command.ROOM) // 64) * 64
        self.engine = engine_arguments(args.target, args.dtype, length, max(args.concurrency), on_gpu, args.engine)
        self.servers: dict[Decoding, VllmServer] = {}
        self.identical: dict[str, tuple[int, int]] = {}

    def run(self) -> None:
        """Start all engines, compare greedy answers, measure until the time is over, and stop the engines."""
        with ThreadPoolExecutor(len(self.decodings)) as pool:
            try:
                starts = pool.map(self._start, self.decodings)
                import_module("vllm.benchmarks.serve")  # of the passes, while engines start
                list(starts)
                for one in self.found.greedy if self.plain in self.servers else ():
                    if pair := self.found.identical(one):
                        self.identical[one.name] = pair
                        self._print(f"greedy {one.name}: {pair[0]} of {pair[1]} answers equal plain vLLM's")
                self._measure()
            finally:
                list(pool.map(VllmServer.stop, self.servers.values()))

    def write(self) -> None:
        """Write the results so far."""
        given = {key: provenance.public(value) for key, value in vars(self.args).items() if key not in ("json", "logs")}
        lost = [{"name": one.name, "reason": one.fault, "is_required": one.is_required} for one in self.found.missing]
        result = {"kind": SERVED, **self.about, "definitions": COLUMN_DEFINITIONS, "settings": given}
        result |= {"rows": make_rows(self.found), "not_run": lost, "identical": self.identical}
        write_json(self.args.json, result)

    def faults(self) -> list[str]:
        """Return why the comparison has failed: engines, greedy answers in float32, or nothing to compare."""
        lost = {one.name for one in self.found.missing if one.is_required}
        drafted = {one.decoding.name for one in self.found.passes if one.result.acceptance.drafts}
        lost |= {one.name for one in self.decodings if one.is_required} - drafted
        found = [f"{name} did not run, or drafted nothing" for name in sorted(lost)]
        pairs = self.identical.items() if self.args.dtype == "float32" else ()
        found += [f"{name}: {same} of {total} answers equal plain's" for name, (same, total) in pairs if same < total]
        return found if drafted else [*found, "nothing was compared with plain vLLM"]

    def _start(self, decoding: Decoding) -> None:
        drafts = {} if decoding.is_plain else {"speculative_config": decoding.speculative}
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // len(self.decodings)))}
        words = serve_arguments({**self.engine, **drafts})
        load, server = self.found.loads[0], VllmServer(words, threads, PROGRAM, self._log(decoding), free_port())
        try:
            server.start(0.75 * self.args.until)  # a slow start leaves time to measure the others
            self._print(f"READY {decoding.name}")
            self.servers[decoding] = server
            self.found.greedy[decoding] = complete_greedy(server, self.texts[: load.prompts], load.max_tokens)
        except EngineFailed as error:
            self._lose(decoding, error)

    def _measure(self) -> None:
        baseline = 0.0
        self.write()
        for load, decoding in itertools.product(self.found.loads, self.decodings):
            if self.plain not in self.servers or time.monotonic() - self.begun > self.args.until:
                return self._print(f"not measured: {load.name} {decoding.name}, and what follows")
            if decoding not in self.servers:
                continue
            try:
                one = measure(self.servers[decoding], load, self.texts[: load.prompts])
            except EngineFailed as error:
                self._lose(decoding, error)
                continue
            baseline = one.tokens_per_second if decoding is self.plain else baseline
            self.found.passes.append(Pass(decoding, load, 0, one, baseline))
            speed = f"{one.tokens_per_second:.0f} tok/s, {self.found.passes[-1].speedup:.2f}x"
            self._print(f"{load.name} {decoding.name}: {speed}, {one.acceptance.tokens_per_step:.2f} tokens/step")
            self.write()

    def _lose(self, decoding: Decoding, error: EngineFailed) -> None:
        reason = ": ".join(dict.fromkeys((first_line(error), error.reason)))  # e.g. not healthy in time, and why
        self.found.missing.append(replace(decoding, fault=f"its engine failed: {reason}"))
        self._print(f"FAILED {decoding.name}: {reason}\n{tail(self._log(decoding), 40)}")
        if server := self.servers.pop(decoding, None):
            server.stop()

    def _log(self, decoding: Decoding) -> Path:
        return self.args.logs / ("".join(letter if letter.isalnum() else "-" for letter in decoding.name) + ".log")

    def _print(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:5.1f} s] {text}", flush=True)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.window", description=__doc__.splitlines()[0])
    parser.add_argument("--until", type=float, default=3600.0, metavar="SECONDS", help="the last pass starts by then")
    serve_command.add_arguments(parser)
    args = parser.parse_args(words)
    return guard(parser.prog, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    on_gpu = torch.cuda.is_available()
    serve_command.set_defaults(args, on_gpu)
    if not args.json or not args.logs:
        raise UsageError("type --json FILE and --logs DIR: the results so far and the engines' logs are kept there")
    check_file(args.json)
    check_folder(args.logs, "--logs")
    window = Window(args, on_gpu)
    window.run()
    window.write()
    for fault in window.faults():
        print(f"failed: {fault}")
    return int(bool(window.faults()))


if __name__ == "__main__":
    sys.exit(main())
