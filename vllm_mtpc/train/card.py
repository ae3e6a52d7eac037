"""What is written about a head: provenance.json, and the model card made from it. Every number comes from the run.

Absolute paths stay out of both: they say something about a machine and nothing about a head.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mtpc.checkpoint.metadata import PLOTS, card_data, eval_results, front_matter, measured_on, target_license
from vllm_mtpc.engine.provenance import commit, hardware, public
from vllm_mtpc.report import markdown

if TYPE_CHECKING:
    from vllm_mtpc.train.options import TrainOptions

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
UNTRAINED = (
    "**This head is untrained** (written by `--dry-run`, or with no steps): it can be served, the output is "
    "the target's, but drafts come from initial weights and few are accepted. Nothing was measured.\n"
)
DEFINITIONS = """\
- *Tokens/step* includes the target's own token of every step; plain decoding is 1.0, the most is the window.
- *Accepted up to k* is unconditional: the share of steps in which drafts 1 to k are all accepted.
- T=1 samples from the target, T=0 is greedy. Contexts are the target's own continuations of held-out prompts.
- Steps are weighted as in serving: an accepted draft is skipped over, so steps start more often where drafting is hard.
  *Anywhere* weights all positions alike.
- s.e.: standard error over sequences. They are computed on transformers; `vllm-mtpc doctor` compares them with what
  vLLM serves.
"""
ACCEPTANCE = {
    "length": "expected number of accepted drafts (maximised)",
    "tv": "total variation between target and draft",
    "log": "-log of the overlap of target and draft",
}


def provenance(
    options: TrainOptions,
    head: Mapping[str, Any],
    verifier: str,
    results: Mapping[str, Any],
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """Content of provenance.json, less the package versions, which saving a head adds.

    head: what it is. results: {"t1": ..., "t0": ...}, as `vllm-mtpc eval` measures them; empty where nothing was
    measured. run: `steps` done (0: untrained) and, of a trained head, `minutes`, `tokens`, `documents`, `data_sha256`,
    `tokens_per_second`, `peak_memory_bytes`, `processes`; `command` in place of this process's own, for workers that
    another process started. Plots are listed if they lie in the out folder.
    """
    run = dict(run)
    words = shlex.split(run.pop("command")) if "command" in run else typed()
    settings = {key: public(value) for key, value in options.model_dump(mode="json").items()}
    facts = {
        name.removeprefix("data_"): run.pop(name) for name in ("tokens", "documents", "data_sha256") if name in run
    }
    base_model = next(filter(is_hub_name, (verifier, options.target)), None)
    return {
        "command": shlex.join(public(word) for word in words),
        "commit": commit(),
        "hardware": hardware(),
        "seed": options.seed,
        "data": {"names": settings["data"], **facts},
        "head": {
            **head,
            "target": public(verifier),
            "base_model": base_model,
            "license": target_license(options.target),
        },
        "settings": settings,
        "run": run,
        "figures": dict(results),
        "plots": [name for name in PLOTS if run["steps"] and (options.out / name).is_file()],
    }


def is_hub_name(target: str) -> bool:
    """Whether a target is named by its repository on the hub; a folder is not, whatever it is called."""
    return HUB_NAME.fullmatch(target) is not None and not os.path.exists(target)


def typed() -> list[str]:
    """The command that runs: `vllm-mtpc`, `python -m vllm_mtpc` or a script's name, and its words."""
    file = Path(sys.argv[0])
    return [*(["python", "-m", file.parent.name] if file.name == "__main__.py" else [file.name]), *sys.argv[1:]]


class Words(NamedTuple):
    """What a card says of one family's head."""

    method: str
    tags: list[str]
    title: str
    about: Sequence[str]  # paragraphs
    columns: Mapping[str, str]  # header by key of the results
    rows: Mapping[str, str]  # of the table: label by key of a number in the results; left out where none has it
    definitions: str
    loss: str
    start: str  # where training began
    serving: str = ""  # in front of how it is served


def card(record: Mapping[str, Any], words: Words) -> str:
    """README.md of a head, from what `provenance` returned: Markdown with a YAML front matter."""
    head, results, run = record["head"], record["figures"], record["run"]
    name = Path(record["settings"]["out"]).name or "HEAD"
    measured = {words.columns[key]: values["tokens_per_step"] for key, values in results.items()}
    license, scores = head.get("license"), eval_results(measured, measured_on(record))
    data = card_data(words.tags, head["base_model"], license, scores, words.title)
    parts = [front_matter(data), f"# {words.title}\n", *(f"{one}\n" for one in words.about)]
    if not run["steps"]:
        parts.append(UNTRAINED)
    elif not results:
        parts.append(f"**Not measured**: type `vllm-mtpc eval {shlex.quote(name)} --data DATA` for its results.\n")
    else:
        parts += ["## Results\n", _table(results, words), words.definitions]
    parts += [f"![{PLOTS[plot]}]({plot})\n" for plot in record["plots"]]
    options = shlex.quote(f'{{"method": "{words.method}", "model": "{name}"}}')
    serve = f"vllm serve {head['base_model'] or 'TARGET'} --speculative-config {options}"
    relative = ", relative to this folder" if head["target"].startswith(".") else ""
    parts += [
        f"## Serve it\n\n{words.serving}With `vllm_mtpc` installed next to vLLM:\n",
        _code(f"vllm serve {shlex.quote(name)}", serve),
        f"The first form finds the target by the name in `config.json`{relative}; it drafts {head['drafts']} tokens "
        "per step.\n",
    ]
    if run["steps"]:
        parts += ["## Training\n", _training(record, words)]
    else:
        parts += ["## Command\n", _code(record["command"])]
    return "\n".join(parts)


def _table(results: Mapping[str, Mapping[str, Any]], words: Words) -> str:
    columns = list(results.values())
    totals = [f"**{values['tokens_per_step']:.3f}** (s.e. {values['standard_error']:.3f})" for values in columns]
    rows = [["Tokens/step", *totals]]
    accepted = zip_longest(*(values["per_position"] for values in columns))
    numbers = [(f"Accepted up to {k}", list(values)) for k, values in enumerate(accepted, 1)]
    numbers += [(label, [values.get(key) for values in columns]) for key, label in words.rows.items()]
    for label, values in numbers:
        if any(value is not None for value in values):
            rows.append([label, *("" if value is None else f"{value:.3f}" for value in values)])
    rows.append(["Sequences / contexts", *(f"{values['sequences']} / {values['contexts']}" for values in columns)])
    return markdown(["", *(words.columns[key] for key in results)], rows) + "\n"


def _training(record: Mapping[str, Any], words: Words) -> str:
    """What a head was trained on and how."""
    settings, run = record["settings"], record["run"]
    processes = run.get("processes", 1)
    lines = [
        f"- Data: {_data(settings, record['data'])}",
        f"- Loss: {words.loss}",
        f"- {run['steps']:,} steps of {settings['windows_per_step']:,} windows, AdamW, learning rate "
        f"{settings['learning_rate']:g} ({settings['schedule']}), {settings['precision']}, "
        f"seed {record['seed']}" + (f", {processes} processes" if processes > 1 else "") + f"; start: {words.start}.",
    ]
    if "minutes" in run:
        hosts = record["hardware"]
        machine = ", ".join(dict.fromkeys(hosts["gpus"])) or f"{hosts['cores']} cores of {hosts['cpu']}"
        lines.append(
            f"- {run['minutes']:.1f} minutes on {machine}: {run['tokens_per_second']:,.0f} window tokens/s, at most "
            f"{run['peak_memory_bytes'] / 2**30:.2f} GiB of memory in a process."
        )
    lines += ["- Command:\n", _code(record["command"]), "All settings are in `provenance.json`.\n"]
    return "\n".join(lines)


def _data(settings: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    names = ", ".join(f"`{name}`" for name in data["names"])
    size = f"; {data['tokens']:,} tokens of {data['documents']:,} documents" if "tokens" in data else ""
    sha = f", SHA-256 of the packed rows `{data['sha256']}`" if "sha256" in data else ""
    if settings["regenerate"]:
        share = settings.get("regenerate_greedy_share")  # of circuits alone
        greedy = "" if share is None else f"{share:.0%} greedy, "
        names = (
            f"{settings['regenerate']:,} responses that the target wrote ({greedy}{settings['regenerate_tokens']} "
            f"tokens at most): {names}"
        )
    return f"{names}{size}{sha}."


def _code(*lines: str) -> str:
    return "```bash\n" + "\n".join(lines) + "\n```\n"


def circuit_card(record: Mapping[str, Any]) -> str:
    """README.md of a circuit's head."""
    head, settings = record["head"], record["settings"]
    r, layers = head["num_components"], head["lora_layers"]
    kind = "" if head["head"] == "linear" else f", head `{head['head']}`"
    is_backbone, read, serving = head["head"] == "backbone", "the target's last hidden state", ""
    start = "the target's final norm and last layers" if is_backbone else "the target's lm_head"
    start += f" ({head['partial_start']})" if head.get("partial_start") else ""
    start = start if settings["init"] == "lm-head" else "random weights"
    if layers:
        serving = f"It comes with adapters for the target's last {layers} layers, which are"
    if is_backbone:
        read, serving = "several of the target's layers, read by draft layers of its own", "It has draft layers,"
    words = Words(
        method="mtpc",
        tags=["mtpc", "speculative-decoding"],
        title=f"MtPC head: {head['circuit']}, n={head['window']}, r={r}",
        about=[
            f"A probabilistic-circuit head (circuit `{head['circuit']}`, window {head['window']}, {r} "
            f"component{'s' * (r > 1)}{kind}) for the target `{head['target']}`. From {read}, and given the target's "
            f"own next token, it drafts up to {head['drafts']} tokens at once; the target verifies them in one pass, "
            "so the output is the target's own."
        ],
        columns={"t1": "T=1", "t0": "T=0"},
        rows={
            "anywhere": "Tokens of a step started anywhere",
            "target_bits": "Bits per token of that text, target",
            "joint_bits": "Bits per token, the head's joint",
        },
        definitions=DEFINITIONS,
        loss=loss_sentence(settings),
        start=f"the head `{settings['init_from']}`" if settings["init_from"] else start,
        serving=serving and f"{serving} served on vLLM's Model Runner V2 alone.\n\n",
    )
    return card(record, words)


def loss_sentence(settings: Mapping[str, Any]) -> str:
    """The loss of a circuit in a sentence, from the options of a run."""
    beta, share = settings["beta"], settings["acceptance"]
    kl = "KL(target || draft)" if settings["kl"] == "forward" else "KL(draft || target)"
    over = "the vocabulary" if settings["kl_form"] == "full" else "the text's token against the rest"
    shares = {
        "conditional negative log-likelihood of the text": (1 - share) * (1 - beta),
        f"{kl} over {over}": (1 - share) * beta,
        ACCEPTANCE[settings["acceptance_form"]]: share,
    }
    terms = [("" if part == 1 else f"{100 * part:g} % ") + term for term, part in shares.items() if part > 0]
    is_length = share > 0 and settings["acceptance_form"] == "length"  # its positions weigh alike
    if share == 1 and is_length:
        return f"{terms[0]}."
    which = "position k of the other terms" if is_length else "position k"
    first = "" if settings["train_first"] else ", the first token left out"
    return f"{' + '.join(terms)}; {which} weighted by {settings['gamma']:g}^(k-1){first}."
