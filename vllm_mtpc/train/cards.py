"""Model cards and provenance of the demo assets. Every number in them is handed in by the evaluation."""

import subprocess
from pathlib import Path
from typing import Any

from vllm_mtpc.train import corpus
from vllm_mtpc.train.evaluate import Figures

DATA = (
    "source text of the Python standard library as bytes: *.py without tests and site-packages, sorted; "
    "every 20th file held out"
)
DEFINITIONS = """\
## Definitions

- *Tokens/step* includes the target's own token of every step; plain decoding is 1.0, the most is the window.
- *Accepted up to k* is unconditional: the share of steps in which drafts 1 to k are all accepted.
- T=1 samples from the target, T=0 is greedy. Contexts are the target's own continuations of held-out prompts.
- Steps are weighted as in serving: an accepted draft is skipped over, so steps start more often where drafting is hard.
- s.e.: standard error over sequences.
"""


def provenance(text: corpus.Corpus, command: str, seed: int, figures: dict[str, Any], settings: dict[str, Any]) -> dict:
    """What is written to ``provenance.json``, less the package versions."""
    return {
        "command": command,
        "commit": commit(),
        "data": {"description": DATA, "files": text.files, "bytes": text.bytes, "sha256": text.sha256},
        "seed": seed,
        "settings": settings,
        "figures": figures,
    }


def commit() -> str | None:
    """Commit of the checkout this runs from, None where there is none."""
    call = ["git", "rev-parse", "HEAD"]
    try:
        result = subprocess.run(call, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def target_card(record: dict[str, Any]) -> str:
    """README.md of the target."""
    figures, data, settings = record["figures"], record["data"], record["settings"]
    return f"""\
---
tags: [byte-level, demo]
---
# Demo target

A byte-level Llama with {figures["parameters"] / 1e6:.2f}M parameters that writes Python source text. It exists so that
speculative decoding can be tried and tested without a download; it is of no use as a language model. Token ids 0 to 255
are bytes, 256 is `<|endoftext|>`. Weights are stored in float16 and meant to be computed in float32.

| held-out text, windows of | bits per byte |
|---|---|
| {settings["short_window"]} bytes | {figures["bits_per_byte"]:.4f} |
| {settings["long_window"]} bytes | {figures["bits_per_byte_long"]:.4f} |

Each window is read without earlier context; {settings["loss_bytes"]} bytes, measured in float32 on the stored weights.

- Data: {data["description"]}; {data["files"]} files, {data["bytes"]} bytes, SHA-256 `{data["sha256"]}`. The
  Python standard library is under the PSF License.
- Training: {settings["steps"]} steps of {settings["tokens_per_step"]} bytes, the last {settings["long_steps"]} on
  windows of {settings["long_window"]}; bfloat16 matrix products; seed {record["seed"]};
  {figures["minutes"]:.0f} minutes on two CPU cores.
- Command: `{record["command"]}`
"""


def head_card(record: dict[str, Any], circuit: str, window: int, components: int) -> str:
    """README.md of a head."""
    figures, settings, data = record["figures"], record["settings"], record["data"]
    columns = [Figures(**figures["t1"]), Figures(**figures["t0"])]
    rows = [["Tokens/step", *(f"**{f.tokens_per_step:.3f}** (s.e. {f.standard_error:.3f})" for f in columns)]]
    for k in range(window - 1):
        rows.append([f"Accepted up to {k + 1}", *(f"{f.per_position[k]:.3f}" for f in columns)])
    rows.append(["Tokens of a step started anywhere", *(f"{f.anywhere:.3f}" for f in columns)])
    rows.append(["Sequences / contexts", *(f"{f.sequences} / {f.contexts}" for f in columns)])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"""\
---
tags: [mtpc, speculative-decoding, demo]
---
# Demo head: {circuit}

A probabilistic-circuit head (circuit `{circuit}`, window {window}, {components} component{"s" * (components > 1)}) for
the byte-level demo target in `../target` ({figures["target_bits_per_byte"]:.4f} bits per byte on held-out text). It
drafts up to {window - 1} bytes from the target's last hidden state, given the target's own next byte.

| | T=1 | T=0 |
|---|---|---|
{table}

{DEFINITIONS}
## Training

- Data: {settings["sequences_t1"]} continuations at T=1 and {settings["sequences_t0"]} greedy ones of
  {settings["new_tokens"]} bytes, written by the target after {settings["prompt"]} bytes of its own training text, and
  {settings["sequences_corpus"]} crops of that text of the same length ({data["files"]} files, SHA-256
  `{data["sha256"]}`). The end of text does not end a continuation.
- Loss: conditional negative log-likelihood of the window, position k weighted by {settings["gamma"]}^(k-1), in
  expectation under the target's law of each byte.
- {settings["steps"]} steps of {settings["windows_per_step"]} windows, Adam, learning rate {settings["learning_rate"]}
  with cosine decay, seed {record["seed"]}: the same for every circuit of the demo; {figures["minutes"]:.1f} minutes on
  two CPU cores.
- Command: `{record["command"]}`
"""
