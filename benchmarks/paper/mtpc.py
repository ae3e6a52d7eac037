"""Tables and figures of the MtPC paper, on the demo target."""

from __future__ import annotations

from benchmarks.paper.frame import Table

TABLES: dict[str, Table] = {}
