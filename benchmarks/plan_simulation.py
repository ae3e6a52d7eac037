"""Simulate the online plan with the costs of an H100, against an oracle, fixed K and the static schedule.

    python -m benchmarks.plan_simulation --json benchmarks/results/plan-simulation.json

A discrete-event engine: requests arrive (a constant number of clients, Poisson, or bursts), their prompts are read in
chunks, and they decode. Costs are arithmetic (bytes, FLOPs, launches), not measured. The prior of the plan is a bare
roofline without launches, collectives and padding, and its drafts cost 1.5 times the true ones. The oracle knows the
costs and the acceptance of each request. Every policy serves the same trace; a result is tokens per busy second.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vllm_mtpc.engine import provenance
from vllm_mtpc.plan.draft_schedule import draft_arms
from vllm_mtpc.plan.online_plan import CLASSES, Floats, OnlinePlan, request_class
from vllm_mtpc.report import check_file, write_json

BANDWIDTH, FLOPS = 3.35e12, 8e14  # of an H100: bytes/s, and realistic FLOP/s in bfloat16
CHUNK = 2048  # prompt tokens of a step
NUM_DRAFTS = 7
ARMS = draft_arms(NUM_DRAFTS)
POLICIES = ("oracle", "plan", *map(str, ARMS), "static")
LEFT, CONTEXT, PROMPT, ACCEPTS, SAMPLED = range(5)  # rows of a trace


@dataclass(frozen=True)
class Target:
    """A target and its head on one rank: bytes, parameters, bytes of a token's KV cache, seconds of launches and
    collectives, and of a draft: seconds, + each K, + each K and request."""

    weights: float
    params: float
    kv_token: float
    overhead: float
    draft: tuple[float, float, float]

    def roofline(self, rows: int) -> float:
        return max(self.weights / BANDWIDTH, 2 * self.params * rows / FLOPS)

    def draft_seconds(self, batch: int, drafts: int) -> float:
        fixed, per_draft, per_token = self.draft
        return fixed + drafts * (per_draft + per_token * batch) if drafts else 0.0

    def step(self, batch: int, verified: int, drafted: int, context: float, prompt: int = 0) -> float:
        """Return the seconds of a step; rows are padded to captured sizes."""
        rows = batch * (1 + verified) + prompt
        padded = rows if rows > 512 else -(-rows // 8) * 8
        read = self.kv_token * context / BANDWIDTH
        return self.roofline(padded) + self.overhead + read + self.draft_seconds(batch, drafted)

    def prior(self, max_num_seqs: int) -> Floats:
        steps = [[(b, k) for k in ARMS] for b in range(max_num_seqs + 1)]
        return np.array(
            [[self.roofline(b * (1 + k)) + 1.5 * self.draft_seconds(b, k) for b, k in row] for row in steps]
        )


TARGETS = {
    "Qwen3-8B": Target(16.4e9, 8.2e9, 147e3, 0.4e-3, (0.3e-3, 0.02e-3, 4e-6)),
    "Llama-3-70B, TP8": Target(141e9 / 8, 70.6e9 / 8, 320e3 / 8, 3.0e-3, (0.6e-3, 0.06e-3, 5e-6)),
    "EvaByte": Target(13e9, 6.5e9, 20e3, 0.4e-3, (0.35e-3, 0.005e-3, 0.1e-6)),
}


@dataclass(frozen=True)
class Load:
    """Requests of one run.

    Attributes:
        clients: requests at once, at most. rate: arrivals per second; 0: as requests end. burst: seconds of arrivals,
            and then of silence.
        accepted, spread: mean and standard deviation over requests of the acceptance of a draft.
        drift: amplitude of a sine of acceptance, relative to it, with `period` seconds.
    """

    clients: int
    rate: float = 0.0
    burst: float = 0.0
    accepted: float = 0.75
    spread: float = 0.08
    drift: float = 0.0
    period: float = 20.0


STEADY = {
    f"{clients} clients, acceptance {accepted}": Load(clients, accepted=accepted, spread=0.08 if accepted else 0.0)
    for accepted in (0.75, 0.4, 0.0)
    for clients in (1, 8, 64, 256, 512)
}
DRIFTING = {f"{clients} clients, acceptance drifts": Load(clients, drift=0.4) for clients in (1, 16, 128)} | {
    f"{rate:g} requests/s{kind}": Load(256, rate=rate, burst=burst)
    for rate in (2.0, 20.0)
    for kind, burst in (("", 0.0), (", bursts of 1 s", 1.0), (", bursts of 5 s", 5.0))
}


class Engine:
    """An engine that serves a trace, [5, requests]: output left, context, prompt left, acceptance, sampled or not."""

    def __init__(self, target: Target, load: Load, seed: int, requests: int) -> None:
        rng = np.random.default_rng(seed)
        self.target, self.load, self.rng = target, load, np.random.default_rng(seed + 1)
        self.time, self.busy, self.tokens, self.verified = 0.0, 0.0, 0, 0
        outputs, prompts = rng.geometric(1 / 300, requests), rng.lognormal(6.5, 1.2, requests).round()
        accepts = rng.normal(load.accepted, load.spread, requests).clip(0, 0.97)
        sampled = rng.random(requests) < 0.5
        self.trace = np.stack([outputs, np.zeros(requests), prompts.clip(1, 60000), accepts, sampled])
        self.arrivals = rng.exponential(1 / load.rate, requests).cumsum() if load.rate else np.zeros(requests)
        if load.burst:
            self.arrivals += self.arrivals // load.burst * load.burst
        self.next, self.state = 0, self.trace[:, :0]

    def admit(self) -> bool:
        """Add the requests that have arrived; wait for one where none runs. Return False at the end of the trace."""
        if not self.state.size and self.next < len(self.arrivals) and self.arrivals[self.next] > self.time:
            self.time, self.verified = self.arrivals[self.next], 0
        arrived = int(np.searchsorted(self.arrivals, self.time, side="right"))
        new = min(arrived - self.next, self.load.clients - self.state.shape[1])
        self.state = np.concatenate([self.state, self.trace[:, self.next : self.next + new]], axis=1)
        self.next += new
        return self.state.size > 0

    def cumulative(self) -> Floats:
        """Return P(the first k drafts are accepted) of each request, [B, K]; it falls with context and position."""
        rate = self.state[ACCEPTS] - 0.08 * self.state[SAMPLED]
        rate = rate - 0.03 * np.log2(np.maximum(self.state[CONTEXT] / 4096, 1))
        rate = rate * (1 + self.load.drift * np.sin(2 * np.pi * self.time / self.load.period))
        return (rate.clip(0, 0.97)[:, None] * 0.98 ** np.arange(NUM_DRAFTS)).cumprod(axis=1)

    def classes(self) -> list[int]:
        return [request_class(one > 0, int(length)) for one, length in self.state[[SAMPLED, CONTEXT]].T]

    def step(self, drafts: int) -> tuple[float, int, bool, list[tuple[int, int, int]]]:
        """Run a step with `drafts` drafts per request.

        Returns:
            Seconds, verified drafts, whether no prompt was read, and (class, verified, accepted) of each request.
        """
        state, is_decoding, chunk, left = self.state, self.state[PROMPT] == 0, np.zeros(self.state.shape[1]), CHUNK
        for row in np.flatnonzero(~is_decoding):
            chunk[row] = min(state[PROMPT, row], left)
            left -= chunk[row]
        batch, verified = int(is_decoding.sum()), self.verified
        seconds = self.target.step(batch, verified, drafts, state[CONTEXT].sum(), int(chunk.sum()))
        seconds *= self.rng.lognormal(0, 0.02) * (5 if self.rng.random() < 0.002 else 1)
        accepted = (self.rng.random((batch, 1)) < self.cumulative()[is_decoding, :verified]).sum(axis=1)
        kinds = np.array(self.classes())[is_decoding] if verified else []
        outcomes = [(int(kind), verified, int(count)) for kind, count in zip(kinds, accepted, strict=bool(verified))]
        emitted = np.minimum(accepted + 1, state[LEFT, is_decoding])
        state[LEFT, is_decoding] -= emitted
        state[CONTEXT, is_decoding] += emitted
        state[CONTEXT] += chunk
        state[PROMPT] -= chunk
        has_first = ~is_decoding & (state[PROMPT] == 0)
        state[LEFT, has_first] -= 1
        self.tokens += int(emitted.sum() + has_first.sum())
        self.time, self.busy, self.verified = self.time + seconds, self.busy + seconds, drafts
        self.state = state[:, state[LEFT] > 0]
        return seconds, verified, not chunk.any(), outcomes


def best_drafts(engine: Engine) -> int:
    """Return the K of the oracle."""
    sums = np.concatenate([[0.0], engine.cumulative().sum(axis=0).cumsum()])
    batch, context = engine.state.shape[1], engine.state[CONTEXT].sum()
    return max(ARMS, key=lambda k: (batch + sums[k]) / engine.target.step(batch, k, k, context))


def static_drafts(batch: int) -> int:
    """Return the K of the schedule that the plan replaces: rows of a step below 128, or below 192 for two drafts."""
    return 7 if batch * 8 <= 128 else 2 if batch * 3 <= 192 else 0


def simulate(target: Target, load: Load, policy: str, requests: int, seed: int = 0) -> float:
    """Return the tokens per busy second of one policy on a trace of `requests` requests."""
    engine, plan, was_decoding = Engine(target, load, seed, requests), None, False
    if policy == "plan":
        plan = OnlinePlan(ARMS, target.prior(load.clients), np.full((2, NUM_DRAFTS), 0.75))
    while engine.admit():
        batch = engine.state.shape[1]
        if plan:
            drafts = plan.lookup[batch]
        elif policy == "oracle":
            drafts = best_drafts(engine)
        else:
            drafts = static_drafts(batch) if policy == "static" else int(policy)
        seconds, verified, is_decoding, outcomes = engine.step(drafts)
        is_pure, was_decoding = is_decoding and was_decoding, is_decoding
        if plan and plan.finish_step(seconds, batch, verified, drafts, is_pure, outcomes):
            counts = np.bincount(engine.classes(), minlength=CLASSES).astype(float)
            plan.update(counts, batch, target.kv_token * engine.state[CONTEXT].sum() / BANDWIDTH)
    return engine.tokens / engine.busy


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw each policy's tokens per second, relative to the oracle's, for every load."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for axis, kind in zip(axes, ("steady", "drifting"), strict=True):
        chosen = [row for row in rows if row["kind"] == kind]
        for policy in ("0", str(NUM_DRAFTS), "static", "plan"):
            values = sorted(row["of_oracle"][policy] for row in chosen)
            label = {"0": "no drafts", str(NUM_DRAFTS): f"always {NUM_DRAFTS}"}.get(policy, policy)
            axis.plot(np.linspace(0, 1, len(values)), values, marker=".", label=label)
        axis.set(title=f"{kind}: {len(chosen)} loads, sorted", xlabel="share of the loads", ylim=(0.2, 1.05))
    axes[0].set_ylabel("tokens/s, oracle = 1 (simulated)")
    axes[1].legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path, help="a PNG file")
    parser.add_argument("--size", type=float, default=1.0, help="requests of a run, relative to the default")
    args = parser.parse_args()
    check_file(args.json)
    cases = [
        (name, kind, load_name, load)
        for name in TARGETS
        for kind, loads in (("steady", STEADY), ("drifting", DRIFTING))
        for load_name, load in loads.items()
    ]
    rows = []
    for name, kind, load_name, load in (bar := tqdm(cases, unit="load")):
        bar.set_description(f"{name}, {load_name}")
        requests = int(args.size * (800 if load.rate else 40 + 6 * load.clients))
        speeds = {policy: simulate(TARGETS[name], load, policy, requests) for policy in POLICIES}
        relative = {policy: round(speed / speeds["oracle"], 4) for policy, speed in speeds.items()}
        rows.append({"target": name, "kind": kind, "load": load_name, "requests": requests, **asdict(load)})
        rows[-1] |= {"tokens_per_s": round(speeds["plan"], 1), "of_oracle": relative}
        tqdm.write(f"{name:17s} {load_name:32s} " + "  ".join(f"{one} {share:.3f}" for one, share in relative.items()))
    least = {
        kind: min(row["of_oracle"]["plan"] for row in rows if row["kind"] == kind) for kind in ("steady", "drifting")
    }
    least["of no drafts"] = round(min(row["of_oracle"]["plan"] / row["of_oracle"]["0"] for row in rows), 4)
    print("least of the plan:", least)
    if args.json:
        write_json(args.json, {"kind": "plan simulation", **provenance.collect(), "least": least, "rows": rows})
    if args.figure:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
