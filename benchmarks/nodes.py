"""Ray nodes on one machine, for tests and the demo of what happens when one dies."""

from __future__ import annotations

from typing import Any

# Serve kills and starts again a proxy that is not ready in 5 s, which a busy machine may need.
PATIENCE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}
STARTS = 4  # of a node: Ray gives one up after 30 s, which a busy machine may need


class Nodes:
    """A head node and equal nodes, with the given numbers of CPUs and GPUs.

    With their own RAY_TMPDIR no other process of the machine finds them by default.
    """

    def __init__(self, count: int = 1, **options: Any) -> None:
        from ray.cluster_utils import Cluster

        self._options = {"object_store_memory": 80 << 20, "include_dashboard": False, **options}  # Ray's minimum: 75 MB
        self._cluster = Cluster()
        self._others: list[Any] = []
        self._start(gcs_server_port=0)
        for _ in range(count - 1):
            self.add()

    @property
    def address(self) -> str:
        return self._cluster.address

    def add(self) -> None:
        """One more node."""
        self._others.append(self._start())

    def kill(self) -> None:
        """The node that came last, with all that runs on it, at once."""
        self._cluster.remove_node(self._others.pop(), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()

    def _start(self, **more: Any) -> Any:
        for _ in range(STARTS - 1):
            try:
                return self._cluster.add_node(**self._options, **more)
            except Exception as error:  # Ray has no class for this
                if "timed out" not in str(error):
                    raise
        return self._cluster.add_node(**self._options, **more)
