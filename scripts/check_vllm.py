#!/usr/bin/env python3
"""Compare the sources of a vLLM release with the names that this package uses; nothing is executed.

    scripts/check_vllm.py 0.33.0              the release's wheel is downloaded by pip (a few hundred MB), not installed
    scripts/check_vllm.py --sources FOLDER    a folder (or wheel) that has `vllm/`

Checked: every attribute the vLLM patches replace (it exists and takes the parameters the replacement relies on);
every name imported from vLLM (it exists); every method of a vLLM class that one of our classes overrides (it exists,
same parameters as in the vLLM that is installed). "changed" asks for a look, "gone" for work; exit code 1 where
something is gone. Passing is no proof of exactness: run the tests on the release before it is added to TESTED
(docs/internals.md).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_mtpc.proposers.options import versions
from vllm_mtpc.proposers.patches.vllm_patches import EVERY_PROCESS, WITH_HEAD

ROOT = Path(__file__).resolve().parents[1]
OURS = ("proposers", "vllm_mtpc")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.stmt


class Sources:
    """The modules of one vLLM, parsed when asked for. `place`: a folder or a wheel that has `vllm/`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.archive = zipfile.ZipFile(place) if place.is_file() else None
        self.parsed: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        if name not in self.parsed:
            stem = name.replace(".", "/")
            text = self._read(f"{stem}.py") or self._read(f"{stem}/__init__.py")
            self.parsed[name] = None if text is None else ast.parse(text)
        return self.parsed[name]

    def _read(self, path: str) -> str | None:
        if self.archive is not None:
            return self.archive.read(path).decode() if path in self.archive.namelist() else None
        file = self.place / path
        return file.read_text(encoding="utf-8") or "\n" if file.is_file() else None

    def find(self, module: str, dotted: str) -> tuple[str, Definition] | None:
        """The module and statement that define `dotted` of a module, through imports and base classes."""
        name, _, rest = dotted.partition(".")
        found = self._top(module, name, ())
        while found is not None and rest:
            name, _, rest = rest.partition(".")
            found = self._member(*found, name)
        return found

    def _top(self, module: str, name: str, seen: tuple[str, ...]) -> tuple[str, Definition] | None:
        tree = self.module(module)
        if tree is None or module in seen:
            return None
        package = module if self._is_package(module) else module.rpartition(".")[0]
        for statement in _statements(tree):
            if isinstance(statement, ast.ImportFrom):
                origin = _absolute(statement, package)
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        deeper = self._top(origin, alias.name, (*seen, module))
                        return deeper or (module, statement)
            elif name in _names(statement):
                return module, statement
        if self.module(f"{module}.{name}") is not None:
            return module, ast.Pass()  # a module of the package
        return None

    def _member(self, module: str, owner: Definition, name: str) -> tuple[str, Definition] | None:
        if not isinstance(owner, ast.ClassDef):
            return None
        for statement in _statements(owner):
            if name in _names(statement):
                return module, statement
        for base in owner.bases:
            found = self.find(module, ast.unparse(base).partition("[")[0])
            found = found and self._member(*found, name)
            if found:
                return found
        return None

    def minor(self) -> tuple[int, int]:
        """The release's number; that of the installed vLLM where the sources do not say."""
        for statement in _statements(self.module("vllm._version") or ast.Module([], [])):
            if "__version_tuple__" in _names(statement) and isinstance(statement, ast.Assign):
                return ast.literal_eval(statement.value)[:2]
        return versions.vllm_minor()

    def _is_package(self, module: str) -> bool:
        return self._read(f"{module.replace('.', '/')}/__init__.py") is not None


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements that define names of a module or a class, those under `if` and `try` included."""
    for statement in getattr(tree, "body", []):
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _statements(statement)
            for part in (*getattr(statement, "handlers", ()), ast.Module(getattr(statement, "orelse", []), [])):
                yield from _statements(part)


def _names(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Import(names=names):
            return {alias.asname or alias.name.partition(".")[0] for alias in names}
    return set()


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    parent = package.split(".")[: len(package.split(".")) - statement.level + 1]
    return ".".join([*parent, *filter(None, [statement.module])])


def parameters(definition: Definition) -> list[str] | None:
    """Names of a function's parameters, * and ** as they are written; None for anything else."""
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    given = definition.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [argument.arg for argument in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


WHAT = ("replaced", "imported", "overridden")


@dataclass(frozen=True)
class Finding:
    what: str  # one of WHAT
    name: str
    state: str  # "ok", "changed", "gone"
    detail: str = ""


def replaced(sources: Sources) -> Iterator[Finding]:
    for patch in (one for one in (*EVERY_PROCESS, *WITH_HEAD) if sources.minor() >= one.since):
        found = sources.find(patch.module, patch.attribute)
        if found is None:
            yield Finding("replaced", patch.key, "gone", patch.function.__doc__ or "")
            continue
        missing = set(patch.needs or ()) - set(parameters(found[1]) or patch.needs or ())
        detail = f"no longer takes {', '.join(sorted(missing))}" if missing else ""
        yield Finding("replaced", patch.key, "gone" if missing else "ok", detail)


Member = tuple[str, str, str]  # module, class, method


def relied_on() -> tuple[set[tuple[str, str]], set[Member]]:
    """Return (module, name) of all that is imported from vLLM, and the members that are overridden."""
    imported, overridden = set(), set()
    for file in (file for folder in OURS for file in sorted((ROOT / folder).rglob("*.py"))):
        tree, here = ast.parse(file.read_text(encoding="utf-8")), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
                here |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        imported |= set(here.values())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
                bases = [here[ast.unparse(base)] for base in node.bases if ast.unparse(base) in here]
                overridden |= {(*base, method) for base in bases for method in methods}
    return imported, overridden


def findings(sources: Sources, reference: Sources) -> list[Finding]:
    """Everything that is relied on; `reference` is the vLLM this package was written against."""
    result = list(replaced(sources))
    imported, overridden = relied_on()
    for module, name in sorted(imported):
        if reference.find(module, name) is not None:  # else made at run time: nothing can be read
            result.append(Finding("imported", f"{module}:{name}", *_compared(sources, reference, module, name)))
    for module, owner, method in sorted(overridden):
        name = f"{owner}.{method}"
        if reference.find(module, name) is not None:  # else our own method
            result.append(Finding("overridden", f"{module}:{name}", *_compared(sources, reference, module, name)))
    return result


def _compared(sources: Sources, reference: Sources, module: str, name: str) -> tuple[str, str]:
    found, known = sources.find(module, name), reference.find(module, name)
    if found is None or known is None:
        return "gone", ""
    now, before = parameters(found[1]), parameters(known[1])
    if now == before:
        return "ok", ""
    more, less = (set(now or ()) - set(before or ()), set(before or ()) - set(now or ()))
    signs = [f"+{name}" for name in sorted(more)] + [f"-{name}" for name in sorted(less)]
    return "changed", "parameters " + (" ".join(signs) or "in another order")


def download(version: str, folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    try:
        subprocess.run([*command, f"vllm=={version}", "--dest", folder], check=True)
    except subprocess.CalledProcessError:
        raise SystemExit(
            f"check_vllm.py: pip has no wheel of vllm {version} for this Python; name another version, or the folder "
            "of its sources: --sources FOLDER"
        ) from None
    return next(Path(folder).glob("*.whl"))


def report(found: list[Finding], title: str, console: Console) -> None:
    table = Table(title=title)
    for column in ("", "what", "name", "detail"):
        table.add_column(column, overflow="fold")
    for finding in found:
        if finding.state != "ok":
            table.add_row(finding.state, finding.what, finding.name, finding.detail)
    if table.row_count:
        console.print(table)
    for what in WHAT:
        states = [finding.state for finding in found if finding.what == what]
        counts = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "changed", "gone"))
        console.print(f"{what}: {len(states)} checked: {counts}")


def installed() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("check_vllm.py: no vLLM is installed to compare with; run scripts/setup.sh")
    return Path(spec.origin).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="a release, e.g. 0.33.0")
    parser.add_argument("--sources", type=Path, help="a folder or wheel that has vllm/, instead of a release")
    args = parser.parse_args()
    if (args.version is None) == (args.sources is None):
        parser.error("give a version or --sources FOLDER, one of them")
    with tempfile.TemporaryDirectory() as folder:
        place = args.sources or download(args.version, folder)
        sources = Sources(place)
        if sources.module("vllm") is None:
            raise SystemExit(f"check_vllm.py: {place} has no vllm/__init__.py; name the folder above it")
        found = findings(sources, Sources(installed()))
    title = f"vLLM {args.version or args.sources} against {versions.vllm_version()}"
    report(found, title, Console())
    return int(any(finding.state == "gone" for finding in found))


if __name__ == "__main__":
    sys.exit(main())
