"""What identifies a population, so that a run is continued with the same data only."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim.data._client_ids import ClientIds
from fedsim.data._federated_data import FederatedData
from fedsim.descriptions import hash_of

# A population with more bytes is represented by this many examples, spread over it.
_MAX_BYTES, _EXAMPLES = 16 * 2**20, 4096


def population_identity(data: FederatedData) -> dict[str, Any]:
    """Returns what identifies a population. If it has many examples, some are compared, because reading all takes too long.

    >>> data = FederatedData.from_arrays({"x": np.zeros(3)}, sizes=[2, 1])
    >>> list(population_identity(data))
    ['clients', 'examples', 'features', 'client ids and sizes (hash)', 'examples (hash)']
    """
    return {
        "clients": data.num_clients,
        "examples": data.num_examples,
        "features": sorted(data.columns),
        "client ids and sizes (hash)": hash_of(_id_bytes(data), data.sizes.astype("<i8").tobytes()),
        "examples (hash)": _example_hash(data),
    }


def client_ids_hash(data: FederatedData) -> str:
    """Returns a hash of the clients' ids, in their order.

    >>> one, other = (FederatedData.from_arrays({"x": np.zeros(2)}, clients=ids) for ids in (["ann", "bob"], ["ann", "cat"]))
    >>> client_ids_hash(one) == client_ids_hash(other)
    False
    """
    return hash_of(_id_bytes(data))


def _id_bytes(data: FederatedData) -> bytes:
    ids = data.client_ids
    if isinstance(ids, ClientIds):
        return b"\0".join(ids.names.tolist())
    return "\0".join(ids).encode("utf-8", "surrogatepass")


def _example_hash(data: FederatedData) -> str:
    """Returns a hash of all examples, or of some that are spread over a large population."""
    size = data.num_examples
    rows = np.arange(size) if data.nbytes <= _MAX_BYTES else np.unique(np.linspace(0, size - 1, _EXAMPLES).astype(np.int64))
    parts = []
    for _, column in sorted(data.columns.items()):
        values = np.asarray(column[rows])
        texts = values.dtype == object  # Text is an array of bytes.
        parts += [str(values.dtype).encode(), b"\0".join(values.tolist()) if texts else np.ascontiguousarray(values).tobytes()]
    return hash_of(*parts)
