"""When unembeddings are divided over the ranks of a tensor-parallel group, by rows of the vocabulary."""

from __future__ import annotations

# Unembeddings of this many bytes and more are divided over the ranks: reading them must cost more than that the ranks
# meet. CPU: 22 GB/s against 0.24 ms to gather one request's logits of the demo and 0.6 ms for 16 (gloo, two ranks).
# GPU, not measured: 64 MiB are 20 us at 3.3 TB/s, which is what a small all-gather takes. What is gathered is B / D
# of what is read, so the batch hardly matters there.
SHARD_BYTES = {"cpu": 16 << 20}
SHARD_BYTES_GPU = 64 << 20


def pays(num_bytes: int, num_ranks: int, device_type: str) -> bool:
    """Whether unembeddings of num_bytes are divided."""
    return num_ranks > 1 and num_bytes >= SHARD_BYTES.get(device_type, SHARD_BYTES_GPU)
