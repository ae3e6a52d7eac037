"""Figure 5 of the PTP paper: which two tokens each (u_1, u_2) of the unit square gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.paper.frame import Row
from benchmarks.paper.toy import DISTRICTS, Toy
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.kernels.pick import pick

SIDE, PROMPTS = 40, 12


def pairs(made: Toy, students: Mapping[str, Student]) -> list[Row]:
    """The share of incompatible pairs over a grid of u and some prompts, and the first prompt's pairs."""
    axis = (torch.arange(SIDE) + 0.5) / SIDE
    u = torch.cartesian_prod(axis, axis)  # [G, 2]
    rows = []
    for name in ("autoregressive", *students):
        found = [_pairs(made, students.get(name), prompt, u) for prompt in made.prompts[:PROMPTS]]
        spurious = torch.stack([_spurious(some) for some in found]).float().mean().item()
        first = " ".join(map(str, found[0].flatten().tolist()))  # one line of the file
        rows.append({"what": name, "spurious": spurious, "first": first})
    return rows


@torch.inference_mode()
def _pairs(made: Toy, student: Student | None, prompt: Tensor, u: Tensor) -> Tensor:
    """Tokens [G, 2] for u[G, 2] after a prompt: the teacher's, or those that rows of a student predict from their own
    u."""
    if student is None:
        text = prompt[None].expand(len(u), -1)
        for k in range(2):
            token = pick(made.teacher.logits(made.teacher.hidden(text)[:, -1]), u[:, k].contiguous())
            text = torch.cat([text, token[:, None]], 1)
        return text[:, -2:]
    zero = torch.zeros(len(u), dtype=torch.long)
    states = student.aux(student.prefix(prompt[None]), zero, zero + len(prompt) - 1, u)
    logits = student.logits(states)
    if student.config.informed:
        return logits.argmax(-1)
    return pick(logits.flatten(0, 1), u.flatten()).view_as(u)  # without u in the rows it picks from each row alone


def _spurious(tokens: Tensor) -> Tensor:
    """Whether the second ride starts elsewhere than the first one ended."""
    return tokens[:, 0] % DISTRICTS != tokens[:, 1] // DISTRICTS


def draw_pairs(rows: Sequence[Row], file: Path) -> None:
    """A panel for each way to draft; green pairs fit, red ones do not, shades tell pairs apart."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for panel, row in zip(figure.subplots(1, len(rows)), rows, strict=True):
        tokens = torch.tensor([int(word) for word in row["first"].split()]).view(-1, 2)
        wrong = _spurious(tokens).float()
        shade = 0.55 + 0.45 * ((7 * tokens[:, 0] + 3 * tokens[:, 1]) % 11).float() / 10
        color = torch.stack([wrong * shade, (1 - wrong) * shade, 0.25 * shade], -1).view(SIDE, SIDE, 3)
        panel.imshow(color.transpose(0, 1).numpy(), origin="lower", extent=(0, 1, 0, 1), interpolation="nearest")
        panel.set_title(f"{row['what']}: {row['spurious']:.1%} incompatible", fontsize=9)
        panel.set(xlabel="$u_1$", ylabel="$u_2$")
    file.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "vllm_mtpc"}):  # the same file for the same rows
        figure.savefig(file, metadata={"Date": None})
