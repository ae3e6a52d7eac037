"""Report on a head from its files, with its weights checked, as data and as rows of a table."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from vllm_mtpc.checkpoint.locate import PROVENANCE_FILE, U_EMBED_FILE, WEIGHTS_FILE, resolve_head, verifier_path
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import open_tensors, read_json

Report = dict[str, Any]
# Parts of the report that have their own rows.
NESTED = ("path", "tokens_per_step", "accepted_up_to", "weights", "target", "trained_sampling", "provenance", "served")
FOUND = {True: "found", False: "not found", None: "a hub name"}


def inspect_head(path: str | Path) -> Report:
    """Return the report on a head that `resolve_head` finds, as JSON-compatible data.

    Raises CheckpointError for damaged files or tensors that are not as configured, HeadConfigError for its config.
    """
    folder = resolve_head(str(path))
    from vllm_mtpc.checkpoint import load  # torch: not for a wrong path

    config = load.read_config(folder)
    adapters = load.check_tensors(folder, config)
    own = type(config).model_fields.keys() - load.AnyHeadConfig.model_fields.keys()
    files = [name for name in (WEIGHTS_FILE, U_EMBED_FILE, load.ADAPTER_WEIGHTS_FILE) if (folder / name).exists()]
    tensors = {name: tensor for file in files for name, tensor in _tensors(folder / file).items()}
    verifier = config.speculators_config.verifier
    target = verifier_path(folder, verifier.name_or_path)
    accepted = measured_acceptance(folder)
    return {
        "path": str(folder),
        "tokens_per_step": {key: 1 + math.fsum(values) for key, values in accepted.items()},
        "accepted_up_to": accepted,
        "method": config.speculators_model_type,
        "window": config.window,
        "drafts_per_step": config.num_speculative_tokens,
        **config.model_dump(include=own, exclude_none=True),
        "adapters": adapters
        and {
            **{name: getattr(adapters, name) for name in ("layers", "rank", "alpha", "modules")},
            "parameters": sum(tensor.numel() for tensor in adapters.tensors.values()),
        },
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "parameters": sum(math.prod(tensor["shape"]) for tensor in tensors.values()),
        "weights": {
            "check": "ok",
            "file": ", ".join(files),
            "bytes": sum((folder / file).stat().st_size for file in files),
            "dtypes": sorted({tensor["dtype"] for tensor in tensors.values()}),
            "tensors": tensors,
        },
        "target": {
            "name_or_path": verifier.name_or_path,
            "resolved": target or verifier.name_or_path,
            "found": None if target is None else os.path.isdir(target),  # None: a hub name
            "architectures": verifier.architectures,
        },
        "trained_sampling": {name: getattr(config, f"trained_{name}") for name in ("temperature", "top_k", "top_p")},
        "format_version": config.format_version,
        "provenance": _provenance(folder / PROVENANCE_FILE),
    }


def _tensors(file: Path) -> dict[str, Report]:
    with open_tensors(file) as handle:
        slices = {name: handle.get_slice(name) for name in sorted(handle.keys())}
        return {name: {"shape": list(part.get_shape()), "dtype": part.get_dtype()} for name, part in slices.items()}


def _provenance(file: Path) -> Any:
    try:
        return read_json(file) if file.exists() else None
    except CheckpointError as error:
        return {"unreadable": f"unreadable: {error}"}


def measured_acceptance(folder: Path) -> dict[str, list[float]]:
    """Return P(the first k drafts are accepted), k = 1, 2, ..., by "t1" and "t0", as far as the provenance has them."""
    try:
        metrics = read_json(folder / PROVENANCE_FILE)["figures"]
        found = {key: metrics[key]["per_position"] for key in ("t1", "t0") if key in metrics}
    except (CheckpointError, KeyError, TypeError):
        return {}
    lists = {key: values for key, values in found.items() if isinstance(values, list) and values}
    are_shares = {key: all(isinstance(p, (int, float)) and 0 <= p <= 1 for p in lists[key]) for key in lists}
    return {key: values for key, values in lists.items() if are_shares[key]}


def rows_of(report: Report) -> list[tuple[str, str]]:
    """Return the report as (name, value) rows of a table, measurements first."""
    target, weights, sampling = report["target"], report["weights"], report["trained_sampling"]
    shown = {key: report[key] for key in report if key not in NESTED}
    shown["weight file"] = f"{weights['file']}, {weights['bytes']:,} bytes, {', '.join(weights['dtypes'])}"
    shown["target"] = f"{target['name_or_path']} ({', '.join(target['architectures']) or 'unknown architecture'})"
    shown["target is"] = f"{target['resolved']} ({FOUND[target['found']]})"
    shown["trained for"] = f"temperature {sampling['temperature']}, top-k {sampling['top_k'] or 'off'}, top-p "
    shown["trained for"] += "off" if sampling["top_p"] == 1 else str(sampling["top_p"])
    record = report["provenance"] or {"unreadable": f"no {PROVENANCE_FILE}"}
    parts = {key: part if isinstance(part := record.get(key), dict) else {} for key in ("run", "data", "converted")}
    found = {"steps": parts["run"].get("steps"), "minutes": parts["run"].get("minutes")}
    found |= {"data": parts["data"].get("names"), "converted from": parts["converted"].get("from")}
    found |= {"provenance": record.get("unreadable"), "command": record.get("command"), "commit": record.get("commit")}
    shown |= {key: value for key, value in found.items() if value is not None}
    return [*_measured_rows(report), *((key.replace("_", " "), _format(value)) for key, value in shown.items())]


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_format(part)}" for key, part in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(_format, value))
    if value is None:
        return "none"
    return f"{value:,}" if type(value) is int else f"{value:g}" if isinstance(value, float) else str(value)


def _measured_rows(report: Report) -> list[tuple[str, str]]:
    if not report["tokens_per_step"]:
        return [("tokens/step", "not measured; type: vllm-mtpc eval HEAD --data DATA")]
    names = {"t1": f"T={report['trained_sampling']['temperature']:g}", "t0": "T=0"}
    totals = ", ".join(f"{value:.2f} at {names[key]}" for key, value in report["tokens_per_step"].items())
    rows = [("tokens/step", f"{totals}; measured in training, on held-out text, with all drafts verified")]
    for key, values in report["accepted_up_to"].items():
        rows.append((f"accepted, {names[key]}", ", ".join(f"up to {k}: {p:.0%}" for k, p in enumerate(values, 1))))
    return rows
