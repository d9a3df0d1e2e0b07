"""Where a population's columns live: whole on every device, or gathered for the cohorts of each dispatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import tree
from fedsim.aggregators import Aggregator, Wrapper
from fedsim.data import FederatedData
from fedsim.execution._plan import RoundPlan

Memory = Literal["auto", "resident", "stream"]

AXIS = "devices"
_RESIDENT_SHARE = 0.25
_ONE_SHAPE_BYTES = 256 * 2**20
_CHUNK_BYTES = 64 * 2**20


def is_resident(data: FederatedData, mesh: Mesh, memory: Memory) -> bool:
    """Whether the whole population is put on every device: by ``memory``, or if it takes under a quarter of what is free."""
    if memory != "auto":
        return memory == "resident"
    # Decided once, for the resident copy itself takes of what is free.
    kept = vars(data).setdefault("_fits", {})
    if mesh not in kept:
        kept[mesh] = _fits(data, mesh)
    return kept[mesh]


def _fits(data: FederatedData, mesh: Mesh) -> bool:
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return data.nbytes * mesh.size <= _RESIDENT_SHARE * psutil.virtual_memory().available
    limit = (device.memory_stats() or {}).get("bytes_limit", 8 * 2**30)
    return data.nbytes <= _RESIDENT_SHARE * limit


def resident_columns(data: FederatedData, mesh: Mesh) -> dict[str, jax.Array]:
    """All columns on every device, sent once and kept for as long as ``data`` lives."""
    kept = vars(data).setdefault("_resident", {})
    if mesh not in kept:
        # A population without examples still needs a row for (masked) batches to point at.
        arrays = {name: c if len(c) else np.zeros((1, *c.shape[1:]), c.dtype) for name, c in data.columns.items()}
        kept[mesh] = jax.device_put(arrays, NamedSharding(mesh, P()))
    return kept[mesh]


def streamed_columns(
    data: FederatedData, plans: Sequence[RoundPlan], mesh: Mesh, max_rounds: int
) -> tuple[dict[str, jax.Array], list[RoundPlan]]:
    """The rows of these rounds' clients, each on the device that trains it, and the plans pointing at them.

    The number of rows is rounded up to few different values, so few programs are compiled: to the most that any cohort of
    this size can have if that is affordable (then there is one program), else to a power of two.
    """
    per_device: list[list[np.ndarray]] = [[] for _ in range(mesh.size)]
    rows = np.zeros(mesh.size, np.int64)
    moved = []
    for plan in plans:
        start = np.zeros_like(plan.start)
        for device in range(mesh.size):
            lanes = zip(plan.queue[device], plan.length[device], strict=True)
            positions = np.concatenate([queue[:length] for queue, length in lanes])
            sizes = plan.size[positions]
            start[positions] = rows[device] + np.cumsum(sizes) - sizes
            rows[device] += sizes.sum()
            per_device[device].append(plan.client[positions])
        moved.append(plan._replace(start=start))
    capacity = _capacity(data, int(rows.max()), len(plans[0].client), max_rounds, mesh.size)
    columns = {}
    for name, column in data.columns.items():
        host = np.zeros((mesh.size, capacity, *column.shape[1:]), column.dtype)
        for device, clients in enumerate(per_device):
            data.gather(name, np.concatenate(clients), out=host[device])
        columns[name] = jax.device_put(host.reshape(-1, *column.shape[1:]), NamedSharding(mesh, P(AXIS)))
    return columns, moved


def _capacity(data: FederatedData, needed: int, clients: int, max_rounds: int, devices: int) -> int:
    largest = vars(data).setdefault("_largest_cohort", {})
    if clients not in largest:
        largest[clients] = max(1, int(np.partition(data.sizes, -clients)[-clients:].sum()))
    most = largest[clients] * max_rounds
    row_bytes = max(1, data.nbytes // max(1, data.num_examples))
    if most * row_bytes * devices <= _ONE_SHAPE_BYTES:
        return most
    # Twice a device's usual share of one round, so that most rounds are of one shape.
    usual = 2 * clients * data.num_examples // (data.num_clients * devices)
    return min(most, _power_of_two(max(needed, usual, 1)))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def must_fit(aggregator: Aggregator, accumulator: Any, slots: int, lanes: int, mesh: Mesh) -> None:
    """Raises ``ValueError``, before anything is compiled, if what a round folds its updates into cannot fit.

    Every lane of every device has an accumulator, of which XLA keeps two: the one that is read, and the one that is written (or
    into which they are merged). The devices of one CPU share its memory. What an aggregator needs beside, to sort, say, is not
    counted: nothing is refused that fits.

    Args:
      aggregator: who folds.
      accumulator: of the shapes that it asks for.
      slots: clients of a cohort, at most.
      lanes: of each device.
      mesh: the devices.
    """
    device = mesh.devices.flat[0]
    copies = 2 * lanes
    if device.platform == "cpu":
        copies, free = copies * mesh.size, psutil.virtual_memory().available
    else:
        stats = device.memory_stats() or {}
        free = stats.get("bytes_limit", 8 * 2**30) - stats.get("bytes_in_use", 0)
    size = tree.num_bits(accumulator) // 8
    if copies * size > free:
        while isinstance(aggregator, Wrapper):
            aggregator = aggregator.inner
        raise ValueError(
            f"{type(aggregator).__name__} folds {slots} clients into {size / 1e6:,.1f} MB, and with lanes={lanes} and "
            f"devices={mesh.size} that is there {copies} times: {copies * size / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB "
            "are free. Take a smaller cohort or model, fewer lanes or devices, or an aggregator that keeps no updates side by "
            "side."
        )


def must_wait(mesh: Mesh) -> bool:
    """Whether a dispatch has to wait for the one before it.

    XLA's CPU devices share one pool of threads, and an all-reduce holds its thread until every device has come. With two
    dispatches under way all threads can end up holding, for good: XLA ends the process after a while (seen with jax 0.10.2).
    """
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def replicate(values: Any, mesh: Mesh) -> Any:
    """``values`` on every device of the mesh; what is there already is not touched (nor paid for)."""
    target = NamedSharding(mesh, P())
    leaves, structure = jax.tree.flatten(values)
    away = [at for at, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array) or leaf.sharding != target]
    if not away:
        return values
    for at, leaf in zip(away, jax.device_put([leaves[at] for at in away], target), strict=True):
        leaves[at] = leaf
    return jax.tree.unflatten(structure, leaves)


def resident_key(data: FederatedData, key: jax.Array, mesh: Mesh) -> jax.Array:
    """A root key on every device, kept until another is asked for: to send it takes longer than to plan a round."""
    kept = vars(data).setdefault("_resident_key", {})
    known, there = kept.get(mesh, (None, None))
    # NumPy's may have been written to, and of a deleted one a CPU's devices may still share the memory.
    if known is not key or not isinstance(key, jax.Array) or key.is_deleted():
        there = replicate(key, mesh)
        kept[mesh] = key, there
    return there  # not read again: another thread may keep its own


def resident_owner(data: FederatedData, mesh: Mesh) -> jax.Array:
    """Each row's client, ``int32 [rows]``, on every device, kept like `resident_columns`."""
    kept = vars(data).setdefault("_resident_owner", {})
    if mesh not in kept:
        owner = np.repeat(np.arange(data.num_clients, dtype=np.int32), data.sizes)
        kept[mesh] = replicate(owner if len(owner) else np.zeros(1, np.int32), mesh)
    return kept[mesh]


def streamed_chunks(data: FederatedData, mesh: Mesh, batch_size: int) -> Iterator[tuple[dict[str, jax.Array], jax.Array, int]]:
    """All rows in stored order, in chunks of one shape: columns and owners, and how many rows count.

    A chunk is sharded over the devices; each has as many of its rows as any other, and then padding.
    """
    row_bytes = max(1, data.nbytes // max(1, data.num_examples))
    per_device = batch_size * max(1, _CHUNK_BYTES // (mesh.size * row_bytes * batch_size))
    per_device = min(per_device, max(1, -(-data.num_examples // mesh.size)))  # What fits one chunk needs no padding.
    chunk, sharded = per_device * mesh.size, NamedSharding(mesh, P(AXIS))
    for start in range(0, max(1, data.num_examples), chunk):
        stop = min(start + chunk, data.num_examples)
        share = -(-(stop - start) // mesh.size)

        def dealt(rows: np.ndarray, share: int = share) -> np.ndarray:
            if len(rows) == chunk:
                return rows
            padded = np.zeros((mesh.size, per_device, *rows.shape[1:]), rows.dtype)
            for device in range(mesh.size):
                own = rows[device * share : (device + 1) * share]
                padded[device, : len(own)] = own
            return padded.reshape(chunk, *rows.shape[1:])

        columns = {name: dealt(np.asarray(column[start:stop])) for name, column in data.columns.items()}
        owner = np.searchsorted(data.offsets, np.arange(start, stop), side="right").astype(np.int32) - 1
        yield jax.device_put(columns, sharded), jax.device_put(dealt(owner.astype(np.int32)), sharded), stop - start
