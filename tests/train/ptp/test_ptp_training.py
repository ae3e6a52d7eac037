"""Training of PTP heads: u inside intervals, masks and losses; files and errors of `vllm-mtpc train --head ptp`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.paper import overfit, toy
from tests.support.training import PTP, PTP_CASES, make_trainer, options_for, record_of, refused, train
from vllm_mtpc.checkpoint.ptp_head import load_ptp
from vllm_mtpc.eval.ptp_evaluator import collect
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.heads.ptp.distribution import conditional, edges
from vllm_mtpc.hf import Target
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.ptp.ptp_module import PtpModule, distribution_of, drafts, draw_numbers, row_losses
from vllm_mtpc.train.windows import Windows, WindowSource, window_states

torch.set_num_threads(1)


def first(options: TrainOptions, target: Target) -> tuple[PtpModule, Windows]:
    trainer = make_trainer(options, target)
    return trainer.model, next(trainer.windows.batches())


def test_two_processes_share_a_ptp_step(tiny_target: Target, tmp_path: Path) -> None:
    trainer = make_trainer(options_for(tiny_target, tmp_path, **PTP), tiny_target)
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
    options = options_for(tiny_target, tmp_path, **PTP | {"top_k": 6, "windows_per_step": 80})
    drafter, batch = first(options, tiny_target)
    text = drafter._text(batch)
    states = window_states(batch.hidden.prefix.hidden, batch.row, batch.start, 4)
    log_q = distribution_of(drafter.head, states, drafter.options)
    picked = pick(log_q.flatten(0, 1), text.u.flatten()).view(-1, 4)
    assert torch.equal(picked[text.usable], text.tokens[text.usable])
    masked = (text.tokens >= 0) & ~text.usable
    assert text.usable.sum() > 20 and masked.sum() > 20  # random text: many tokens are outside the six likeliest


def test_rows_without_a_token_carry_no_loss(tiny_target: Target, tmp_path: Path) -> None:
    for case in ("ce", "kl"):
        drafter, batch = first(options_for(tiny_target, tmp_path, **PTP_CASES[case]), tiny_target)
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
    informed = 0.1 * p.double() + 0.9 * conditional(logits, u, 0.7)
    informed = informed.gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(
        row_losses("ce", logits, tokens, None, u, 0.7).double(), -informed.log(), rtol=1e-4, atol=0
    )
    hot = torch.nn.functional.one_hot(tokens, 6).float()
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(logits, hot, reduction="none").sum(-1)
    torch.testing.assert_close(row_losses("bce", logits, tokens, None), wanted)
    kl = torch.where(q > 0, q * (log_q - p.log()), 0).sum(-1)
    torch.testing.assert_close(row_losses("kl", logits, tokens, log_q), kl)
    floored = (p * (p.log() - q.clamp(min=1e-6).log())).sum(-1)
    torch.testing.assert_close(row_losses("reverse-kl", logits, tokens, log_q), floored)


def test_inverse_u_lies_inside_the_students_own_intervals(tiny_target: Target, tmp_path: Path) -> None:
    drafter, batch = first(options_for(tiny_target, tmp_path, **PTP_CASES["inverse"]), tiny_target)
    with torch.no_grad():
        for value in drafter.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(6)))
        text = drafter._text(batch)
    first_distribution = distribution_of(
        drafter.head, batch.hidden.prefix.hidden[batch.row, batch.start], drafter.options
    )
    made = drafts(drafter.head, batch.hidden, batch.row, batch.start, text.u, first_distribution)
    assert text.usable[:, 1:].any() and torch.equal(made[text.usable], text.tokens[text.usable])


def test_student_text_is_what_the_target_selects(tiny_target: Target, tmp_path: Path) -> None:
    """u selects the tokens after the student's own drafts; rows are trained up to the first wrong draft."""
    trainer = make_trainer(options_for(tiny_target, tmp_path, **PTP_CASES["own"]), tiny_target)
    windows, drafter = trainer.windows, trainer.model
    batch = next(windows.batches())
    found, place = batch.hidden.prefix, (batch.row, batch.start)
    with torch.no_grad():
        text = drafter._text(batch)
        log_q = distribution_of(drafter.head, found.hidden[place], drafter.options)
        made = drafts(drafter.head, batch.hidden, *place, text.u, log_q)
    assert torch.equal(text.u, batch.draws[:, 1])
    inside = (batch.tokens >= 0).cumprod(1).bool()
    wrong = (made != text.tokens)[:, :-1].cumsum(1) > 0
    assert torch.equal(text.usable[:, 1:], inside[:, 1:] & ~wrong) and torch.equal(text.usable[:, 0], inside[:, 0])
    assert text.usable[:, 1:].any() and wrong.any()
    for window in range(6):
        row, start = int(batch.row[window]), int(batch.start[window])
        same = found.documents[row] == found.documents[row, start]
        tokens = windows.source.rows.tokens[windows._held[0][row]].long()[same & (torch.arange(len(same)) <= start)]
        whole = torch.cat([tokens, made[window, :-1]])[None]
        distribution = distribution_of(drafter.head, tiny_target.hidden(whole)[0, len(tokens) - 1 :], drafter.options)
        left, right = edges(distribution, text.tokens[window])
        u = text.u[window].double()
        assert ((left - 1e-5 <= u) & (u < right + 1e-5)).all()


def test_draws_are_beta_and_uniform() -> None:
    draws = draw_numbers(6, 0.3, 7, 20000)
    assert draws.shape == (20000, 2, 6) and draws.dtype == torch.float32
    assert draws.min() >= 0 and draws.max() < 1
    assert torch.equal(draws, draw_numbers(6, 0.3, 7, 20000)) and not torch.equal(draws, draw_numbers(6, 0.3, 8, 20000))
    variance = draws.double().var((0, 2))
    torch.testing.assert_close(variance, torch.tensor([1 / (4 * 1.6), 1 / 12]).double(), rtol=0.02, atol=0)


# --- the paper's claim at the size of a test: rows that receive u draft what no rows without it can

# In the language `coin` (benchmarks/paper/toy.py) a coin decides all tokens of a text. A student with u reads the coin
# and drafts the whole text; one without u guesses it, and needs two steps instead of one: UNAWARE, an eighth of the
# texts apart. Trained by the package's own trainer on the teacher's own text, measured on other texts of it.
WINDOW = toy.PHRASE


@pytest.fixture(scope="module")
def coin() -> toy.Toy:
    return toy.make("coin", WINDOW)


@pytest.mark.parametrize("variant", ["o-ptp", pytest.param("independent", marks=pytest.mark.slow)])
def test_rows_with_u_alone_draft_what_a_coin_decides(coin: toy.Toy, variant: str) -> None:
    """With u the ceiling is the window: the student picks as the teacher does. Without u it is UNAWARE."""
    found = toy.measure(coin, toy.train(coin, WINDOW, 450, variant=variant))
    if variant == "o-ptp":
        assert found.tokens_per_step > 0.9 * WINDOW
        # With another text's coin a step is wasted on another phrase, as often as a guess is wrong.
        assert found.shuffled_tokens_per_step < 1.1 * toy.UNAWARE
    else:  # 160 texts hold about 20 lucky coins; four standard deviations of them are 0.5 tokens/step
        assert found.tokens_per_step < toy.UNAWARE + 0.5 < 0.6 * WINDOW
        assert found.shuffled_tokens_per_step == found.tokens_per_step


def test_rows_that_read_u_overfit_texts_that_u_alone_tells_apart() -> None:
    """Gate of the method: 64 texts after one prompt are drafted right, with u in the middle of their intervals.

    With the u of other texts, the injected fault, they are not.
    """
    texts = overfit.texts_of(64, window=4)
    student = overfit.train(texts, 600, 4, variant="o-ptp", lora_rank=64, lora_alpha=64, u_beta=8.0)
    samples, u = texts.held_out, torch.full(texts.held_out.tokens.shape, 0.5)
    logits, following = student.logits(samples.hidden), samples.tokens[:, 1:].clamp(min=0)
    u[:, 1:] = torch.stack(edges(logits[:, : following.shape[1]].log_softmax(-1), following)).mean(0)
    found = collect(student, samples, Sampling(), u=u)
    assert found.right[:, 0].double().mean() >= 0.99
    assert found.shuffled[:, 0].double().mean() < 0.5


@pytest.mark.slow
def test_student_text_teaches_u(coin: toy.Toy) -> None:
    """A student that learns its own drafts, whatever u is, stays at 1.0 tokens/step."""
    found = toy.measure(coin, toy.train(coin, WINDOW, 300, variant="o-ptp", proposals="student"))
    assert found.tokens_per_step > 2


# --- the command

FILES = {"head": "ptp", "lora_rank": 3}


def test_ptp_run_writes_head_with_results(place: Path, capsys: pytest.CaptureFixture) -> None:
    out = train(place, "ptp", draws=True, **FILES, temperature=0.9, top_k=40)
    config, record, printed = load_ptp(out).config, record_of(out), capsys.readouterr().out
    assert (config.variant, config.window, config.lora_rank) == ("o-ptp", 4, 3)
    assert (config.trained_temperature, config.trained_top_k, config.trained_top_p) == (0.9, 40, 1.0)
    assert config.speculators_config.verifier.name_or_path == "../target"
    assert printed.splitlines()[-1] == f"serve it: vllm serve {out}"
    t1, t0 = (record["figures"][name] for name in ("t1", "t0"))
    assert config.accepted == pytest.approx(t1["histogram"]) and len(config.accepted) == 4
    for name, figure in (("0.9", t1), ("0", t0)):
        assert f"tokens/step at T={name}: {figure['tokens_per_step']:.3f}" in printed
    assert f"with the u of other windows: {t1['shuffled_accuracy']:.1%}" in printed
    assert {"adapter_config.json", "metrics.jsonl", "loss.png", "acceptance.png"} <= {
        path.name for path in out.iterdir()
    }
    card = (out / "README.md").read_text()
    assert "# PTP head: o-ptp, n=4, LoRA rank 3" in card and "temperature 0.9, top-k 40" in card
    assert f"**{t1['tokens_per_step']:.3f}**" in card and str(place) not in card + json.dumps(record)
    state = load_file(out / "state" / "step-4" / "model.safetensors")
    written = load_file(out / "u_embed.safetensors")["outer.weight"]
    assert torch.equal(written, state["head.layers.outer.weight"].half())


def test_ptp_head_starts_from_another(place: Path, capsys: pytest.CaptureFixture) -> None:
    first = train(place, "one", **FILES, evaluation_sequences=0, learning_rate=3e-2)
    one, two = load_ptp(first), load_ptp(train(place, "two", **FILES, init_from=first, dry_run=True))
    assert one.lora.keys() == two.lora.keys() and any(value.any() for value in one.lora.values())
    assert all(torch.equal(one.lora[name], two.lora[name]) for name in one.lora)
    assert two.layers.late is None and two.config.accepted is None
    more = FILES | {"init_from": first, "variant": "late", "late_width": 6, "evaluation_sequences": 0}
    new, late = (load_ptp(train(place, name, **more, dry_run=name == "new")) for name in ("new", "late"))
    assert new.layers.late.state.out_features == 6 and not new.layers.late.outer.weight.any()  # of no effect yet
    assert late.layers.late.outer.weight.any()
    assert all(torch.equal(one.lora[name], new.lora[name]) for name in one.lora)
    for changes, message in (
        ({"init_from": place / "late"}, "has variant=late, this run o-ptp; set variant to late"),
        ({"lora_rank": 5}, "has lora_rank=3, this run 5"),
        ({"variant": "c-ptp"}, "has variant=o-ptp, this run c-ptp; set variant to o-ptp"),
    ):
        assert message in refused(capsys, place, "three", **FILES | {"init_from": first, "dry_run": True} | changes)
