"""Figure 4 and table 9 of the PTP paper: small models that draft for the demo target, autoregressive and PTP.

Both are Llamas that learn from scratch, as many steps each, from text that the target wrote:

autoregressive   the next token: K drafts take K calls. Rejection sampling accepts the first k drafts of a step with
                 probability E[prod min(1, p / q)] over the target's text, p the drafter's, q the target's.
o-ptp            rows that carry u, after the text: x_1 .. x_K of a step in one call. They are accepted while equal to
                 the tokens that the target selects by the same u.

A step costs its calls and one pass of the target over K + 1 rows; K is the best of 1 .. 16 by the measured times.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.demo import corpus
from benchmarks.paper.frame import Row
from vllm_mtpc import demo
from vllm_mtpc.eval.metrics import StepMetrics, step_starts
from vllm_mtpc.eval.text import Sampling, generate
from vllm_mtpc.heads.ptp.distribution import edges, u_inside
from vllm_mtpc.heads.ptp.embedding import build_embedding
from vllm_mtpc.hf import Target, load_target

SIZES = ((16, 1), (64, 1), (128, 2), (192, 4))  # hidden size, layers: the paper's first three, and one below its fourth
KINDS, SEEDS, STEPS = ("autoregressive", "o-ptp"), (0, 1, 2), 3000
WINDOW, WINDOWS, BATCH = 16, 8, 8  # rows of a window; windows of a text and texts of a step
PROMPT, NEW, TEXTS, HELD_OUT = 32, 128, 4000, 128
LEARNING_RATE, WARM_UP = 2e-3, 100
CACHED, REPEATS = 128, 100  # tokens before a timed pass; passes


class Text(NamedTuple):
    """Text of the target after prompts of PROMPT tokens: [N, L], the u that select a token, and its probability."""

    tokens: Tensor  # int64
    left: Tensor  # float64
    right: Tensor  # float64, probability: right - left

    def draw(self, generator: torch.Generator | None = None) -> Tensor:
        """Return u [N, L] inside the intervals of the tokens."""
        return u_inside(self.left, self.right, torch.rand(self.left.shape, generator=generator, dtype=torch.float64))


@torch.inference_mode()
def write(target: Target, prompts: Tensor, seed: int) -> Text:
    """Continue prompts [N, PROMPT] by NEW + WINDOW tokens."""
    parts, generator = [], torch.Generator().manual_seed(seed)
    for some in prompts.split(256):
        more = {"stops": set(), "batch": len(some)}
        found = generate(target, list(some), NEW + WINDOW, Sampling(), generator, **more)
        bounds = [edges(target.logits(states).log_softmax(-1), token)
                  for states, token in zip(found.hidden, found.tokens[:, 1:], strict=True)]  # fmt: skip
        left, right = (F.pad(torch.stack(some), (1, 0)) for some in zip(*bounds, strict=True))
        parts.append(Text(found.tokens, left, right))
    return Text(*(torch.cat(some) for some in zip(*parts, strict=True)))


class Drafter(nn.Module):
    """A small Llama, and an embedding of u for PTP."""

    def __init__(self, hidden_size: int, layers: int, vocab_size: int) -> None:
        super().__init__()
        heads = max(1, hidden_size // 64)
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=8 * hidden_size // 3,
                num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
                max_position_embeddings=512, attn_implementation="sdpa", bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip
        self.embedding = build_embedding("threshold", hidden_size, 64, None)

    def next_tokens(self, tokens: Tensor) -> Tensor:
        """Return logits [B, L, V] of the tokens after tokens [B, L]."""
        return self.llama(input_ids=tokens, use_cache=False).logits

    def rows(self, tokens: Tensor, starts: Tensor, u: Tensor) -> Tensor:
        """Return logits [B, W, n, V] of rows with u [B, W, n], after the tokens of [B, L] up to starts [W]."""
        (batch, count, length), text = u.shape, tokens.shape[1]
        embeds = [self.llama.get_input_embeddings()(tokens), self.embedding(u.flatten(1))]
        own = starts[:, None] + 1 + torch.arange(length)  # [W, n], positions of the rows
        at = torch.cat([torch.arange(text), own.flatten()])
        states = self.llama.model(
            inputs_embeds=torch.cat(embeds, 1),
            position_ids=at[None],
            attention_mask=visible(text, starts, length)[None, None].expand(batch, -1, -1, -1),
            use_cache=False,
        ).last_hidden_state
        return self.llama.lm_head(states[:, text:]).unflatten(1, (count, length))


def visible(text: int, starts: Tensor, length: int) -> Tensor:
    """Return which of L tokens and W n rows each of them reads, bool: tokens up to itself; rows the tokens up to their
    start, and the rows of their window up to themselves."""
    seen = torch.zeros(text + len(starts) * length, text + len(starts) * length, dtype=torch.bool)
    seen[:text, :text] = torch.ones(text, text).tril().bool()
    seen[text:, :text] = (torch.arange(text) <= starts[:, None]).repeat_interleave(length, 0)
    seen[text:, text:] = torch.block_diag(*[torch.ones(length, length).tril()] * len(starts)).bool()
    return seen


def trained(kind: str, size: tuple[int, int], seed: int, text: Text, vocab_size: int, steps: int) -> Drafter:
    """Return a drafter after its steps."""
    torch.manual_seed(seed)
    model = Drafter(*size, vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        which = torch.randint(len(text.tokens), (BATCH,), generator=generator)
        part = Text(*(value[which] for value in text))
        if kind == "o-ptp":
            starts = PROMPT - 1 + torch.randint(NEW, (WINDOWS,), generator=generator)
            wanted, u = (windows(value, starts) for value in (part.tokens, part.draw(generator)))
            logits = model.rows(part.tokens, starts, u)
        else:
            logits = model.next_tokens(part.tokens[:, :-1])[:, PROMPT - 1 :]
            wanted = part.tokens[:, PROMPT:]
        for group in optimizer.param_groups:
            rise = min(1.0, (step + 1) / WARM_UP)
            group["lr"] = LEARNING_RATE * rise * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, -2), wanted.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def windows(values: Tensor, starts: Tensor) -> Tensor:
    """Return the WINDOW values after each start: [B, W, n] of [B, L]."""
    return values[:, starts[:, None] + 1 + torch.arange(WINDOW)]


@torch.inference_mode()
def alive(kind: str, model: Drafter, text: Text) -> Tensor:
    """Return P(the first k drafts of a step at t are accepted) [N, NEW, n] for every start in the text."""
    starts = PROMPT - 1 + torch.arange(NEW)
    if kind == "o-ptp":
        u, wanted, found = (
            windows(text.draw(torch.Generator().manual_seed(0)), starts),
            windows(text.tokens, starts),
            [],
        )
        for tokens, some in zip(text.tokens.split(4), u.split(4), strict=True):
            found.append(torch.cat([model.rows(tokens, *part).argmax(-1)
                                    for part in zip(starts.split(32), some.split(32, 1), strict=True)], 1))  # fmt: skip
        right = (torch.cat(found) == wanted).double()
    else:
        p = model.next_tokens(text.tokens[:, :-1]).softmax(-1).gather(-1, text.tokens[:, 1:, None])[..., 0]
        kept = F.pad(p.double() / (text.right - text.left)[:, 1:], (1, 0)).clamp(max=1.0)  # min(1, p / q) of each token
        right = windows(kept, starts)
    return right.cumprod(-1)


def accepted(chances: Tensor) -> list[tuple[float, float]]:
    """Return tokens/step and its standard error with 1 .. n drafts per step."""
    found = []
    for count in range(1, WINDOW + 1):
        some = chances[..., :count]
        one = StepMetrics.of(step_starts(some, torch.ones(some.shape[:2], dtype=torch.bool)), some)
        found.append((one.tokens_per_step, one.standard_error))
    return found


def _case(kind: str, size: tuple[int, int], seed: int, file: Path, steps: int) -> list[tuple[float, float]]:
    torch.set_num_threads(1)
    kept = torch.load(file)
    model = trained(kind, size, seed, Text(*kept["train"]), kept["vocab_size"], steps)
    found = accepted(alive(kind, model, Text(*kept["held out"])))
    print(f"{kind} {size}, seed {seed}: {found[-1][0]:.3f} tokens/step", flush=True)
    return found


@torch.inference_mode()
def milliseconds(model: PreTrainedModel, rows: int, repeats: int) -> float:
    """Return the median time of a pass over rows after CACHED tokens, on one core."""
    cache, tokens, taken = DynamicCache(config=model.config), torch.zeros(1, CACHED, dtype=torch.long), []
    model(tokens, past_key_values=cache)
    for _ in range(repeats):
        begun = time.perf_counter()
        model(tokens[:, :rows], past_key_values=cache)
        taken.append(1000 * (time.perf_counter() - begun))
        cache.crop(-rows)
    return median(taken)


def rows(quick: bool) -> Iterator[Row]:
    """A row for each size and kind."""
    target = load_target(demo.path("target"), torch.float32)
    sizes, seeds, steps, repeats = (SIZES[:1], SEEDS[:2], 3, 2) if quick else (SIZES, SEEDS, STEPS, REPEATS)
    text, generator = corpus.load(), torch.Generator().manual_seed(0)
    counts = (16, 4) if quick else (TEXTS, HELD_OUT)
    parts = [corpus.crops(part, count, PROMPT, generator)
             for part, count in zip((text.train, text.valid), counts, strict=True)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        file = Path(folder) / "text.pt"
        train, held_out = (tuple(write(target, some, seed)) for seed, some in enumerate(parts))
        torch.save({"train": train, "held out": held_out, "vocab_size": target.vocab_size}, file)
        found = {(size, kind): [pool.submit(_case, kind, size, seed, file, steps) for seed in seeds]
                 for size in reversed(sizes) for kind in KINDS}  # fmt: skip
        curves = {name: [one.result() for one in cases] for name, cases in found.items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    verify = [milliseconds(target.model, rows, repeats) for rows in range(1, WINDOW + 2)]  # of 0 .. n drafts
    for size in sizes:
        drafter = Drafter(*size, target.vocab_size).eval()
        one, several = (milliseconds(drafter.llama, rows, repeats) for rows in (1, 2 * WINDOW))
        for kind in KINDS:
            # A call of PTP reads the tokens that were accepted last and its own rows.
            costs = [several if kind == "o-ptp" else count * one for count in range(1, WINDOW + 1)]
            yield _row(size, kind, drafter, curves[size, kind], costs, verify)
    torch.set_num_threads(threads)


def _row(
    size: tuple[int, int], kind: str, drafter: Drafter, seeds: Sequence[Any], costs: list[float], verify: list[float]
) -> dict[str, Any]:
    """Return the row of a size and kind with the number of drafts whose speedup is largest."""
    best: dict[str, Any] = {"speedup": 0.0}
    for count in range(1, WINDOW + 1):
        values = [curve[count - 1][0] for curve in seeds]
        mean, of_texts = fmean(values), fmean(curve[count - 1][1] for curve in seeds)
        error = math.hypot(of_texts, stdev(values) / math.sqrt(len(values)))
        speedup = mean * verify[0] / (verify[count] + costs[count - 1])
        if speedup > best["speedup"]:
            best = {"drafts": count, "tokens_per_step": mean, "standard_error": error, "draft_ms": costs[count - 1]}
            best |= {"speedup": speedup, "speedup_error": speedup * error / mean}
    parameters = sum(value.numel() for value in drafter.llama.parameters())
    about = {"hidden_size": size[0], "layers": size[1], "heads": drafter.llama.config.num_attention_heads}
    every = fmean(curve[-1][0] for curve in seeds)
    return {"parameters": parameters, **about, "kind": kind, **best, "with_all": every, "seeds": len(seeds)}


def draw(rows: Sequence[Row], file: Path) -> None:
    """Speedup, and tokens/step, over the drafter's parameters."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    for panel, key, error, label in zip(
        figure.subplots(1, 2), ("speedup", "tokens_per_step"), ("speedup_error", "standard_error"),
        ("times plain decoding", "tokens/step"), strict=True,
    ):  # fmt: skip
        for kind, marker in zip(KINDS, "so", strict=True):
            mine = [row for row in rows if row["kind"] == kind]
            across, up, errors = ([row[name] for row in mine] for name in ("parameters", key, error))
            panel.errorbar(across, up, errors, marker=marker, capsize=3, label=kind)
        panel.set(xscale="log", xlabel="parameters of the drafter", ylabel=label)
        panel.grid(alpha=0.3)
    panel.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "vllm_mtpc"}):  # the same file for the same rows
        figure.savefig(file, metadata={"Date": None})
