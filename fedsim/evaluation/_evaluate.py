"""Evaluation of a whole population in one compiled pass over its packed examples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import checks, rng
from fedsim.data import FederatedData
from fedsim.evaluation._statistics import (
    Statistics,
    add_by_client,
    flat_zeros,
    in_shape,
    of_all_clients,
    on_host,
    statistics,
    sum_forms,
)
from fedsim.execution import AXIS, Auto, Execution, Jit, _placement, compiled
from fedsim.metrics import better_of
from fedsim.model import Model, Params
from fedsim.primitives import without_mesh_of_context
from fedsim.rounds import kept_with

T = TypeVar("T")
_Chunk = tuple[dict[str, jax.Array], jax.Array, int]  # columns, the rank of each row's client, how many rows count

_CHUNK_BYTES = 64 * 2**20


class Evaluation(NamedTuple):
    """Metrics of a population.

    Attributes:
      overall: the value of each metric over all examples, by name: a float, or an array for metrics such as confusion matrices.
      clients: the statistic of each metric, by name, with leaves ``[clients, ...]`` in the population's order. For most metrics
        it is a `fedsim.metrics.Mean`, with leaves ``[clients]``. ``clients[name].result()`` are the clients' values, and
        ``clients[name].weight`` is 0 for clients without examples, whose mean is NaN. Counts are ``int64``, and sums of floats
        are ``float64``.
    """

    overall: dict[str, Any]
    clients: dict[str, Any]

    def over_clients(self, metric: str, *, lower_is_better: bool | None = None) -> dict[str, float]:
        """Returns the mean, the standard deviation and the worst 10 % of a metric over clients whose weight is not 0.

        "worst 10%" is the mean over the worst tenth of the clients, but at least one client. Values that are not finite are the
        worst. It is NaN if it is not known which values are better. Without any client, all three are NaN.

        Args:
          metric: the name of a metric with one number per client.
          lower_is_better: whether the highest values are the worst. None means what the metric says, see
            `fedsim.metrics.better_of`.

        Raises:
          ValueError: the metric has an array per client.

        >>> from fedsim.metrics import Mean
        >>> means = Mean(np.array([1.0, 0.0, 2.0, 0.0]), np.array([2.0, 2.0, 2.0, 0.0]))
        >>> Evaluation({}, {"accuracy": means}).over_clients("accuracy")["worst 10%"]
        0.0
        """
        values = np.asarray(self.clients[metric].result())
        if values.ndim != 1:
            raise ValueError(
                f"Expected a metric with one number per client, got {metric!r}, which has an array of shape "
                f"{list(values.shape[1:])} per client. Use clients[{metric!r}].result(), of shape {list(values.shape)}."
            )
        values = np.sort(values[np.asarray(self.clients[metric].weight) > 0])
        if not len(values):
            return {"mean": math.nan, "std": math.nan, "worst 10%": math.nan}
        better = better_of(metric, self.clients[metric]) if lower_is_better is None else ("higher", "lower")[lower_is_better]
        badness = np.where(np.isfinite(values), values if better == "lower" else -values, np.inf)
        worst = values[np.argsort(-badness, kind="stable")[: max(1, len(values) // 10)]]
        return {
            "mean": float(values.mean()),
            "std": float(values.std()),
            "worst 10%": float(worst.mean()) if better else math.nan,
        }


@without_mesh_of_context()
def evaluate(
    model: Model, params: Params, data: FederatedData, *, execution: Execution | None = None, batch_size: int = 256
) -> Evaluation:
    """Evaluates one set of parameters on every example of every client.

    Examples are read one after another in full batches, whatever clients they belong to, and the statistics of each example are
    added to the sums of its client. So many small clients take no longer than one large client.

    Args:
      model: has ``apply_for_eval`` and ``metrics``.
      params: the model's parameters.
      data: the population.
      execution: the devices, and whether examples are on them or are streamed; default `Auto`. `Debug` evaluates compiled, on
        one device.
      batch_size: examples per step and device. It affects speed and memory only.

    Returns:
      An `Evaluation`, for each client and for all examples together.

    Raises:
      ValueError: the data is not what the model reads, ``batch_size`` is not positive, or a metric does not return one entry
        per example; see `fedsim.metrics`.

    >>> import haiku as hk
    >>> model = Model.from_haiku(hk.transform(lambda examples: hk.Linear(2)(examples["x"])), features={
    ...     "x": jax.ShapeDtypeStruct((3,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)})
    >>> data = FederatedData.from_arrays({"x": np.ones([5, 3], np.float32), "y": np.zeros(5, np.int32)}, sizes=[4, 1])
    >>> evaluation = evaluate(model, model.init(jax.random.key(0)), data)
    >>> evaluation.clients["accuracy"].weight.tolist()
    [4, 1]
    """
    checks.whole(1, batch_size=batch_size)
    batch_size = min(batch_size, max(1, data.num_examples))
    data.check_dtypes()
    model.check(data)
    if not isinstance(execution, Jit):
        execution = Auto() if execution is None else Jit()
    mesh = execution.mesh()
    resident = _placement.is_resident(data, mesh, execution.memory)
    program = _compiled(model, mesh, resident, batch_size, data.num_clients, execution.deterministic)
    params = _placement.moved(params, _placement.shardings_of(params, mesh, division=execution.division(model)))
    if resident:
        everything = _placement.resident_columns(data, mesh), _resident_owner(data, mesh), data.num_examples
        chunks: Iterable[_Chunk] = [everything]
    else:
        ranks = _placement.replicate(_ranks(data), mesh)
        chunks = ((columns, ranks[owner], rows) for columns, owner, rows in _streamed_chunks(data, mesh, batch_size))
    # The host adds the devices' sums: without an all-reduce, an evaluation can run at the same time as any other program. The
    # sums of a chunk are fetched after the next chunk has been dispatched.
    clients: Statistics = {}
    results = (program(columns, rank, params, np.int32(rows)) for columns, rank, rows in chunks)
    for of_devices in _one_ahead(results):
        sums = jax.tree.map(lambda x: x.sum(0), on_host(of_devices))
        clients = jax.tree.map(np.add, clients, sums) if clients else sums
    clients = of_all_clients(clients, data.sizes > 0)
    return evaluation_of({name: clients[name] for name in model.metrics})  # JAX sorts the keys of dicts.


def evaluation_of(clients: Statistics) -> Evaluation:
    """Returns an `Evaluation` from the clients' sums, leaves ``[clients, ...]``."""

    def over_all(sums: np.ndarray) -> np.ndarray:
        return np.asarray(sums.sum(0))

    overall = {}
    for name, statistic in clients.items():
        value = np.asarray(jax.tree.map(over_all, statistic).result())
        overall[name] = value if value.ndim else value.item()
    return Evaluation(overall, clients)


def evaluation_of_none(model: Model, data: FederatedData) -> Evaluation:
    """Returns an evaluation of no example, with one client: which metrics there are, of which shapes, and what is better.

    The model is traced, and not computed.

    Args:
      model: has ``apply_for_eval`` and ``metrics``.
      data: the population whose examples are left out.

    Raises:
      ValueError: a metric does not return one entry per example; see `fedsim.metrics`.

    >>> import fedsim
    >>> empty = evaluation_of_none(fedsim.models.digits_logistic(), fedsim.datasets.load("digits").test)
    >>> empty.overall["loss"], empty.clients["accuracy"].better
    (nan, 'higher')
    """
    forms = sum_forms(model, jax.eval_shape(model.init_whole, rng.root(0)), data.columns)
    clients = jax.tree.map(lambda form: np.zeros((1, *form.shape), form.dtype), forms)
    with np.errstate(all="ignore"):
        return evaluation_of({name: clients[name] for name in model.metrics})  # JAX sorts the keys of dicts.


def _one_ahead(results: Iterable[T]) -> Iterator[T]:
    """Yields the same results, each after the next one has been computed."""
    before = None
    for result in results:
        if before is not None:
            yield before
        before = result
    if before is not None:
        yield before


def _compiled(model: Model, *setting: Any) -> Callable[..., Statistics]:
    kept = kept_with(model).setdefault("evaluation", {})
    if setting not in kept:
        kept[setting] = _compile(model, *setting)
    return kept[setting]


def _compile(
    model: Model, mesh: Any, resident: bool, batch_size: int, clients: int, deterministic: bool
) -> Callable[..., Statistics]:
    """Compiles ``(columns, rank int32 [rows], params, rows) -> sums [devices, ...]``; devices divide the rows."""

    def sums(columns: Mapping[str, jax.Array], rank: jax.Array, params: Params, rows: jax.Array) -> Any:
        forms = sum_forms(model, params, columns)
        devices = mesh.shape[AXIS]
        device = jax.lax.axis_index(AXIS) if devices > 1 else jnp.int32(0)
        share = -(-rows // devices)
        start = device * share if resident else jnp.int32(0)
        stop = start + jnp.clip(rows - device * share, 0, share)

        def step(i: jax.Array, totals: Statistics) -> Statistics:
            row = start + i * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
            mask = row < stop
            row = jnp.minimum(row, len(rank) - 1)
            examples = {name: column.at[row].get(mode="promise_in_bounds") for name, column in columns.items()}
            return add_by_client(totals, statistics(model, params, examples), mask, rank[row])

        totals = jax.lax.fori_loop(0, -(-(stop - start) // batch_size), step, flat_zeros(forms, clients))
        return jax.tree.map(lambda x: x[None], in_shape(forms, totals))

    placed = P() if resident else P(AXIS)
    specs = (placed, placed, P(), P())
    return compiled(sums, mesh, (specs, P(AXIS)), deterministic=deterministic)


def _ranks(data: FederatedData) -> np.ndarray:
    """Returns the position of each client among those with examples, ``int32 [clients]``, and any for clients without."""
    return np.cumsum(data.sizes > 0, dtype=np.int32) - 1


def _resident_owner(data: FederatedData, mesh: Mesh) -> jax.Array:
    """Returns the rank of each row's client, ``int32 [rows]``, on every device; it is cached like the columns."""

    def owner() -> jax.Array:
        ranks = np.repeat(_ranks(data), data.sizes)
        return _placement.replicate(ranks if len(ranks) else np.zeros(1, np.int32), mesh)

    return _placement.kept_with_data(data, "_resident_owner", mesh, owner)


def _rows(column: Any, first: int, last: int) -> Any:
    return column[first:last]


def _streamed_chunks(data: FederatedData, mesh: Mesh, batch_size: int) -> Iterator[_Chunk]:
    """Yields all examples in stored order, in chunks of one shape: columns, the client of each row, and the number of rows.

    A chunk is divided over the devices, each of which gets equally many of its rows, followed by padding.
    """
    row_bytes = max(1, data.nbytes // max(1, data.num_examples))
    devices = mesh.shape[AXIS]
    per_device = batch_size * max(1, _CHUNK_BYTES // (devices * row_bytes * batch_size))
    per_device = min(per_device, max(1, -(-data.num_examples // devices)))  # A single chunk needs no padding.
    chunk, sharded = per_device * devices, NamedSharding(mesh, P(AXIS))

    def owner(first: int, last: int) -> np.ndarray:
        return np.searchsorted(data.offsets, np.arange(first, last), side="right").astype(np.int32) - np.int32(1)

    for start in range(0, max(1, data.num_examples), chunk):
        stop = min(start + chunk, data.num_examples)
        share = -(-(stop - start) // devices)

        def placed(read: Callable[[int, int], Any], start: int = start, stop: int = stop, share: int = share) -> jax.Array:
            def of_device(device: int) -> np.ndarray:
                first = min(start + device * share, stop)
                rows = np.asarray(read(first, min(first + share, stop)))
                return np.pad(rows, [(0, per_device - len(rows)), *[(0, 0)] * (rows.ndim - 1)])

            return _placement.put_blocks(of_device, (devices, per_device, *np.shape(read(0, 0))[1:]), sharded)

        columns = {name: placed(functools.partial(_rows, column)) for name, column in data.columns.items()}
        yield columns, placed(owner), stop - start
