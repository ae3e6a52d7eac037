"""`vllm-mtpc inspect`: what a head is, read from its files, with its weights checked."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.checkpoint.locate import (
    PROVENANCE_FILE,
    U_EMBED_FILE,
    WEIGHTS_FILE,
    find_head,
    resolve_head,
    resolve_verifier,
)
from vllm_mtpc.heads import OPTIONS

if TYPE_CHECKING:
    import argparse

    from vllm_mtpc.config import HeadConfig
    from vllm_mtpc.config_ptp import PtpConfig

Report = dict[str, Any]
FOUND = {True: "found", False: "not found", None: "a name on the hub, not looked up"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="head folder, target folder that ships mtpc/, or hub name")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    report = inspect_head(args.path)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(report)
    return 0


def inspect_head(path: str | Path) -> Report:
    """Everything a head's files say. Raises an MtpcError where load_head or load_ptp would."""
    place = resolve_head(str(path))
    folder = find_head(place) or place
    from vllm_mtpc.checkpoint.load import read_config  # torch: not before the path is known to be good
    from vllm_mtpc.config_ptp import PtpConfig

    config = read_config(folder)
    kind, files = _ptp(folder, config) if isinstance(config, PtpConfig) else _circuit(folder, config)
    verifier = config.speculators_config.verifier
    tensors = {name: tensor for file in files for name, tensor in _tensors(folder / file).items()}
    return {
        "path": str(folder),
        **kind,
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
        "target": _target(folder, verifier.name_or_path) | {"architectures": verifier.architectures},
        "trained_sampling": {
            "temperature": config.trained_temperature,
            "top_k": config.trained_top_k,
            "top_p": config.trained_top_p,
        },
        "format_version": config.format_version,
        "provenance": _provenance(folder / PROVENANCE_FILE),
    }


def _circuit(folder: Path, config: HeadConfig) -> tuple[Report, list[str]]:
    """What only heads of circuits have, and their weight file; every tensor is checked."""
    from vllm_mtpc.checkpoint.adapters import check_adapters
    from vllm_mtpc.checkpoint.load import check_tensors

    check_tensors(folder, config)
    adapters = check_adapters(folder, config)
    method = config.speculators_config.proposal_methods[0]
    return {
        "method": "mtpc",
        "circuit": config.circuit,
        "window": config.window,
        "num_components": config.num_components,
        "drafts_per_step": method.speculative_tokens,
        "proposal": method.proposal_type,
        "head": config.head,
        "expander": {key: value for key in OPTIONS if (value := getattr(config, key)) is not None},
        "adapters": adapters and adapters._asdict(),
    }, [WEIGHTS_FILE]


def _ptp(folder: Path, config: PtpConfig) -> tuple[Report, list[str]]:
    """What only PTP heads have, and their weight files; every tensor is checked."""
    from vllm_mtpc.checkpoint.ptp import check_ptp
    from vllm_mtpc.heads.adapters import ADAPTER_WEIGHTS_FILE

    adapters = check_ptp(folder, config)
    options = {"u_features": config.u_features, "u_hidden": config.u_hidden}
    return {
        "method": "ptp",
        "variant": config.variant,
        "informed": config.informed,
        "window": config.window,
        "drafts_per_step": config.num_speculative_tokens,
        "proposal": config.speculators_config.proposal_methods[0].proposal_type,
        "u_embedding": config.u_embedding,
        "u_options": {key: value for key, value in options.items() if value is not None},
        "late_width": config.late_width,
        "law_trust": config.law_trust,
        "adapters": adapters._asdict(),
        "accepted": config.accepted,
    }, [U_EMBED_FILE, ADAPTER_WEIGHTS_FILE]


def _tensors(file: Path) -> dict[str, Report]:
    """Shape and dtype of every tensor, from the header of the file."""
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as handle:
        slices = {name: handle.get_slice(name) for name in sorted(handle.keys())}
        return {name: {"shape": list(part.get_shape()), "dtype": part.get_dtype()} for name, part in slices.items()}


def _target(folder: Path, name: str) -> Report:
    """The target as written, as resolved, and whether it is there (None: a name on the hub)."""
    resolved = resolve_verifier(folder, name)
    found: bool | None = True if os.path.isdir(resolved) else None
    if not found and name.startswith((".", "/", "~")):
        resolved, found = os.path.abspath(folder / name), False
    return {"name_or_path": name, "resolved": resolved, "found": found}


def _provenance(file: Path) -> Any:
    """What the file says, None without one. It is no part of loading a head, so a bad one is only reported."""
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"), parse_constant=str)  # NaN is not JSON
    except (OSError, ValueError, RecursionError) as error:
        return {"unreadable": str(error)}


def _rows(report: Report) -> list[tuple[str, str]]:
    target, weights, sampling = report["target"], report["weights"], report["trained_sampling"]
    dtypes = ", ".join(weights["dtypes"])
    top_k, top_p = sampling["top_k"] or "off", "off" if sampling["top_p"] == 1 else sampling["top_p"]
    return [
        *(_ptp_rows(report) if report["method"] == "ptp" else _circuit_rows(report)),
        ("vocabulary", f"{report['vocab_size']:,}"),
        ("hidden size", f"{report['hidden_size']:,}"),
        ("parameters", f"{report['parameters']:,}"),
        ("weight file", f"{weights['file']}, {weights['bytes']:,} bytes, {dtypes}"),
        ("target", f"{target['name_or_path']} ({', '.join(target['architectures']) or 'architecture not named'})"),
        ("target is", f"{target['resolved']} ({FOUND[target['found']]})"),
        ("trained for", f"temperature {sampling['temperature']}, top-k {top_k}, top-p {top_p}"),
        ("format version", str(report["format_version"])),
    ]


def _circuit_rows(report: Report) -> list[tuple[str, str]]:
    expander = ", ".join(f"{key} {value}" for key, value in report["expander"].items())
    return [
        ("circuit", report["circuit"]),
        ("window n", f"{report['window']} tokens, the verifier's own token included"),
        ("components r", str(report["num_components"])),
        ("drafts per step", f"{report['drafts_per_step']}, {report['proposal']}"),
        ("head", f"{report['head']}, {expander}" if expander else report["head"]),
        ("draft layers", _adapters(report["adapters"])),
    ]


def _ptp_rows(report: Report) -> list[tuple[str, str]]:
    options = "".join(f", {key} {value}" for key, value in report["u_options"].items())
    adapters = report["adapters"]
    size = f"rank {adapters['rank']}, alpha {adapters['alpha']:g}, {adapters['parameters']:,} parameters"
    trust = report["law_trust"]
    return [
        ("variant", report["variant"]),
        ("informed", "yes, rows carry u" if report["informed"] else "no: u = 0.5 on every row"),
        ("window n", f"{report['window']} auxiliary rows"),
        ("drafts per step", str(report["drafts_per_step"])),
        ("u embedding", report["u_embedding"] + options),
        ("late network", f"width {report['late_width']}" if report["late_width"] else "none"),
        ("trust in laws", "none: as the variant drafts" if trust is None else f"{trust:g}: u picks from rows' laws"),
        ("adapters", f"all {len(adapters['layers'])} layers of the target, {', '.join(adapters['modules'])}; {size}"),
        ("accepted drafts", _accepted(report["accepted"])),
    ]


def _accepted(histogram: list[float] | None) -> str:
    if histogram is None:
        return "not measured"
    mean = sum(count * share for count, share in enumerate(histogram))
    shares = ", ".join(f"{count}: {share:.1%}" for count, share in enumerate(histogram))
    return f"{mean:.2f} of {len(histogram) - 1} on average ({shares})"


def _adapters(adapters: Report | None) -> str:
    if adapters is None:
        return "none"
    layers, parameters = ", ".join(map(str, adapters["layers"])), f"{adapters['parameters']:,} parameters"
    return f"{layers} of the target, rank {adapters['rank']}, alpha {adapters['alpha']}, {parameters}"


def _flat(value: Any, name: str) -> list[tuple[str, str]]:
    """Nested objects as rows with dotted names."""
    if isinstance(value, dict) and value:
        return [row for key, part in value.items() for row in _flat(part, f"{name}.{key}" if name else key)]
    return [(name or "provenance", value if isinstance(value, str) else json.dumps(value))]


def _print_table(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)

    def plain(text: str) -> Text:
        """Files are not to be trusted with the terminal: no markup, no control characters."""
        shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
        return Text(shown.encode(console.encoding, "backslashreplace").decode(console.encoding), overflow="fold")

    table = Table(title=plain(report["path"]), title_justify="left", show_header=False)
    table.add_column(no_wrap=False, style="bold")
    table.add_column()
    for row in _rows(report):
        table.add_row(*map(plain, row))
    table.add_section()
    provenance = report["provenance"]
    for row in [("provenance", f"no {PROVENANCE_FILE}")] if provenance is None else _flat(provenance, ""):
        table.add_row(*map(plain, row))
    console.print(table)
    console.print(plain(f"weights: ok ({len(report['weights']['tensors'])} tensors, shapes as configured, all finite)"))
