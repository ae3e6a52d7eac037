"""Training of PTP heads: u inside intervals, masks, losses, and the training loop."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import training
from tests.support.training import losses, random_documents
from vllm_mtpc.data.rows import pack
from vllm_mtpc.heads.ptp.distribution import conditional, edges, u_inside
from vllm_mtpc.hf import Target
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.ptp.ptp_drafter import PtpDrafter, distribution_of, drafts, drawing, row_losses
from vllm_mtpc.train.ptp.ptp_trainer import PtpTrainer
from vllm_mtpc.train.trainer import read_metrics
from vllm_mtpc.train.windows import Windows, WindowSource

torch.set_num_threads(1)

# "ieee" reads the low bits of u, which are rounding noise where a forward pass of another batch size decides u.
LATE = {"variant": "late", "late_width": 6, "u_embedding": "threshold"}
CASES = {
    "ce": {},
    "bce": {"ptp_loss": "bce", "u_embedding": "arithmetic"},
    "kl": {"variant": "c-ptp", "u_embedding": "threshold-mlp", "u_hidden": 8},
    "reverse-kl": {"variant": "c-ptp", "ptp_loss": "reverse-kl", "top_k": 6},
    "inverse": {"variant": "c-ptp", "ptp_loss": "inverse", "u_embedding": "threshold"},
    "baseline": {"variant": "independent"},
    "late": LATE,
    "trust": LATE | {"distribution_trust": 0.8, "ptp_loss": "ce"},
    "own": {"proposals": "student", "temperature": 0.8, "u_embedding": "threshold"},
    "own c-ptp": {"proposals": "student", "variant": "c-ptp"},
    "dataset": {"proposals": "dataset", "top_p": 0.9},
    "bf16": {"precision": "bf16"},
}


def options_for(target: Target, out: Path, **changes: object) -> TrainOptions:
    values = {"head": "ptp", "lora_rank": 4, "max_steps": 8, "windows_per_step": 32}
    return training.options_for(target, out, **values | changes)


def make_trainer(options: TrainOptions, target: Target, count: int = 10) -> PtpTrainer:
    return training.make_trainer(options, target, random_documents(count))


def first(options: TrainOptions, target: Target) -> tuple[PtpDrafter, Windows]:
    trainer = make_trainer(options, target)
    return trainer.model, next(trainer.windows.batches())


@pytest.mark.parametrize("case", CASES)
def test_ptp_training_learns_and_repeats(tiny_target: Target, tmp_path: Path, case: str) -> None:
    found = []
    for name in ("a", "b"):
        trainer = make_trainer(options_for(tiny_target, tmp_path / name, max_steps=25, **CASES[case]), tiny_target, 3)
        trainer.train()
        found.append(trainer.weights())
    loss = losses(tmp_path / "a")
    # Its own continuations change as it learns: their loss need not fall from one step to the next.
    assert np.mean(loss[-5:]) < np.mean(loss[:3]) - (0.0 if "own" in case else 0.02)
    assert loss == losses(tmp_path / "b")
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all(1 <= line["tokens_per_step"] <= 4 for line in read_metrics(tmp_path / "a" / "metrics.jsonl"))


def end_after(trainer: PtpTrainer, steps: int) -> PtpTrainer:
    """Make the trainer save its state and end after `steps` steps, as a signal does."""
    update = trainer.train_step

    def train_step(*args, **kwargs):
        trainer.stopping._received = signal.SIGTERM if trainer.step + 1 == steps else 0
        return update(*args, **kwargs)

    trainer.train_step = train_step
    return trainer


@pytest.mark.parametrize("case", ["ce", "own c-ptp"])
def test_ptp_run_resumes_bit_for_bit(tiny_target: Target, tmp_path: Path, case: str) -> None:
    for name, resume, steps in (("whole", False, 8), ("parts", False, 4), ("parts", True, 8)):
        trainer = make_trainer(options_for(tiny_target, tmp_path / name, **CASES[case], resume=resume), tiny_target)
        end_after(trainer, steps).train()
        assert len(losses(tmp_path / name)) == steps
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize("case", ["ce", "kl", "inverse", "own", "trust"])
def test_chunks_of_a_ptp_step_give_the_same_gradients(tiny_target: Target, tmp_path: Path, case: str) -> None:
    gradients = []
    for changes in ({}, {"chunk_windows": 7}):
        drafter, batch = first(options_for(tiny_target, tmp_path, **CASES[case], **changes), tiny_target)
        with torch.no_grad():
            for value in drafter.parameters():
                value.add_(0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(5)))
        drafter(batch)[0].backward()
        gradients.append([value.grad for value in drafter.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_two_processes_share_a_ptp_step(tiny_target: Target, tmp_path: Path) -> None:
    options = options_for(tiny_target, tmp_path)
    trainer = make_trainer(options, tiny_target)
    windows = trainer.windows
    whole = next(windows.batches())
    sizes = windows.window, windows.windows_per_step, windows.block_rows, windows.seed
    halves = [next(WindowSource(windows.source, *sizes, rank, 2, windows.draw).batches()) for rank in range(2)]
    assert sum(len(half.row) for half in halves) == len(whole.row) and min(len(half.row) for half in halves) > 0
    together = torch.cat([half.draws for half in halves])
    assert torch.equal(together.flatten(1).sort(0).values, whole.draws.flatten(1).sort(0).values)
    total = sum(trainer.model(half)[0] for half in halves)
    torch.testing.assert_close(total, trainer.model(whole)[0])
    empty = whole._replace(row=whole.row[:0], start=whole.start[:0], tokens=whole.tokens[:0], draws=whole.draws[:0])
    loss, watched = trainer.model(empty, watch=True)
    loss.backward()
    assert loss == 0 and watched.tolist() == [0, 0]
    assert all(value.grad is not None and not value.grad.any() for value in trainer.student.parameters())


def test_u_of_a_window_selects_its_text(tiny_target: Target, tmp_path: Path) -> None:
    drafter, batch = first(options_for(tiny_target, tmp_path, top_k=6, windows_per_step=80), tiny_target)
    text = drafter._text(batch)
    states = batch.hidden.prefix.hidden[:, :-1]
    distributions = distribution_of(drafter.head, states, drafter.options)
    checked = masked = 0
    for window in range(len(batch.row)):
        row, start = int(batch.row[window]), int(batch.start[window])
        for k in range(4):
            if not text.usable[window, k]:
                masked += int(text.tokens[window, k] >= 0)
                continue
            distribution, token = distributions[row, start + k], text.tokens[window, k]
            assert pick(distribution[None], text.u[window, k][None]) == token
            assert torch.isfinite(distribution[token])
            checked += 1
    assert checked > 20 and masked > 20  # random text: many tokens are outside the six likeliest


def test_rows_without_a_token_carry_no_loss(tiny_target: Target, tmp_path: Path) -> None:
    for case in ("ce", "kl"):
        drafter, batch = first(options_for(tiny_target, tmp_path, **CASES[case]), tiny_target)
        short_tokens = torch.cat([batch.tokens[:, :2], torch.full_like(batch.tokens[:, 2:], -1)], 1)
        loss = drafter(batch._replace(tokens=short_tokens))[0]
        assert loss > 0
        full = drafter.head.aux

        def short(prefix, row, start, u, full=full, length=2 if case == "ce" else 1):
            states = full(prefix, row, start, u)
            return torch.cat([states[:, :length], torch.zeros_like(states[:, length:])], 1)

        drafter.head.aux = short
        torch.testing.assert_close(drafter(batch._replace(tokens=short_tokens))[0], loss)
        drafter.head.aux = lambda *args: full(*args) * 0.5  # noqa: B023
        assert drafter(batch._replace(tokens=short_tokens))[0] != loss


def test_ptp_losses_match_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, distribution = torch.randn(3, 4, 6, generator=generator), torch.randn(3, 4, 6, generator=generator)
    distribution[..., 0] = -torch.inf
    log_q, tokens = distribution.log_softmax(-1), torch.randint(1, 6, (3, 4), generator=generator)
    p, q = logits.softmax(-1), log_q.exp()
    chosen = p.gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(row_losses("ce", logits, tokens, None), -chosen.log())
    torch.testing.assert_close(row_losses("inverse", logits, tokens, None), -chosen.log())
    u = torch.rand(3, 4, generator=generator)
    given = 0.1 * p.double() + 0.9 * conditional(logits, u, 0.7)
    given = given.gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(row_losses("ce", logits, tokens, None, u, 0.7).double(), -given.log(), rtol=1e-4, atol=0)
    hot = torch.nn.functional.one_hot(tokens, 6).float()
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(logits, hot, reduction="none").sum(-1)
    torch.testing.assert_close(row_losses("bce", logits, tokens, None), wanted)
    kl = torch.where(q > 0, q * (log_q - p.log()), 0).sum(-1)
    torch.testing.assert_close(row_losses("kl", logits, tokens, log_q), kl)
    floored = (p * (p.log() - q.clamp(min=1e-6).log())).sum(-1)
    torch.testing.assert_close(row_losses("reverse-kl", logits, tokens, log_q), floored)


def test_inverse_u_lies_inside_the_students_own_intervals(tiny_target: Target, tmp_path: Path) -> None:
    drafter, batch = first(options_for(tiny_target, tmp_path, **CASES["inverse"]), tiny_target)
    with torch.no_grad():
        for value in drafter.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(6)))
        text = drafter._text(batch)
        row, start, prefix = batch.row, batch.start, batch.hidden.prefix
        distributions = drafter.head.logits(drafter.head.aux(prefix, row, start, text.u[:, :-1])).log_softmax(-1)
    assert torch.equal(pick(distributions.flatten(0, 1), text.u[:, 1:].flatten()).view(-1, 3)[text.usable[:, 1:]],
                       text.tokens[:, 1:][text.usable[:, 1:]])  # fmt: skip
    first_distribution = distribution_of(drafter.head, prefix.hidden[row, start], drafter.options)
    made = drafts(drafter.head, batch.hidden, row, start, text.u, first_distribution)
    assert torch.equal(made[text.usable], text.tokens[text.usable])


def test_u_of_student_text_lies_in_target_intervals(tiny_target: Target, tmp_path: Path) -> None:
    """u of the student's continuation lies where the target, reading that continuation, picks it."""
    drafter, batch = first(options_for(tiny_target, tmp_path, **CASES["own"]), tiny_target)
    with torch.no_grad():
        text = drafter._text(batch)
    found = batch.hidden.prefix
    for window in range(6):
        row, start = int(batch.row[window]), int(batch.start[window])
        same = found.documents[row] == found.documents[row, start]
        tokens = tokens_of(drafter, batch, row)[same & (torch.arange(len(same)) <= start)]
        whole = torch.cat([tokens, text.tokens[window, :-1]])[None]
        distribution = distribution_of(drafter.head, tiny_target.hidden(whole)[0, len(tokens) - 1 :], drafter.options)
        left, right = edges(distribution, text.tokens[window])
        u = text.u[window].double()
        assert ((left - 1e-5 <= u) & (u < right + 1e-5)).all()


def tokens_of(drafter: PtpDrafter, batch: Windows, row: int) -> torch.Tensor:
    """The packed row of a block, found by its states."""
    rows, _ = pack(random_documents(10), drafter.options.seq_len, drafter.options.window, drafter.options.seed)
    states = drafter.head.prefix(rows.tokens, rows.document).hidden
    distance = (states - batch.hidden.prefix.hidden[row]).abs().amax((1, 2))
    return rows.tokens[int(distance.argmin())].long()


def test_draws_are_beta_and_uniform() -> None:
    draws = drawing(6, 0.3)(7, 20000)
    assert draws.shape == (20000, 2, 6) and draws.dtype == torch.float32
    assert draws.min() >= 0 and draws.max() < 1
    assert torch.equal(draws, drawing(6, 0.3)(7, 20000)) and not torch.equal(draws, drawing(6, 0.3)(8, 20000))
    variance = draws.double().var((0, 2))
    torch.testing.assert_close(variance, torch.tensor([1 / (4 * 1.6), 1 / 12]).double(), rtol=0.02, atol=0)
    left, right = torch.tensor([0.25]).double(), torch.tensor([0.5]).double()
    assert ((u := u_inside(left, right, draws)) >= 0.25).all() and (u < 0.5).all()
