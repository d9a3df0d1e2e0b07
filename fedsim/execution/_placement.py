"""Where examples are while programs run: all of them on every device, or only those of the cohorts under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
import psutil
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import tree
from fedsim.aggregators import Aggregator
from fedsim.data import FederatedData
from fedsim.execution._plan import RoundPlan

Memory = Literal["auto", "resident", "stream"]

AXIS = "devices"
_RESIDENT_SHARE = 0.25
_ONE_SHAPE_BYTES = 256 * 2**20


def is_resident(data: FederatedData, mesh: Mesh, memory: Memory) -> bool:
    """Whether every device gets all examples: as ``memory`` says, or if they take less than a quarter of the memory."""
    if memory != "auto":
        return memory == "resident"

    def fits() -> bool:
        device = mesh.devices.flat[0]
        if device.platform == "cpu":
            return data.nbytes * mesh.size <= _RESIDENT_SHARE * psutil.virtual_memory().available
        return data.nbytes <= _RESIDENT_SHARE * memory_limit(device)

    # Decided once, because the examples on the device take of the memory that is available.
    return kept_with_data(data, "_is_resident", mesh, fits)


def kept_with_data(data: FederatedData, name: str, key: Any, make: Callable[[], Any]) -> Any:
    """A value that is made once and lives as long as ``data``."""
    kept = vars(data).setdefault(name, {})
    if key not in kept:
        kept[key] = make()
    return kept[key]


def memory_limit(device: jax.Device) -> int:
    """The size of a device's own memory in bytes; 8 GiB if the device does not report it."""
    return _memory_stats(device).get("bytes_limit", 8 * 2**30)


def _memory_stats(device: jax.Device) -> dict[str, int]:
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # A device that is only described, see `jax.experimental.topologies`.
        return {}


def resident_columns(data: FederatedData, mesh: Mesh) -> dict[str, jax.Array]:
    """All columns on every device. They are transferred once and stay as long as ``data`` lives."""
    # Without examples there is still one row, for masked batches to read.
    return kept_with_data(
        data,
        "_resident_columns",
        mesh,
        lambda: replicate({n: c if len(c) else np.zeros((1, *c.shape[1:]), c.dtype) for n, c in data.columns.items()}, mesh),
    )


def streamed_columns(
    data: FederatedData, plans: Sequence[RoundPlan], mesh: Mesh, max_rounds: int
) -> tuple[dict[str, jax.Array], list[RoundPlan]]:
    """The examples of these rounds' clients, each on the device that trains the client, and plans that point to them.

    The number of rows is rounded up, so that few programs are compiled: to the most that cohorts of this size can have if that
    takes little memory (then there is one program), else to a power of two.
    """
    clients: list[list[np.ndarray]] = [[] for _ in range(mesh.size)]
    rows = np.zeros(mesh.size, np.int64)
    moved = []
    for plan in plans:
        start = np.zeros_like(plan.start)
        for device, (queue, length) in enumerate(zip(plan.queue, plan.length, strict=True)):
            slots = queue[:length]
            sizes = plan.size[slots]
            start[slots] = rows[device] + np.cumsum(sizes) - sizes
            rows[device] += sizes.sum()
            clients[device].append(plan.client[slots])
        moved.append(plan._replace(start=start))
    capacity = _capacity(data, int(rows.max()), len(plans[0].client), max_rounds, mesh.size)
    columns = {}
    for name, column in data.columns.items():
        host = np.zeros((mesh.size, capacity, *column.shape[1:]), column.dtype)
        for device, of_device in enumerate(clients):
            data.gather(name, np.concatenate(of_device), out=host[device])
        columns[name] = jax.device_put(host.reshape(-1, *column.shape[1:]), NamedSharding(mesh, P(AXIS)))
    return columns, moved


def _capacity(data: FederatedData, needed: int, slots: int, max_rounds: int, devices: int) -> int:
    """The number of rows per device."""
    clients = min(slots, data.num_clients)
    largest = kept_with_data(
        data, "_largest_cohort", clients, lambda: max(1, int(np.partition(data.sizes, -clients)[-clients:].sum()))
    )
    row_bytes = max(1, data.nbytes // max(1, data.num_examples))
    if largest * max_rounds * row_bytes * devices <= _ONE_SHAPE_BYTES:
        return largest * max_rounds
    # Twice a device's average share of one round, so that most rounds have one shape.
    usual = 2 * clients * data.num_examples // (data.num_clients * devices)
    return min(largest * max_rounds, 1 << (max(needed, usual, 1) - 1).bit_length())


def must_fit(aggregator: Aggregator, accumulator: Any, slots: int, mesh: Mesh) -> None:
    """Raises ``ValueError``, before anything is compiled, if an aggregator's accumulators do not fit the memory.

    Every device has an accumulator, and the devices of a CPU share its memory. Copies and temporary memory (for sorting, for
    example) are not counted, so nothing that fits is refused.

    Args:
      aggregator: of the updates.
      accumulator: its shapes.
      slots: the most clients of a cohort.
      mesh: the devices.
    """
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        copies, free = mesh.size, psutil.virtual_memory().available
    else:
        copies, free = 1, memory_limit(device) - _memory_stats(device).get("bytes_in_use", 0)
    size = tree.num_bits(accumulator) // 8
    if copies * size > free:
        raise ValueError(
            f"{type(aggregator.innermost).__name__} folds {slots} clients into {size / 1e6:,.1f} MB, with devices={mesh.size} "
            f"into {copies * size / 1e9:,.1f} GB in all, and {free / 1e9:,.1f} GB are free. Take a smaller cohort or model, "
            "fewer devices, or an aggregator that keeps no updates side by side."
        )


def must_wait(mesh: Mesh) -> bool:
    """Whether a dispatch has to wait for the one before it.

    XLA's CPU devices share one pool of threads, and an all-reduce holds its thread until every device has come. With two
    dispatches under way, all threads can end up holding; XLA then ends the process (seen with jax 0.10.2).
    """
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def replicate(values: Any, mesh: Mesh) -> Any:
    """``values`` on every device of the mesh. What is there already is not copied, and traced values are left as they are."""
    target = NamedSharding(mesh, P())
    leaves, structure = jax.tree.flatten(values)

    def stays(leaf: Any) -> bool:
        return isinstance(leaf, jax.core.Tracer) or (isinstance(leaf, jax.Array) and leaf.sharding == target)

    away = [at for at, leaf in enumerate(leaves) if not stays(leaf)]
    if not away:
        return values
    with jax.ensure_compile_time_eval():  # Else a trace around this would turn constants into tracers.
        for at, leaf in zip(away, jax.device_put([leaves[at] for at in away], target), strict=True):
            leaves[at] = leaf
    return jax.tree.unflatten(structure, leaves)
