"""provenance.json of a head, and the model card made from it. Absolute paths are left out of both."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCard

from vllm_mtpc.checkpoint.locate import HUB_NAME
from vllm_mtpc.checkpoint.metadata import PLOTS, card_data, eval_results, target_license, weights_of
from vllm_mtpc.engine.provenance import commit, hardware, public
from vllm_mtpc.report import markdown
from vllm_mtpc.train.options import TrainOptions

TEMPLATE = Path(__file__).with_name("card.jinja")
ROWS = {
    "mtpc": {
        "anywhere": "Tokens of a step started anywhere",
        "target_bits": "Bits per token of that text, target",
        "joint_bits": "Bits per token, the head's joint",
    },
    "ptp": {
        "shuffled_tokens_per_step": "Tokens/step with the u of other windows",
        "accuracy": "Drafts that are right",
        "shuffled_accuracy": "With the u of other windows",
    },
}  # labels of results, by method and key


def provenance(
    options: TrainOptions, head: Mapping[str, Any], verifier: str, results: Mapping[str, Any], run: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of provenance.json without the package versions, which saving a head adds.

    `head`: facts; `verifier`: the target's name in it; `results`: {"t1": ..., "t0": ...} as `vllm-mtpc eval` measures
    them, empty if nothing was measured; `run`: `steps` (0: untrained) and facts of a trained head.
    """
    run = dict(run)
    on_hub = [name for name in (verifier, options.target) if HUB_NAME.fullmatch(name) and not os.path.exists(name)]
    settings = {key: public(value) for key, value in options.model_dump(mode="json").items()}
    data = {name.removeprefix("data_"): run.pop(name) for name in ("tokens", "documents", "data_sha256") if name in run}
    file = Path(sys.argv[0])  # of `vllm-mtpc`, `python -m vllm_mtpc` or a script
    words = [*(["python", "-m", file.parent.name] if file.name == "__main__.py" else [file.name]), *sys.argv[1:]]
    return {
        "command": shlex.join(map(public, words)),
        "commit": commit(),
        "hardware": hardware(),
        "seed": options.seed,
        "data": {"names": settings["data"], **data},
        "head": {
            **head,
            "target": public(verifier),
            "base_model": next(iter(on_hub), None),
            "license": target_license(options.target),
            "weights": weights_of(options.target),
        },
        "settings": settings,
        "run": run,
        "figures": dict(results),
        "plots": [name for name in PLOTS if run["steps"] and (options.out / name).is_file()],
    }


def head_card(record: Mapping[str, Any], method: Literal["mtpc", "ptp"] = "mtpc") -> str:
    """Return the README.md of a head of a method, from its provenance."""
    head, results, settings, hosts = (record[key] for key in ("head", "figures", "settings", "hardware"))
    title = f"MtPC head: {head['circuit']}, n={head['window']}, r={head['num_components']}" if method == "mtpc" else (
        f"PTP head: {head['variant']}, n={head['window']}, LoRA rank {head['lora_rank']}"
    )  # fmt: skip
    tags = ["mtpc", *["ptp"] * (method == "ptp"), "speculative-decoding"]
    columns = {"t1": f"T={head.get('temperature', 1):g}", "t0": "T=0"}
    folder = Path(settings["out"]).name or "HEAD"
    measured = {columns[key]: values["tokens_per_step"] for key, values in results.items()}
    scores = eval_results(measured, settings["validation_data"] or record["data"]["names"])
    draft = shlex.quote(f'{{"method": "{method}", "model": "{folder}"}}')
    card = ModelCard.from_template(
        card_data(tags, head["base_model"], head.get("license"), scores, title),
        template_path=str(TEMPLATE),
        title=title,
        method=method,
        folder=shlex.quote(folder),
        table=_table(results, columns, ROWS[method]),
        shown_plots={name: PLOTS[name] for name in record["plots"]},
        serve=f"vllm serve {head['base_model'] or 'TARGET'} --speculative-config {draft}",
        machine=", ".join(dict.fromkeys(hosts["gpus"])) or f"{hosts['cores']} cores of {hosts['cpu']}",
        **{key: record[key] for key in ("head", "run", "data", "settings", "command")},
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).rstrip() + "\n"


def _table(results: Mapping[str, Mapping[str, Any]], columns: dict[str, str], rows: dict[str, str]) -> str:
    if not results:
        return ""
    found = list(results.values())
    accepted = zip_longest(*(values["per_position"] for values in found))
    numbers: dict[str, Sequence[float | None]] = {f"Accepted up to {k}": row for k, row in enumerate(accepted, 1)}
    for key, label in rows.items():  # every greedy row has u = 0.5: shuffling does nothing
        skipped = "t0" if key.startswith("shuffled") else None
        numbers[label] = [None if name == skipped else figures.get(key) for name, figures in results.items()]
    steps = (f"**{figures['tokens_per_step']:.3f}** (s.e. {figures['standard_error']:.3f})" for figures in found)
    lines = [["Tokens/step", *steps]]
    for label, values in numbers.items():
        if any(value is not None for value in values):
            lines.append([label, *("" if value is None else f"{value:.3f}" for value in values)])
    lines.append(["Sequences / contexts", *(f"{figures['sequences']} / {figures['contexts']}" for figures in found)])
    return markdown(["", *(columns[key] for key in results)], lines)
