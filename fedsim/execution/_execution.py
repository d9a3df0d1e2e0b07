"""`Execution`: how a cohort is run. It is a value that is passed in; it affects the speed but not the result."""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import checks, rng
from fedsim.data import Batches, ClientRows, Cohort, FederatedData
from fedsim.execution import _memory, _placement
from fedsim.execution._device_round import CompileOptions
from fedsim.execution._devices import first_devices
from fedsim.execution._layout import Layout, lanes_for, num_steps, overhead_of, plan_round, rounded_slots, widths_for, windows
from fedsim.execution._memory import remembered
from fedsim.execution._placement import AXIS, Memory
from fedsim.execution._tracebacks import WithoutInternalFrames
from fedsim.execution._traced_rounds import TracedRounds, traced_rounds
from fedsim.model import WHOLE, Division, Model
from fedsim.primitives import without_mesh_of_context
from fedsim.rounds import (
    ClientTable,
    FederatedAlgorithm,
    RoundInfo,
    RoundPlan,
    RoundProgram,
    State,
    TraceOptions,
    check_scales,
    kept_with,
    parts_of,
)
from fedsim.samplers import check_is_cohort, same_key


class Execution:
    """How rounds are run. Subclasses are frozen dataclasses.

    The returned state is on the devices that ran the round, and another execution moves it to its own devices. Before you do
    arithmetic with states of two executions, move them to the host with `jax.device_get`.

    Guarantees:
      - A cohort gives the same result with any number of devices and slots, up to the order of floating-point sums.
      - Cohorts of similar numbers of clients share one compiled program, whatever the clients' sizes.
      - A cohort without clients leaves the state unchanged, bit for bit, unless the aggregator acts nevertheless, see
        `fedsim.aggregators.Aggregator.acts_on`.

    A new way of running clients, see `fedsim.execution.run_round`:

    >>> import fedsim
    >>> class OneAfterAnother(Execution):
    ...     def run_one(self, algorithm, state, cohort):
    ...         run_clients = lambda work, shared, clients: [work(shared, client) for client in clients]
    ...         return fedsim.execution.run_round(algorithm, state, cohort, run_clients)
    >>> data = fedsim.FederatedData.from_arrays({"x": np.array([0.1, 0.6, 0.7], np.float32)}, sizes=[2, 1])
    >>> histogram = fedsim.algorithms.Histogram(bins=2, execution=OneAfterAnother())
    >>> histogram.apply(histogram.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))[0].counts.tolist()
    [0, 1, 2, 0]

    Attributes:
      keeps_memories: whether the states have what clients keep between rounds. If not, it is where the clients run.
      waits: whether `run` returns when the results are computed, so that nothing is gained by sending rounds to the devices
        before the results of the last ones are read. Runs then send one round at a time.
    """

    keeps_memories: ClassVar[bool] = True
    waits: ClassVar[bool] = False

    def run(
        self, algorithm: FederatedAlgorithm, state: State, cohorts: Sequence[Cohort], *, max_rounds: int | None = None
    ) -> tuple[State, RoundInfo]:
        """Runs one round per cohort, in order.

        Args:
          algorithm: the algorithm to run.
          state: the state before the first round; it is not changed.
          cohorts: one or more, with the same population, root key, number of slots and attack.
          max_rounds: all calls with at most this many cohorts share one compiled program; default: as many as given.

        Returns:
          The state after the last round, and each round's info, stacked: leaves ``[rounds, ...]``.

        Raises:
          ValueError: the cohorts cannot run together, or the algorithm cannot run on their data.
        """
        raise NotImplementedError

    def run_one(self, algorithm: FederatedAlgorithm, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        """Runs a single round; its info is not stacked."""
        raise NotImplementedError

    def took_part(self, cohorts: Sequence[Cohort]) -> Sequence[Cohort]:
        """Returns the cohorts of the rounds that `run` has just run for these: others, if clients answer when they can."""
        return cohorts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jit(Execution):
    """Runs compiled rounds on one device.

    On a CPU, clients run one after another, each for its own number of steps. On a GPU or TPU, clients with similar numbers of
    steps run side by side, in groups.

    Attributes:
      lanes: the largest number of clients that run side by side on a device. None chooses: 1 on a CPU, where more are slower;
        on a GPU or TPU, as many as keep the device busy with states of the clients' size, at most 256. If the device runs out
        of memory, the round runs again with half as many, and a warning states the number.
      memory: ``"resident"`` keeps the examples of the whole population on the device, ``"stream"`` only those of the current
        cohorts, ``"auto"`` chooses by size. It also applies to what clients keep between rounds.
      deterministic: whether a seed repeats a run bit for bit on a GPU, too, where this takes longer.
      differentiable: whether reverse-mode derivatives (`jax.grad`) of rounds are possible, with respect to the state and to the
        algorithm's numbers. Programs then depend on the size of the largest client, a round is always one program, and
        ``memory`` is ``"resident"``.

    Raises:
      ValueError: ``lanes`` is not a positive whole number, or another attribute has a value that is not described.

    >>> Jit(lanes=4)
    Jit(lanes=4, memory='auto', deterministic=False, differentiable=False)
    """

    lanes: int | None = None
    memory: Memory = "auto"
    deterministic: bool = False
    differentiable: bool = False

    def __post_init__(self) -> None:
        checks.whole(1, or_none=True, lanes=self.lanes, remedy="None chooses by the device")
        checks.one_of("auto", "resident", "stream", memory=self.memory)
        checks.truth(deterministic=self.deterministic, differentiable=self.differentiable)

    def mesh(self) -> Mesh:
        """Returns the devices in use."""
        return _mesh(tuple(jax.local_devices()[:1]))

    def division(self, model: Model | None) -> Division:
        """Returns how a model is divided over devices that train one client together; here it is not."""
        return WHOLE

    def run(
        self, algorithm: FederatedAlgorithm, state: State, cohorts: Sequence[Cohort], *, max_rounds: int | None = None
    ) -> tuple[State, RoundInfo]:
        check_cohorts(algorithm, cohorts)
        rounds = len(cohorts) if self.differentiable else max(max_rounds or 0, len(cohorts))
        done, infos = 0, []
        while done < len(cohorts):
            with WithoutInternalFrames(), without_mesh_of_context():
                state, info, count = self._dispatch(algorithm, state, cohorts[done:], rounds)
            infos.append((info, count))
            done += count
        if len(infos) == 1:
            return state, jax.tree.map(lambda x: x[:done], infos[0][0]) if done < rounds else infos[0][0]
        # Concatenated on the host: a device would compile this for every number of rounds.
        parts = [jax.tree.map(lambda x, n=n: x[:n], info) for info, n in jax.device_get(infos)]
        return state, jax.tree.map(lambda *rows: jnp.asarray(np.concatenate(rows)), *parts)

    def run_one(self, algorithm: FederatedAlgorithm, state: State, cohort: Cohort) -> tuple[State, RoundInfo]:
        check_cohorts(algorithm, [cohort])
        with WithoutInternalFrames(), without_mesh_of_context():
            return self._dispatch(algorithm, state, [cohort], None)[:2]

    @without_mesh_of_context()
    def lower(self, algorithm: FederatedAlgorithm, cohort: Cohort, state: State | None = None) -> jax.stages.Lowered:
        """Lowers one round for ahead-of-time compilation, to inspect its text, cost or memory.

        The round is one program with resident examples and memories, even if `apply` would split it or stream them. Nothing is
        sent to a device, so the devices may be descriptions, see `jax.experimental.topologies`.

        Args:
          algorithm: the algorithm to run.
          cohort: the round's clients.
          state: the state before the round; default: a state from ``init``.

        >>> import optax, fedsim
        >>> data = fedsim.datasets.load("digits").train
        >>> algorithm = fedsim.algorithms.FedAvg(
        ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
        >>> lowered = Jit().lower(algorithm, fedsim.UniformSampler(data, clients=5, seed=0).cohort(0))
        >>> lowered.compile().memory_analysis().output_size_in_bytes > 4 * 650  # 650 parameters, and an info
        True
        """
        check_cohorts(algorithm, [cohort])
        mesh, data = self.mesh(), cohort.data
        state = jax.eval_shape(algorithm.init, jax.random.key(0)) if state is None else state
        traced, numbers = traced_rounds(algorithm, state, data, self._trace_options(cohort, mesh))
        state = remembered(algorithm, state, data)
        layout = self._layout(traced, cohort, mesh)
        plan = plan_round(cohort, layout, algorithm.batches, traced.trace().loops)
        clients, table = parts_of(state).clients, None
        if clients != ():
            rows = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((data.num_clients, *x.shape), x.dtype), _memory.row_shapes(clients)
            )
            table, state = ClientTable(rows, jax.ShapeDtypeStruct((data.num_clients,), bool)), state._replace(clients=())
        columns = {  # at least one row, as `resident_columns` has
            name: jax.ShapeDtypeStruct((max(1, c.shape[0]), *c.shape[1:]), jax.dtypes.canonicalize_dtype(c.dtype))
            for name, c in data.columns.items()
        }
        key = rng.typed(cohort.key)
        arguments = numbers, columns, table or (), state, key, RoundPlan.stacked([plan], 1), np.int32(1)
        everywhere = NamedSharding(mesh, P())
        shardings = [jax.tree.map(lambda _: everywhere, argument) for argument in arguments]
        division = self.division(getattr(algorithm, "model", None))
        shardings[2:4] = _placement.shardings_of((table or (), state), mesh, layout.block, division)
        shapes = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type),
            jax.eval_shape(lambda *arguments: arguments, *arguments),
            tuple(shardings),
        )
        rows = next(iter(columns.values())).shape[0]
        options = CompileOptions(mesh, layout, True, False, cohort.attack, self.deterministic, rows, key.dtype, division)
        return traced.compiled(options).rounds.lower(*shapes)

    def _trace_options(self, cohort: Cohort, mesh: Mesh) -> TraceOptions:
        """Returns what the trace of a round depends on if all examples are on the devices, and no device has its own block."""
        return TraceOptions(
            slots=rounded_slots(cohort.slots),
            rows=max(1, cohort.data.num_examples),
            attack=cohort.attack,
            most_examples=self._most_examples(cohort),
            axis=(AXIS, mesh.shape[AXIS]) if mesh.shape[AXIS] > 1 else None,
            key=rng.typed(cohort.key).dtype,
            batch_sharding=_placement.batch_sharding(mesh),
            whole=_placement.whole_on_client(mesh),
            lockstep=_placement.in_lockstep(mesh),
        )

    def _most_examples(self, cohort: Cohort) -> int | None:
        return int(cohort.data.sizes.max(initial=1)) if self.differentiable else None

    def _layout(self, traced: TracedRounds, cohort: Cohort, mesh: Mesh) -> Layout:
        slots, calls, state_bytes = rounded_slots(cohort.slots), traced.trace().calls, traced.trace().state_bytes
        lanes = self.lanes or (1 if mesh.devices.flat[0].platform == "cpu" else lanes_for(state_bytes))
        devices = mesh.shape[AXIS]
        lanes = min(lanes, -(-slots // devices), traced.fewer_lanes.get(mesh, lanes))
        overhead = 0.0 if lanes == 1 else overhead_of(state_bytes)
        most_examples = self._most_examples(cohort)
        block, rest = divmod(cohort.data.num_clients, devices)
        can_be_divided = devices == mesh.size > 1 and rest == 0 and not mesh.is_multi_process
        is_divided = can_be_divided and len(calls) > 0 and all(call.is_divisible for call in calls)
        return Layout(slots, devices, widths_for(lanes), overhead, most_examples, block if is_divided else None)

    def _dispatch(
        self, algorithm: FederatedAlgorithm, state: State, cohorts: Sequence[Cohort], rounds: int | None
    ) -> tuple[State, Any, int]:
        """Runs the first of these rounds, as many as fit one program.

        Args:
          algorithm: the algorithm to run.
          state: the state before the first round.
          cohorts: one per round.
          rounds: the number of rounds that the program has space for; None runs a single round whose info is not stacked.

        Returns:
          The state, the infos, and how many rounds ran.
        """
        mesh, data = self.mesh(), cohorts[0].data
        traced, numbers = traced_rounds(algorithm, state, data, self._trace_options(cohorts[0], mesh))
        division = self.division(getattr(algorithm, "model", None))
        memory: Memory = "resident" if self.differentiable else self.memory
        state = _memory.placed(remembered(algorithm, state, data), mesh, memory, division)
        while True:
            layout = self._layout(traced, cohorts[0], mesh)
            try:
                return self._dispatch_as(layout, division, traced, numbers, mesh, algorithm, state, cohorts, rounds)
            except jax.errors.JaxRuntimeError as error:
                lanes = max(layout.widths)
                if "RESOURCE_EXHAUSTED" not in str(error) or lanes <= 1:
                    raise
                traced.fewer_lanes[mesh] = lanes // 2
                warnings.warn(
                    f"The device ran out of memory with {lanes} clients side by side, so the round runs again with "
                    f"{lanes // 2}. Set lanes={lanes // 2} to start with that.",
                    stacklevel=4,
                )

    def _dispatch_as(
        self, layout: Layout, division: Division, traced: TracedRounds, numbers: Any, mesh: Mesh,
        algorithm: FederatedAlgorithm, state: State, cohorts: Sequence[Cohort], rounds: int | None,
    ) -> tuple[State, Any, int]:  # fmt: skip
        first, data, clients = cohorts[0], cohorts[0].data, parts_of(state).clients
        is_gathered = isinstance(clients, ClientRows)
        # Gathered memories are written back after each round.
        may_split = mesh.devices.flat[0].platform == "cpu" and not self.differentiable
        together = cohorts[:1] if is_gathered else cohorts
        plans, parts = _plans(layout, algorithm.batches, traced.trace(), together, may_split)
        count, table = len(plans), clients
        if is_gathered:
            table, plans[0] = _memory.gathered(clients, plans[0], len(first), mesh, division)
        if resident := self.differentiable or _placement.is_resident(data, mesh, self.memory):
            columns = _placement.resident_columns(data, mesh)
        else:
            columns, plans = _placement.streamed_columns(data, plans, mesh, rounds or 1)
        rows = next(iter(columns.values())).shape[0] // (1 if resident else mesh.shape[AXIS])
        key = rng.typed(first.key)
        options = CompileOptions(
            mesh, layout, resident, rounds is not None, first.attack, self.deterministic, rows, key.dtype, division
        )
        traced.check(first, options)
        state = state._replace(clients=()) if clients != () else state
        state = _placement.moved(state, _placement.shardings_of(state, mesh, layout.block, division))
        arguments = numbers, columns, table, state, _placement.replicate(key, mesh), RoundPlan.stacked(plans, rounds or 1)
        if not resident or _placement.must_wait(mesh):
            # For streamed data, so that the examples of at most two dispatches are on the device.
            jax.block_until_ready((state, table))
        if parts:
            state, table, infos = traced.compiled(options).run_in_parts(arguments, parts)
        else:
            state, table, infos = traced.compiled(options).rounds(*arguments, np.int32(count))
        if clients != ():
            kept = _memory.written_back(clients, table, plans[0], len(first)) if is_gathered else table
            state = state._replace(clients=kept)
        if isinstance(infos, RoundInfo):
            infos = infos._replace(clients=cut_rows(infos.clients, first.slots, stacked=rounds is not None))
        return state, infos, count


def _plans(
    layout: Layout, batches: Batches, program: RoundProgram, cohorts: Sequence[Cohort], may_split: bool
) -> tuple[list[RoundPlan], list[list[np.ndarray]]]:
    """Plans as many of these rounds as run in one program, or a single long round and the windows of each of its calls.

    A long round always runs alone, so that the order of its sums does not depend on other rounds.
    """
    plans: list[RoundPlan] = []
    for cohort in cohorts:
        plan = plan_round(cohort, layout, batches, program.loops)
        if may_split:
            steps = [num_steps(plan.size, batches, call.batches, plan.most_steps) for call in program.calls]
            parts = [windows(plan, layout, of_call) for of_call in steps]
            if any(len(of_call) > 1 for of_call in parts):
                return (plans, []) if plans else ([plan], parts)
        plans.append(plan)
    return plans, []


def cut_rows(rows: Any, slots: int, *, stacked: bool = False) -> Any:
    """Keeps the first ``slots`` rows of every leaf, on the host, because a device would compile this for every size.

    Args:
      rows: leaves ``[>= slots, ...]``.
      slots: the number of rows to keep.
      stacked: True if there is an axis of rounds before that of the rows, leaves ``[rounds, >= slots, ...]``.

    >>> cut_rows({"size": jnp.array([7, 5, 0, 0])}, slots=2)["size"].tolist()
    [7, 5]
    >>> cut_rows(jnp.ones([3, 4]), slots=2, stacked=True).shape
    (3, 2)
    """
    at = (slice(None), slice(slots)) if stacked else (slice(slots),)
    leaves = jax.tree.leaves(rows)
    if all(x.shape[len(at) - 1] == slots for x in leaves):
        return rows
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    return jax.tree.map(lambda x: x[at] if traced else jnp.asarray(np.asarray(x)[at]), rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pmap(Jit):
    """Runs compiled rounds, with the cohort divided among several devices (`jax.shard_map`, the successor of pmap).

    There is one all-reduce per round. On a CPU, first call `fedsim.use_all_cores`, which makes every core a device. The devices
    are those of all processes of the run, see `fedsim.distributed`.

    Attributes:
      devices: the number of devices, equally many of each process, or a sequence of devices; None uses all.

    Raises:
      ValueError: there are fewer devices than requested.

    >>> Pmap(devices=2).devices
    2
    """

    devices: int | Sequence[jax.Device] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        devices = self.devices
        if isinstance(devices, Sequence) and devices and all(isinstance(device, jax.Device) for device in devices):
            object.__setattr__(self, "devices", tuple(devices))
        else:
            checks.whole(1, or_none=True, devices=devices, remedy="None uses all devices")
        if self.differentiable and not isinstance(self, Auto):
            raise ValueError(
                f"{type(self).__name__} does not support differentiable=True, which runs on one device: use "
                "Jit(differentiable=True)."
            )

    def mesh(self) -> Mesh:
        if isinstance(self.devices, tuple):
            return _mesh(self.devices)
        return _mesh(first_devices(self.devices))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(Pmap):
    """Runs compiled rounds on all devices, like `Pmap`, or on a single one if ``differentiable``.

    >>> Auto().mesh().size == jax.device_count(), Auto(differentiable=True).mesh().size
    (True, 1)
    """

    def mesh(self) -> Mesh:
        return Jit.mesh(self) if self.differentiable else super().mesh()


@functools.cache
def _mesh(devices: tuple[jax.Device, ...]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,))


def check_cohorts(algorithm: FederatedAlgorithm, cohorts: Sequence[Cohort]) -> None:
    """Raises ``ValueError`` if the algorithm cannot read the data, or if the cohorts cannot run together, see `runs_with`.

    An algorithm checks each population once, and an attack does, too.

    Args:
      algorithm: which is to run.
      cohorts: one per round.

    >>> import fedsim
    >>> data = fedsim.FederatedData.from_arrays({"x": np.zeros(3, np.float32)}, sizes=[1, 2])
    >>> cohorts = [fedsim.UniformSampler(data, clients=1, seed=seed).cohort(0) for seed in (0, 1)]
    >>> check_cohorts(fedsim.algorithms.Histogram(bins=2), cohorts)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: Expected cohorts with the same population, number of slots, root key and attack, got different ones: ...
    """
    if not cohorts:
        raise ValueError("Expected cohorts to have at least one cohort, got none.")
    first = cohorts[0]
    for cohort in cohorts:
        check_is_cohort(cohort, f"{type(algorithm).__name__} got")
        known = getattr(algorithm, "staleness", None)
        largest = 0 if cohort.arrivals is None else cohort.arrivals.staleness.max(initial=0)
        if known is None and cohort.arrivals is not None:
            raise ValueError(
                f"The clients of round {cohort.round} may have started in earlier rounds, and {type(algorithm).__name__} has "
                f"staleness=None: set staleness=fedsim.Staleness(bound={largest})."
            )
        if cohort.arrivals is not None:
            check_scales(algorithm, cohort.arrivals.weights, cohort.arrivals.scales)
        if known is not None and largest > known.bound:
            raise ValueError(
                f"Expected a staleness of at most {known.bound}, got {largest} in round {cohort.round}: set "
                f"staleness=fedsim.Staleness(bound={largest})."
            )
        if cohort.rows is not None:
            _check_arriving(algorithm, cohort)
        if not runs_with(cohort, first):
            raise ValueError(
                "Expected cohorts with the same population, number of slots, root key and attack, got different ones: run them "
                "in separate calls."
            )
    check_population(algorithm, first.data)
    attacked = vars(first.data).setdefault("_attacked", set())
    if first.attack is not None and first.attack not in attacked:
        first.attack.check(first.data)
        attacked.add(first.attack)


def check_population(algorithm: FederatedAlgorithm, data: FederatedData) -> None:
    """Raises ``ValueError`` if the algorithm cannot train on the clients of ``data``. It checks each population once.

    >>> import optax, fedsim
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(-0.1), batches=fedsim.Batches(size=20))
    >>> check_population(algorithm, fedsim.datasets.load("digits").train)
    Traceback (most recent call last):
    ...
    ValueError: Expected client_optimizer to descend...
    """
    # The range of integers depends on x64.
    checked = kept_with(algorithm).setdefault(f"checked, {jax.dtypes.canonicalize_dtype(int)}", weakref.WeakSet())
    if data not in checked:
        data.check_dtypes()
        algorithm.check(data)
        checked.add(data)


def without_arrivals(cohort: Cohort, source: str) -> Cohort:
    """Returns a cohort without its arrivals, whose weights and scales are for aggregation.

    Args:
      cohort: the clients.
      source: what needs them, for the error message.

    Raises:
      ValueError: clients have started in earlier rounds; without an algorithm there is no model of these rounds.

    >>> from fedsim.data import FederatedData
    >>> from fedsim.samplers import ClusteredSampling
    >>> data = FederatedData.from_arrays({"x": np.zeros(3, np.float32)}, sizes=[1, 2])
    >>> without_arrivals(ClusteredSampling(data, clients=1, seed=0).cohort(0), "map_clients").arrivals is None
    True
    """
    if (arrivals := cohort.arrivals) is None:
        return cohort
    if np.any(arrivals.staleness) or np.any(arrivals.key_rounds != cohort.round):
        raise ValueError(
            f"Expected clients that start in round {cohort.round} for {source}, got some that started earlier: give a cohort "
            "of a sampler without a virtual clock."
        )
    return dataclasses.replace(cohort, arrivals=None)


def _check_arriving(algorithm: FederatedAlgorithm, cohort: Cohort) -> None:
    """Raises ``ValueError`` if the clients of an algorithm cannot have other examples in other rounds."""
    if algorithm.capabilities.reads_on:
        raise ValueError(
            f"The clients of {type(algorithm).__name__} go on to read their examples in the order of earlier rounds, so no "
            "examples can arrive between rounds: use a sampler without Arriving, or another algorithm."
        )
    if callable(check_padding := getattr(algorithm, "check_padding", None)):
        check_padding(cohort.sizes)


def runs_with(cohort: Cohort, other: Cohort) -> bool:
    """Returns whether two cohorts can run in one dispatch: population, number of slots, root key and attack are the same.

    >>> from fedsim.data import FederatedData
    >>> from fedsim.samplers import UniformSampler
    >>> data = FederatedData.from_arrays({"x": np.zeros(3)}, sizes=[1, 2])
    >>> first, second = UniformSampler(data, clients=1, seed=0).rounds(2)
    >>> runs_with(second, first), runs_with(UniformSampler(data, clients=1, seed=1).cohort(0), first)
    (True, False)
    """
    same_setting = cohort.data is other.data and cohort.slots == other.slots and cohort.attack == other.attack
    return same_setting and same_key(cohort.key, other.key)
