"""What a head is, read from its files, with its weights checked: a report, and its rows for people."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.checkpoint.locate import (
    PROVENANCE_FILE,
    U_EMBED_FILE,
    WEIGHTS_FILE,
    resolve_head,
    verifier_path,
)
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.files import open_tensors, read_json
from vllm_mtpc.heads import HEADS

if TYPE_CHECKING:
    from vllm_mtpc.config.mtpc import HeadConfig
    from vllm_mtpc.config.ptp import PtpConfig

Report = dict[str, Any]
FOUND = {True: "found", False: "not found", None: "a name on the hub, not looked up"}


def inspect_head(path: str | Path) -> Report:
    """Everything a head's files say. Raises an MtpcError where load_head or load_ptp would."""
    folder = resolve_head(str(path))
    from vllm_mtpc.checkpoint.load import read_config  # torch: not before the path is known to be good

    config = read_config(folder)
    own, files = FAMILIES[config.speculators_model_type].facts(folder, config)
    verifier = config.speculators_config.verifier
    target = verifier_path(folder, verifier.name_or_path)
    tensors = {name: tensor for file in files for name, tensor in _tensors(folder / file).items()}
    accepted = measured_acceptance(folder)
    return {
        "path": str(folder),
        "tokens_per_step": {key: 1 + math.fsum(values) for key, values in accepted.items()},
        "accepted_up_to": accepted,
        "method": config.speculators_model_type,
        "window": config.window,
        "drafts_per_step": config.num_speculative_tokens,
        **own,
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
            "found": None if target is None else os.path.isdir(target),  # None: a name on the hub
            "architectures": verifier.architectures,
        },
        "trained_sampling": {name: getattr(config, f"trained_{name}") for name in ("temperature", "top_k", "top_p")},
        "format_version": config.format_version,
        "provenance": _provenance(folder / PROVENANCE_FILE),
    }


def mtpc_facts(folder: Path, config: HeadConfig) -> tuple[Report, list[str]]:
    """What only heads of circuits have, and their weight file; every tensor is checked."""
    from vllm_mtpc.checkpoint.load import check_head

    adapters = check_head(folder, config)
    return {
        "circuit": config.circuit,
        "num_components": config.num_components,
        "proposal": config.draft_sample_method,
        "head": config.head,
        "expander": config.model_dump(include={one.name for one in HEADS[config.head].options}, exclude_none=True),
        "adapters": adapters and adapters._asdict(),
    }, [WEIGHTS_FILE]


def ptp_facts(folder: Path, config: PtpConfig) -> tuple[Report, list[str]]:
    """What only PTP heads have, and their weight files; every tensor is checked."""
    from vllm_mtpc.checkpoint.ptp import check_ptp
    from vllm_mtpc.heads.adapters import ADAPTER_WEIGHTS_FILE

    own = ("variant", "u_embedding", "late_width", "distribution_trust", "accepted")
    options = config.model_dump(include={"u_features", "u_hidden"}, exclude_none=True)
    adapters = check_ptp(folder, config)._asdict()
    found = {name: getattr(config, name) for name in own} | {"u_options": options, "adapters": adapters}
    return found, [U_EMBED_FILE, ADAPTER_WEIGHTS_FILE]


def _tensors(file: Path) -> dict[str, Report]:
    """Shape and dtype of every tensor, from the header of the file."""
    with open_tensors(file) as handle:
        slices = {name: handle.get_slice(name) for name in sorted(handle.keys())}
        return {name: {"shape": list(part.get_shape()), "dtype": part.get_dtype()} for name, part in slices.items()}


def _provenance(file: Path) -> Any:
    """What the file says, None without one. It is no part of loading a head, so a bad one is only reported."""
    try:
        return read_json(file) if file.exists() else None
    except CheckpointError as error:
        return {"unreadable": f"unreadable: {error}"}


def measured_acceptance(folder: Path) -> dict[str, list[float]]:
    """P(the first k drafts are all accepted), k = 1, 2, ..., by temperature: keys "t1" and "t0", or those there are.

    Measured by the trainer on held-out text, not conditional on the drafts before. Empty where nothing can be read: it
    is advice, a head is served without it.
    """
    try:
        metrics = read_json(folder / PROVENANCE_FILE)["figures"]
        found = {key: metrics[key]["per_position"] for key in ("t1", "t0") if key in metrics}
    except (CheckpointError, KeyError, TypeError):
        return {}
    return {key: values for key, values in found.items() if values and isinstance(values, list) and _are_shares(values)}


def _are_shares(values: list[Any]) -> bool:
    return all(isinstance(value, (int, float)) and math.isfinite(value) and 0 <= value <= 1 for value in values)


def rows_of(report: Report) -> list[tuple[str, str]]:
    """The report as rows of a table."""
    target, weights, sampling = report["target"], report["weights"], report["trained_sampling"]
    dtypes = ", ".join(weights["dtypes"])
    top_k, top_p = sampling["top_k"] or "off", "off" if sampling["top_p"] == 1 else sampling["top_p"]
    return [
        *_measured_rows(report),
        *FAMILIES[report["method"]].rows(report),
        ("vocabulary", f"{report['vocab_size']:,}"),
        ("hidden size", f"{report['hidden_size']:,}"),
        ("parameters", f"{report['parameters']:,}"),
        ("weight file", f"{weights['file']}, {weights['bytes']:,} bytes, {dtypes}"),
        ("target", f"{target['name_or_path']} ({', '.join(target['architectures']) or 'architecture not named'})"),
        ("target is", f"{target['resolved']} ({FOUND[target['found']]})"),
        ("trained for", f"temperature {sampling['temperature']}, top-k {top_k}, top-p {top_p}"),
        ("format version", str(report["format_version"])),
        *(_memory_rows(report["memory"]) if "memory" in report else []),
        *_provenance_rows(report["provenance"]),
    ]


def _measured_rows(report: Report) -> list[tuple[str, str]]:
    """What the head's trainer measured, first of all."""
    if not report["tokens_per_step"]:
        return [("tokens/step", "not measured; type: vllm-mtpc eval HEAD --data DATA")]
    names = {"t1": f"T={report['trained_sampling']['temperature']:g}", "t0": "T=0"}
    totals = ", ".join(f"{value:.2f} at {names[key]}" for key, value in report["tokens_per_step"].items())
    rows = [("tokens/step", f"{totals}; the trainer's, on held-out text, all drafts verified")]
    for key, values in report["accepted_up_to"].items():
        rows.append((f"accepted, {names[key]}", ", ".join(f"up to {k}: {p:.0%}" for k, p in enumerate(values, 1))))
    return rows


def _memory_rows(memory: Report) -> list[tuple[str, str]]:
    parts = (("weights", "head"), ("buffers", "buffers"), ("activation", "the largest draft"))
    sizes = ", ".join(f"{words} {memory[f'{name}_mib']:,.1f} MiB" for name, words in parts)
    served = f"{memory['max_num_seqs']} sequences, {memory['tensor_parallel_size']} GPUs, target in bfloat16"
    return [("memory per GPU", f"{sizes}; {served}; draft layers' adapters and KV cache not among it")]


def _provenance_rows(record: Report | None) -> list[tuple[str, str]]:
    """How the head came about; the file is anyone's, so whatever is not as the trainer writes it is left out."""
    if record is None:
        return [("provenance", f"no {PROVENANCE_FILE}")]
    run, data, converted = (
        part if isinstance(part := record.get(name), dict) else {} for name in ("run", "data", "converted")
    )
    rows = [
        ("steps", run.get("steps")),
        ("minutes", run.get("minutes")),
        ("data", ", ".join(map(str, names)) if isinstance(names := data.get("names"), list) else names),
        ("converted from", converted.get("from")),
        ("command", record.get("command")),
        ("commit", record.get("commit")),
        ("provenance", record.get("unreadable")),
    ]
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in rows if value is not None}
    return list(shown.items())


def mtpc_rows(report: Report) -> list[tuple[str, str]]:
    adapters, layers = report["adapters"], "its own" if report["head"] == "backbone" else "none"
    if adapters:
        layers = f"{', '.join(map(str, adapters['layers']))} of the target, rank {adapters['rank']}, "
        layers += f"alpha {adapters['alpha']}, {adapters['parameters']:,} parameters"
    return [
        ("circuit", report["circuit"]),
        ("window n", f"{report['window']} tokens, the verifier's own token included"),
        ("components r", str(report["num_components"])),
        ("drafts per step", f"{report['drafts_per_step']}, {report['proposal']}"),
        ("head", ", ".join([report["head"], *(f"{key} {value}" for key, value in report["expander"].items())])),
        ("draft layers", layers),
    ]


def ptp_rows(report: Report) -> list[tuple[str, str]]:
    adapters, trust, shares = report["adapters"], report["distribution_trust"], report["accepted"]
    size = f"rank {adapters['rank']}, alpha {adapters['alpha']:g}, {adapters['parameters']:,} parameters"
    accepted = "not measured"
    if shares is not None:
        mean = sum(count * share for count, share in enumerate(shares))
        listed = ", ".join(f"{count}: {share:.1%}" for count, share in enumerate(shares))
        accepted = f"{mean:.2f} of {len(shares) - 1} on average ({listed})"
    late = [] if trust is None else [("late network", f"width {report['late_width']}, trust {trust:g}")]
    return [
        ("variant", report["variant"]),
        ("window n", f"{report['window']} auxiliary rows"),
        ("drafts per step", str(report["drafts_per_step"])),
        ("u embedding", ", ".join([report["u_embedding"], *(f"{k} {v}" for k, v in report["u_options"].items())])),
        *late,
        ("adapters", f"all {len(adapters['layers'])} layers of the target, {', '.join(adapters['modules'])}; {size}"),
        ("accepted drafts", accepted),
    ]
