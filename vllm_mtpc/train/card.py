"""provenance.json of a head, and the model card made from it. Absolute paths are left out of both."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard

from vllm_mtpc.checkpoint.locate import HUB_NAME
from vllm_mtpc.checkpoint.metadata import PLOTS, card_data, eval_results, measured_on, target_license
from vllm_mtpc.engine.provenance import commit, hardware, public
from vllm_mtpc.report import markdown

if TYPE_CHECKING:
    from vllm_mtpc.train.options import TrainOptions

TEMPLATE = Path(__file__).with_name("card.jinja")
CIRCUIT_DEFINITIONS = """\
- Steps are weighted as in serving: an accepted draft is skipped over, so steps start more often where drafting is hard.
  *Anywhere* weights all positions alike.
- Results are computed on transformers; `vllm-mtpc doctor` compares them with what vLLM serves."""
CIRCUIT_ROWS = {
    "anywhere": "Tokens of a step started anywhere",
    "target_bits": "Bits per token of that text, target",
    "joint_bits": "Bits per token, the head's joint",
}
PTP_DEFINITIONS = """\
- Results are those of one target pass per step, with all drafts of a full chain, computed on transformers. With T=0,
  u = 0.5 on every row.
- *With the u of other windows* checks that drafts follow u: it is clearly lower."""
PTP_ROWS = {
    "baseline_tokens_per_step": "Tokens/step of the independent baseline, trained alike",
    "shuffled_tokens_per_step": "Tokens/step with the u of other windows",
    "accuracy": "Drafts that are right",
    "shuffled_accuracy": "With the u of other windows",
}


def provenance(
    options: TrainOptions, head: Mapping[str, Any], verifier: str, results: Mapping[str, Any], run: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of provenance.json without the package versions, which saving a head adds.

    Args:
        options: Options of the run.
        head: Facts of the head.
        verifier: The target's name in the head.
        results: {"t1": ..., "t0": ...} as `vllm-mtpc eval` measures them; empty if nothing was measured.
        run: `steps` (0: untrained) and, of a trained head, `minutes`, `tokens`, `documents`, `data_sha256`,
            `tokens_per_second`, `peak_memory_bytes`, `processes`; `command` if another process started this one.
    """
    run = dict(run)
    words = shlex.split(run.pop("command")) if "command" in run else command_line()
    settings = {key: public(value) for key, value in options.model_dump(mode="json").items()}
    data = {name.removeprefix("data_"): run.pop(name) for name in ("tokens", "documents", "data_sha256") if name in run}
    return {
        "command": shlex.join(public(word) for word in words),
        "commit": commit(),
        "hardware": hardware(),
        "seed": options.seed,
        "data": {"names": settings["data"], **data},
        "head": {
            **head,
            "target": public(verifier),
            "base_model": next(filter(is_hub_name, (verifier, options.target)), None),
            "license": target_license(options.target),
        },
        "settings": settings,
        "run": run,
        "figures": dict(results),
        "plots": [name for name in PLOTS if run["steps"] and (options.out / name).is_file()],
    }


def is_hub_name(target: str) -> bool:
    """Return whether a target is named by its repository on the hub, and not by a folder."""
    return HUB_NAME.fullmatch(target) is not None and not os.path.exists(target)


def command_line() -> list[str]:
    """Return the words of the running command: `vllm-mtpc`, `python -m vllm_mtpc` or a script, and its arguments."""
    file = Path(sys.argv[0])
    return [*(["python", "-m", file.parent.name] if file.name == "__main__.py" else [file.name]), *sys.argv[1:]]


def circuit_card(record: Mapping[str, Any]) -> str:
    """Return the README.md of a circuit's head, from its provenance."""
    head, settings = record["head"], record["settings"]
    r, is_backbone = head["num_components"], head["head"] == "backbone"
    kind = "" if head["head"] == "linear" else f", head `{head['head']}`"
    start = "the target's final norm and last layers" if is_backbone else "the target's lm_head"
    start += f" ({head['partial_start']})" if head.get("partial_start") else ""
    reads, needs_v2 = "the target's last hidden state", ""
    if head["lora_layers"]:
        needs_v2 = f"It has adapters for the target's last {head['lora_layers']} layers"
    if is_backbone:
        reads, needs_v2 = "several of the target's layers, through draft layers", "It has draft layers"
    about = (
        f"A probabilistic-circuit head (circuit `{head['circuit']}`, window {head['window']}, {r} "
        f"component{'s' * (r > 1)}{kind}) for the target `{head['target']}`. From {reads} and the target's next token "
        f"it drafts up to {head['drafts']} tokens at once; the target verifies them in one pass, so the output is the "
        "target's own."
    )
    return _render(
        record,
        title=f"MtPC head: {head['circuit']}, n={head['window']}, r={r}",
        tags=["mtpc", "speculative-decoding"],
        about=[about],
        columns={"t1": "T=1", "t0": "T=0"},
        rows=CIRCUIT_ROWS,
        definitions=CIRCUIT_DEFINITIONS,
        start=f"the head `{settings['init_from']}`" if settings["init_from"] else start,
        needs_v2=needs_v2,
    )


def ptp_card(record: Mapping[str, Any]) -> str:
    """Return the README.md of a PTP head, from its provenance."""
    head, start = record["head"], record["settings"]["init_from"]
    if greedy := record["figures"].get("t0"):  # every greedy row has u = 0.5: shuffling does nothing
        greedy = {**greedy, "shuffled_accuracy": None, "shuffled_tokens_per_step": None}
        record = {**record, "figures": {**record["figures"], "t0": greedy}}
    sampling = [f"temperature {head['temperature']:g}"]
    sampling += [f"top-k {head['top_k']}"] if head["top_k"] else []
    sampling += [f"top-p {head['top_p']:g}"] if head["top_p"] < 1 else []
    rows = {
        "o-ptp": "Rows carry them and predict the selected token.",
        "c-ptp": "Rows carry them and give the distribution of the next token, from which its own number selects it.",
        "late": f"Not of the paper: rows carry 0.5, a network of width {head['late_width']} drafts token by token, "
        f"and the numbers select drafts from its distributions, trusted to {head['distribution_trust'] or 0:g}.",
        "independent": "Rows carry 0.5 instead: it is a baseline that predicts every token alone.",
    }
    about = (
        f"A head for parallel token prediction (arXiv 2512.21323) with the target `{head['target']}`: adapters of the "
        f"target (rank {head['lora_rank']}) for auxiliary rows, and an embedding (`{head['u_embedding']}`) of the "
        f"random numbers that select the target's tokens. It drafts up to {head['drafts']} tokens at once; the target "
        "verifies them with the same random numbers, so the output is the target's own. Trained for "
        f"{', '.join(sampling)}; with other settings fewer drafts are accepted."
    )
    return _render(
        record,
        title=f"PTP head: {head['variant']}, n={head['window']}, LoRA rank {head['lora_rank']}",
        tags=["mtpc", "ptp", "speculative-decoding"],
        about=[about, rows[head["variant"]]],
        columns={"t1": f"T={head['temperature']:g}", "t0": "T=0"},
        rows=PTP_ROWS,
        definitions=PTP_DEFINITIONS,
        start=f"the head `{start}`" if start else "adapters of zero effect",
        method="ptp",
    )


def _render(
    record: Mapping[str, Any], *, title: str, tags: list[str], columns: dict[str, str], rows: dict[str, str],
    method: str = "mtpc", **texts: Any,
) -> str:  # fmt: skip
    """Fill TEMPLATE; `texts` are its other variables."""
    head, results, run, settings = record["head"], record["figures"], record["run"], record["settings"]
    hosts = record["hardware"]
    folder = Path(settings["out"]).name or "HEAD"
    measured = {columns[key]: values["tokens_per_step"] for key, values in results.items()}
    scores = eval_results(measured, measured_on(record))
    draft = shlex.quote(f'{{"method": "{method}", "model": "{folder}"}}')
    card = ModelCard.from_template(
        card_data(tags, head["base_model"], head.get("license"), scores, title),
        template_path=str(TEMPLATE),
        title=title,
        head=head,
        run=run,
        folder=shlex.quote(folder),
        table=_table(results, columns, rows),
        plots={name: PLOTS[name] for name in record["plots"]},
        serve=f"vllm serve {head['base_model'] or 'TARGET'} --speculative-config {draft}",
        relative=", relative to this folder" if head["target"].startswith(".") else "",
        data=record["data"],
        settings=settings,
        machine=", ".join(dict.fromkeys(hosts["gpus"])) or f"{hosts['cores']} cores of {hosts['cpu']}",
        command=record["command"],
        **texts,
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def _table(results: Mapping[str, Mapping[str, Any]], names: dict[str, str], rows: dict[str, str]) -> str:
    columns = list(results.values())
    totals = [f"**{values['tokens_per_step']:.3f}** (s.e. {values['standard_error']:.3f})" for values in columns]
    lines = [["Tokens/step", *totals]]
    accepted = zip_longest(*(values["per_position"] for values in columns))
    numbers = [(f"Accepted up to {k}", list(values)) for k, values in enumerate(accepted, 1)]
    numbers += [(label, [values.get(key) for values in columns]) for key, label in rows.items()]
    for label, values in numbers:
        if any(value is not None for value in values):
            lines.append([label, *("" if value is None else f"{value:.3f}" for value in values)])
    lines.append(["Sequences / contexts", *(f"{values['sequences']} / {values['contexts']}" for values in columns)])
    return markdown(["", *(names[key] for key in results)], lines) if results else ""
