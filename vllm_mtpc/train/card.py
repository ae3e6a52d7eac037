"""What is written about a head: provenance.json, and the model card made from it. Every number comes from the run.

Absolute paths stay out of both: they say something about a machine and nothing about a head.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.checkpoint.card import front_matter
from vllm_mtpc.engine.provenance import commit, hardware, public

if TYPE_CHECKING:
    from vllm_mtpc.config.mtpc import HeadConfig
    from vllm_mtpc.train.options import TrainOptions

PLOTS = {
    "loss.png": "Loss and expected tokens/step over the run",
    "acceptance.png": "Acceptance and tokens/step per position",
    "frontier.png": "Tokens/step over the latency of a step",
}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DEFINITIONS = """\
- *Tokens/step* includes the target's own token of every step; plain decoding is 1.0, the most is the window.
- *Accepted up to k* is unconditional: the share of steps in which drafts 1 to k are all accepted.
- T=1 samples from the target, T=0 is greedy. Contexts are the target's own continuations of held-out prompts.
- Steps are weighted as in serving: an accepted draft is skipped over, so steps start more often where drafting is hard.
  *Anywhere* weights all positions alike.
- s.e.: standard error over sequences. Figures are computed on transformers; `vllm-mtpc doctor` compares them with what
  vLLM serves.
"""


def record(
    options: TrainOptions, config: HeadConfig, figures: Mapping[str, Any], run: Mapping[str, Any]
) -> dict[str, Any]:
    """Content of provenance.json, less the package versions, which `save_head` adds.

    figures: {"t1": ..., "t0": ...} with the fields of `vllm_mtpc.eval.acceptance.Figures`, empty where nothing was
    measured. run: `steps` done (0: untrained) and, of a trained head, `minutes`, `tokens`, `documents`, `data_sha256`,
    `tokens_per_second`, `peak_memory_bytes`, `processes`; `command` in place of this process's own, for workers that
    another process started. Plots are listed if they lie in the out folder.
    """
    head = {
        "circuit": config.circuit,
        "window": config.window,
        "num_components": config.num_components,
        "head": config.head,
        "drafts": config.num_speculative_tokens,
        "lora_layers": config.lora_layers,
    }
    values = provenance(options, head, config.speculators_config.verifier.name_or_path, figures, run)
    values["settings"]["num_components"] = options.num_components
    return values


def provenance(
    options: TrainOptions,
    head: Mapping[str, Any],
    verifier: str,
    figures: Mapping[str, Any],
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """What any kind of head records: `head` says which it is, the rest is as of `record`."""
    run = dict(run)
    words = shlex.split(run.pop("command")) if "command" in run else [*program(sys.argv[0]), *sys.argv[1:]]
    settings = {key: public(value) for key, value in options.model_dump(mode="json").items()}
    data = {"names": settings["data"]}
    for key, name in (("tokens", "tokens"), ("documents", "documents"), ("data_sha256", "sha256")):
        if key in run:
            data[name] = run.pop(key)
    return {
        "command": shlex.join(public(word) for word in words),
        "commit": commit(),
        "hardware": hardware(),
        "seed": options.seed,
        "data": data,
        "head": {
            **head,
            "target": public(verifier),
            "base_model": next(filter(is_hub_name, (verifier, options.target)), None),
        },
        "settings": settings,
        "run": run,
        "figures": dict(figures),
        "plots": [name for name in PLOTS if run["steps"] and (options.out / name).is_file()],
    }


def is_hub_name(target: str) -> bool:
    """Whether a target is named by its repository on the hub; a folder is not, whatever it is called."""
    return HUB_NAME.fullmatch(target) is not None and not os.path.exists(target)


def program(path: str) -> list[str]:
    """How the program that runs was typed: `vllm-mtpc`, `python -m vllm_mtpc`, or a script's name."""
    file = Path(path)
    return ["python", "-m", file.parent.name] if file.name == "__main__.py" else [file.name]


def head_card(record: Mapping[str, Any]) -> str:
    """README.md of any head, from what `record` returned: Markdown with a YAML front matter."""
    head, figures, run = record["head"], record["figures"], record["run"]
    r = head["num_components"]
    name = Path(record["settings"]["out"]).name or "HEAD"
    kind = "" if head["head"] == "linear" else f", head `{head['head']}`"
    parts = [
        front_matter(["mtpc", "speculative-decoding"], head["base_model"]),
        f"# MtPC head: {head['circuit']}, n={head['window']}, r={r}\n",
        f"A probabilistic-circuit head (circuit `{head['circuit']}`, window {head['window']}, {r} "
        f"component{'s' * (r > 1)}{kind}) for the target `{head['target']}`. From the target's last hidden state, and "
        f"given the target's own next token, it drafts up to {head['drafts']} tokens at once; the target verifies them "
        "in one pass, so the output is the target's own.\n",
    ]
    if not run["steps"]:
        parts.append(
            "**This head is untrained** (written by `--dry-run`, or with no steps): it can be served, the output is "
            "the target's, but drafts come from initial weights and few are accepted. Nothing was measured.\n"
        )
    elif not figures:
        parts.append(f"**Not measured**: type `vllm-mtpc eval {shlex.quote(name)} --data DATA` for its figures.\n")
    else:
        parts += ["## Figures\n", _table(figures), DEFINITIONS]
    parts += [*images(record), "## Serve it\n", _serving(head, name)]
    if run["steps"]:
        parts += [
            "## Training\n",
            training_section(record, loss_sentence(record["settings"]), _start(record["settings"])),
        ]
    else:
        parts += ["## Command\n", code_block(record["command"])]
    return "\n".join(parts)


def images(record: Mapping[str, Any]) -> list[str]:
    """The plots of the run."""
    return [f"![{PLOTS[plot]}]({plot})\n" for plot in record["plots"]]


def _table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    columns = list(figures.values())
    longest = max(len(values["per_position"]) for values in columns)
    rows = [["", *(f"T={key.removeprefix('t')}" for key in figures)], ["---"] * (1 + len(columns))]
    totals = [f"**{values['tokens_per_step']:.3f}** (s.e. {values['standard_error']:.3f})" for values in columns]
    rows.append(["Tokens/step", *totals])
    for k in range(longest):
        rows.append([f"Accepted up to {k + 1}", *(_number(values["per_position"], k) for values in columns)])
    rows.append(["Tokens of a step started anywhere", *(f"{values['anywhere']:.3f}" for values in columns)])
    if any(values.get("target_bits") is not None for values in columns):
        rows.append(["Bits per token of that text, target", *(_optional(values, "target_bits") for values in columns)])
        rows.append(["Bits per token, the head's joint", *(_optional(values, "joint_bits") for values in columns)])
    rows.append(["Sequences / contexts", *(f"{values['sequences']} / {values['contexts']}" for values in columns)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _number(values: Sequence[float], k: int) -> str:
    return f"{values[k]:.3f}" if k < len(values) else ""


def _optional(values: Mapping[str, Any], key: str) -> str:
    return "" if values.get(key) is None else f"{values[key]:.3f}"


def _serving(head: Mapping[str, Any], name: str) -> str:
    options = f'{{"method": "mtpc", "model": "{name}"}}'
    target = head["base_model"] or "TARGET"
    layers = ""
    if head["lora_layers"]:
        layers = (
            f"It comes with adapters for the target's last {head['lora_layers']} layers, which are served on vLLM's "
            "Model Runner V2 alone.\n\n"
        )
    return (
        layers
        + "With `vllm_mtpc` installed beside vLLM:\n\n"
        + code_block(
            f"vllm serve {shlex.quote(name)}\n", f"vllm serve {target} --speculative-config {shlex.quote(options)}"
        )
        + "\nThe first form finds the target by the name in `config.json`"
        + serving_names(head)
    )


def serving_names(head: Mapping[str, Any]) -> str:
    """How the target is found and how much is drafted: the end of the section on serving."""
    return (
        ", relative to this folder" if head["target"].startswith(".") else ""
    ) + f"; it drafts {head['drafts']} tokens per step.\n"


def training_section(record: Mapping[str, Any], loss: str, start: str) -> str:
    """What a head was trained on and how; `loss` is a sentence, `start` says where it began."""
    settings, run, data = record["settings"], record["run"], record["data"]
    processes = run.get("processes", 1)
    lines = [f"- Data: {_data(settings, data)}", f"- Loss: {loss}"]
    lines.append(
        f"- {run['steps']:,} steps of {settings['windows_per_step']:,} windows, AdamW, learning rate "
        f"{settings['learning_rate']:g} ({settings['schedule']}), {settings['precision']}, "
        f"seed {record['seed']}" + (f", {processes} processes" if processes > 1 else "") + f"; start: {start}."
    )
    if "minutes" in run:
        hosts = record["hardware"]
        machine = ", ".join(dict.fromkeys(hosts["gpus"])) or f"{hosts['cores']} cores of {hosts['cpu']}"
        lines.append(
            f"- {run['minutes']:.1f} minutes on {machine}: {run['tokens_per_second']:,.0f} window tokens/s, at most "
            f"{run['peak_memory_bytes'] / 2**30:.2f} GiB of memory in a process."
        )
    lines += ["- Command:\n", code_block(record["command"])]
    return "\n".join(lines) + "\nAll settings are in `provenance.json`.\n"


def _data(settings: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    names = ", ".join(f"`{name}`" for name in data["names"])
    size = f"; {data['tokens']:,} tokens of {data['documents']:,} documents" if "tokens" in data else ""
    sha = f", SHA-256 of the packed rows `{data['sha256']}`" if "sha256" in data else ""
    if settings["regenerate"]:
        share = settings.get("regenerate_greedy_share")  # PTP heads have none
        greedy = "" if share is None else f"{share:.0%} greedy, "
        names = (
            f"{settings['regenerate']:,} responses that the target wrote ({greedy}{settings['regenerate_tokens']} "
            f"tokens at most): {names}"
        )
    return f"{names}{size}{sha}."


def _start(settings: Mapping[str, Any]) -> str:
    if settings["init_from"]:
        return f"the head `{settings['init_from']}`"
    return "the target's lm_head" if settings["init"] == "lm-head" else "random weights"


def loss_sentence(settings: Mapping[str, Any]) -> str:
    """The loss in a sentence, from the options of a run."""
    beta, share = settings["beta"], settings["acceptance"]
    terms = []
    if share < 1 and beta < 1:
        terms.append(f"{_percent((1 - share) * (1 - beta))}conditional negative log-likelihood of the text")
    if share < 1 and beta > 0:
        kl = "KL(target || draft)" if settings["kl"] == "forward" else "KL(draft || target)"
        over = "the vocabulary" if settings["kl_form"] == "full" else "the text's token against the rest"
        terms.append(f"{_percent((1 - share) * beta)}{kl} over {over}")
    if share > 0:
        forms = {
            "length": "expected number of accepted drafts (maximised)",
            "tv": "total variation between target and draft",
            "log": "-log of the overlap of target and draft",
        }
        terms.append(f"{_percent(share)}{forms[settings['acceptance_form']]}")
    is_length = share > 0 and settings["acceptance_form"] == "length"  # its positions weigh alike
    if share == 1 and is_length:
        return f"{terms[0]}."
    which = "position k of the other terms" if is_length else "position k"
    first = "" if settings["train_first"] else ", the first token left out"
    return f"{' + '.join(terms)}; {which} weighted by {settings['gamma']:g}^(k-1){first}."


def _percent(share: float) -> str:
    return "" if share == 1 else f"{100 * share:g} % "


def code_block(*lines: str) -> str:
    return "```bash\n" + "\n".join(line.rstrip("\n") for line in lines) + "\n```\n"
