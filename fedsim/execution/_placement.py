"""Where examples and states are stored while programs run: whole on every device, or divided over the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import distributed, tree
from fedsim.aggregators import Aggregator
from fedsim.data import FederatedData
from fedsim.model import WHOLE, Division
from fedsim.rounds import RoundPlan

Memory = Literal["auto", "resident", "stream"]

AXIS = "devices"  # the name of the axis of the meshes of all executions that clients are divided over
_RESIDENT_SHARE = 0.25
_ONE_SHAPE_BYTES = 256 * 2**20
# The memory of chips that may be descriptions, in GiB, as published.
_GIB_OF_TPU = {"TPU v4": 32, "TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32}


def is_resident(data: FederatedData, mesh: Mesh, memory: Memory) -> bool:
    """Returns whether every device gets all examples: as ``memory`` says, or if they take less than a quarter of the memory.

    Args:
      data: the population.
      mesh: the devices. Those of a CPU share its memory, of which only what is free counts. If they are those of several
        processes, ``"auto"`` streams, so that each process reads the examples of its own clients only.
      memory: ``"resident"``, ``"stream"``, or ``"auto"``, which decides once for a population and devices.

    >>> import fedsim
    >>> data = FederatedData.from_arrays({"x": np.zeros(6, np.float32)}, sizes=[1, 2, 3])
    >>> [is_resident(data, fedsim.Jit().mesh(), memory) for memory in ("auto", "stream")]
    [True, False]
    """
    import psutil

    if memory != "auto":
        return memory == "resident"
    if mesh.is_multi_process:
        return False

    def fits() -> bool:
        device = mesh.devices.flat[0]
        if device.platform == "cpu":
            return data.nbytes * mesh.size <= _RESIDENT_SHARE * psutil.virtual_memory().available
        return data.nbytes <= _RESIDENT_SHARE * memory_limit(device)

    # Decided once, because the examples on the device reduce the available memory.
    return kept_with_data(data, "_is_resident", mesh, fits)


def kept_with_data(data: FederatedData, name: str, key: Any, make: Callable[[], Any]) -> Any:
    """Returns a value that is computed once and stored with ``data``."""
    kept = vars(data).setdefault(name, {})
    if key not in kept:
        kept[key] = make()
    return kept[key]


def memory_limit(device: jax.Device) -> int:
    """Returns the size of a device's memory in bytes; if it is not reported, that of its kind of TPU, or 8 GiB.

    >>> memory_limit(jax.devices()[0]) > 10**9
    True
    """
    return _memory_stats(device).get("bytes_limit", _GIB_OF_TPU.get(device.device_kind, 8) * 2**30)


def _memory_stats(device: jax.Device) -> dict[str, int]:
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # The device is only a description, see `jax.experimental.topologies`.
        return {}


def resident_columns(data: FederatedData, mesh: Mesh) -> dict[str, jax.Array]:
    """Returns all columns on every device. They are transferred once and stored with ``data``."""
    # Without examples there is still one row, which masked batches read.
    return kept_with_data(
        data,
        "_resident_columns",
        (mesh, jax.dtypes.canonicalize_dtype(float)),  # Without x64, floats and integers of 64 bits become 32.
        lambda: replicate({n: c if len(c) else np.zeros((1, *c.shape[1:]), c.dtype) for n, c in data.columns.items()}, mesh),
    )


def release(data: FederatedData) -> None:
    """Frees the copies of a population's examples that rounds and evaluation have placed on devices.

    They are transferred again when they are needed. ``data`` itself does not change.

    >>> import fedsim
    >>> data, histogram = FederatedData.from_arrays({"x": np.ones(3, np.float32)}, sizes=[1, 2]), fedsim.algorithms.Histogram()
    >>> cohort, state = fedsim.Cohort.of(data, ["0", "1"]), histogram.init(jax.random.key(0))
    >>> for _ in range(2):
    ...     state, _ = histogram.apply(state, cohort)
    ...     release(data)
    >>> int(state.counts.sum())
    6
    """
    for name in ("_resident_columns", "_resident_owner"):
        vars(data).pop(name, None)


def streamed_columns(
    data: FederatedData, plans: Sequence[RoundPlan], mesh: Mesh, max_rounds: int
) -> tuple[dict[str, jax.Array], list[RoundPlan]]:
    """Returns the examples of these rounds' clients on the devices of the clients, and plans with their rows.

    The number of rows is rounded up, so that few programs are compiled: to the largest number that cohorts of this size can
    have if that takes little memory (then there is one program), else to a power of two.
    """
    devices = mesh.shape[AXIS]
    ranges: list[list[np.ndarray]] = [[np.zeros((0, 2), np.int64)] for _ in range(devices)]
    rows = np.zeros(devices, np.int64)
    new_plans = []
    for plan in plans:
        start = np.zeros_like(plan.start)
        for device, (queue, length) in enumerate(zip(plan.queue, plan.length, strict=True)):
            slots = queue[:length]
            sizes = plan.size[slots]
            start[slots] = rows[device] + np.cumsum(sizes) - sizes
            rows[device] += sizes.sum()
            ranges[device].append(np.stack([plan.start[slots], plan.start[slots] + sizes], axis=1).astype(np.int64))
        new_plans.append(plan._replace(start=start))
    capacity = _capacity(data, int(rows.max()), len(plans[0].client), max_rounds, devices)
    # On a single device all arrays have the same sharding. Otherwise it would be propagated to results, and programs that get
    # these would be compiled again.
    divided = NamedSharding(mesh, P(AXIS) if devices > 1 else P())

    def placed(name: str, column: Any) -> jax.Array:
        def of_device(device: int) -> np.ndarray:
            host = np.zeros((capacity, *column.shape[1:]), column.dtype)
            data.gather_rows(name, np.concatenate(ranges[device]), out=host)
            return host

        return put_blocks(of_device, (devices, capacity, *column.shape[1:]), divided)

    return {name: placed(name, column) for name, column in data.columns.items()}, new_plans


def put_blocks(block: Callable[[int], np.ndarray], shape: tuple[int, ...], divided: NamedSharding) -> jax.Array:
    """Returns an array ``[blocks * rows, ...]`` on the devices, of which a process makes the blocks of its own devices only.

    Args:
      block: returns the rows of a block by its number.
      shape: ``[blocks, rows, ...]``.
      divided: how the blocks are divided over the devices.
    """
    blocks, rows = shape[:2]
    made: dict[int, np.ndarray] = {}  # Devices that train a client together have the same block.

    def of_device(index: Any) -> np.ndarray:
        number = (index[0].start or 0) // rows
        if number not in made:
            made[number] = block(number)
        return made[number]

    return jax.make_array_from_callback((blocks * rows, *shape[2:]), divided, of_device)


def _capacity(data: FederatedData, needed: int, slots: int, max_rounds: int, devices: int) -> int:
    """Returns the number of rows per device."""
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
    example) are not counted, so nothing that fits is rejected.

    Args:
      aggregator: combines the updates.
      accumulator: the shapes of its accumulator.
      slots: the largest number of clients of a cohort.
      mesh: the devices.
    """
    import psutil

    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        copies, free = mesh.size, psutil.virtual_memory().available
    else:
        copies, free = 1, memory_limit(device) - _memory_stats(device).get("bytes_in_use", 0)
    size = tree.num_bits(accumulator) // 8
    if copies * size > free:
        raise ValueError(
            f"{type(aggregator.innermost).__name__} needs {size / 1e6:,.1f} MB for the updates of {slots} clients, with "
            f"devices={mesh.size} {copies * size / 1e9:,.1f} GB in total, and {free / 1e9:,.1f} GB are free. Use a smaller "
            "cohort or model, fewer devices, or an aggregator (and an attack) that does not store all updates."
        )


def must_wait(mesh: Mesh) -> bool:
    """Returns whether a dispatch has to wait for the one before it.

    XLA's CPU devices share one pool of threads, and an all-reduce blocks its thread until every device has reached it. With two
    dispatches at a time, all threads can be blocked; XLA then ends the process (observed with jax 0.10.2).
    """
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def shardings_of(state: Any, mesh: Mesh, block: int | None = None, division: Division = WHOLE) -> Any:
    """Returns where a state's arrays are: whole on every device, or divided.

    Args:
      state: a pytree of arrays or ``jax.ShapeDtypeStruct``.
      mesh: the devices.
      block: arrays with an entry for each client are divided into blocks of so many, see `Layout`; None divides none.
      division: how a model's arrays are divided.
    """
    everywhere, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))

    def of_model(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, division.spec_of(name, tuple(np.shape(leaf))))

    def of_clients(leaf: Any) -> NamedSharding:
        is_divided = block is not None and np.shape(leaf)[:1] == (block * mesh.size,)
        return divided if is_divided else everywhere

    if division.parameters:
        return jax.tree_util.tree_map_with_path(of_model, state)
    return jax.tree.map(of_clients, state)


def in_lockstep(mesh: Mesh) -> bool:
    """Returns whether all devices of a mesh take equally many steps.

    XLA's CPU devices exchange parts of a client's arrays (collective-permute) only if all of them take part. If several devices
    train each client, one that ends earlier would block the others forever (observed with jax 0.10.2). GPUs and TPUs need the
    devices of the client alone.
    """
    return mesh.size > mesh.shape[AXIS] > 1 and mesh.devices.flat[0].platform == "cpu"


def whole_on_client(mesh: Mesh) -> NamedSharding | None:
    """Returns where an array of a client is whole on all of its devices; None if each client has one device."""
    return _on_client(mesh, P()) if mesh.size > mesh.shape[AXIS] else None


def batch_sharding(mesh: Mesh) -> NamedSharding | None:
    """Returns how the rows of a client's batches are divided over its devices; None if they are not."""
    return _on_client(mesh, P("data")) if mesh.shape.get("data", 1) > 1 else None


def _on_client(mesh: Mesh, spec: P) -> NamedSharding:
    # In a `jax.shard_map` over clients, a constraint may name the other axes only.
    manual = {AXIS: jax.sharding.AxisType.Manual} if mesh.shape[AXIS] > 1 else {}
    return NamedSharding(mesh.abstract_mesh.update_axis_types(manual) if manual else mesh, spec)


def replicate(values: Any, mesh: Mesh) -> Any:
    """Copies ``values`` to every device of the mesh, except arrays that are there already and traced values."""
    everywhere = NamedSharding(mesh, P())
    return moved(values, jax.tree.map(lambda _: everywhere, values))


def moved(values: Any, shardings: Any) -> Any:
    """Moves ``values`` to ``shardings``, a pytree of the same structure, except arrays that are there and traced values."""
    leaves, structure = jax.tree.flatten(values)
    targets = jax.tree.leaves(shardings)

    def is_in_place(leaf: Any, target: NamedSharding) -> bool:
        return isinstance(leaf, jax.core.Tracer) or (isinstance(leaf, jax.Array) and leaf.sharding == target)

    missing = [at for at, leaf in enumerate(leaves) if not is_in_place(leaf, targets[at])]
    if not missing:
        return values
    with jax.ensure_compile_time_eval():  # Otherwise constants would become tracers inside a trace.
        new = _put([leaves[at] for at in missing], [targets[at] for at in missing])
        for at, leaf in zip(missing, new, strict=True):
            leaves[at] = leaf
    return jax.tree.unflatten(structure, leaves)


def _put(leaves: list[Any], shardings: list[NamedSharding]) -> list[jax.Array]:
    """Moves arrays, of which each process gives all and places the parts of its own devices."""
    # An array of several processes is moved by way of the host.
    leaves = [distributed.on_host(leaf) if _is_shared(leaf) else leaf for leaf in leaves]
    if all(sharding.is_fully_addressable for sharding in shardings):
        return jax.device_put(leaves, shardings)

    def placed(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(placed(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return [placed(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]


def _is_shared(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
