"""Several federations in one program: members that differ in numbers, states, cohorts and keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedsim import rng, tree
from fedsim.data import ClientRows, Cohort, FederatedData
from fedsim.execution import _memory, _placement
from fedsim.execution._compile import CompiledFunction, compiled
from fedsim.execution._device_round import CompileOptions
from fedsim.execution._execution import Jit, Pmap, check_cohorts
from fedsim.execution._layout import Layout, lanes_for, num_steps, plan_round, windows
from fedsim.execution._memory import remembered
from fedsim.execution._placement import AXIS
from fedsim.execution._traced_rounds import TracedRounds, traced_rounds
from fedsim.rounds import FederatedAlgorithm, RoundInfo, RoundPlan, State, parts_of

# The states before and after a dispatch exist at the same time, and a loop over rounds may copy one more.
_COPIES_OF_STATE = 3
_SHARE_OF_MEMORY = 0.5
_KEPT_PLANS_BYTES = 2**28


class Member(NamedTuple):
    """One federation that runs beside others in a `Wave`.

    Attributes:
      algorithm: its algorithm. Those of all members share programs, see `fedsim.execution.share_programs`.
      state: the state before the rounds that the wave runs.
      first: the cohort of its first round, which has the population and the root key.
      plans: identifies the cohorts, for example by their seed. Members with equal ``plans`` have equal cohorts in equal rounds.

    >>> import fedsim, optax
    >>> data, model = fedsim.datasets.load("digits").train, fedsim.models.digits_logistic()
    >>> algorithm = fedsim.algorithms.FedSGD(model=model, server_optimizer=optax.sgd(0.1))
    >>> sampler = fedsim.UniformSampler(data, clients=2, seed=7)
    >>> Member(algorithm, algorithm.init(jax.random.key(7)), sampler.cohort(0), plans=7).first.round
    0
    """

    algorithm: FederatedAlgorithm
    state: State
    first: Cohort
    plans: Any


def obstacle(algorithm: FederatedAlgorithm, state: State, cohort: Cohort) -> str | None:
    """Returns why members with this algorithm cannot run in one program; None if they can.

    Args:
      algorithm: of one member.
      state: its state before the first round.
      cohort: its largest cohort.

    >>> import fedsim, optax
    >>> data, model = fedsim.datasets.load("digits").train, fedsim.models.digits_logistic()
    >>> cohort = fedsim.UniformSampler(data, clients=2, seed=0).cohort(0)
    >>> for execution in (fedsim.Jit(), fedsim.Debug()):
    ...     algorithm = fedsim.algorithms.FedSGD(model=model, server_optimizer=optax.sgd(0.1), execution=execution)
    ...     print(obstacle(algorithm, algorithm.init(jax.random.key(0)), cohort))
    None
    their execution is Debug()
    """
    execution, data = getattr(algorithm, "execution", None), cohort.data
    if not isinstance(execution, Jit) or execution.differentiable:
        return f"their execution is {execution}"
    mesh = execution.mesh()
    if mesh.size > mesh.shape[AXIS]:
        return "several devices train each of their clients"
    if not _placement.is_resident(data, mesh, execution.memory):
        return "the examples are not all on the device"
    state = remembered(algorithm, state, data)
    clients = parts_of(state).clients
    if isinstance(clients, ClientRows) and _memory.stay_on_host(clients, mesh, execution.memory):
        return (
            "the clients' memories are not all on the device (memory='resident' of the execution, or "
            "--example-storage resident, places them there)"
        )
    if most_side_by_side(state, mesh, data) < 1:
        return "the states of the members do not fit the memory"
    program = traced_rounds(algorithm, state, data)[0].trace()
    if mesh.devices.flat[0].platform == "cpu":
        alone = Layout(cohort.slots, 1)
        plan = plan_round(cohort, alone, algorithm.batches, program.loops)
        for call in program.calls:
            if len(windows(plan, alone, num_steps(plan.size, algorithm.batches, call.batches, plan.most_steps))) > 1:
                return "their rounds are so long that a CPU runs each as several programs"
    return None


def most_side_by_side(state: State, mesh: Mesh, data: FederatedData) -> int:
    """Returns how many members' states, with the memories of all clients, fit the memory of one device.

    Args:
      state: of one member, of arrays or ``jax.ShapeDtypeStruct``, with the memories of clients, see `remembered`.
      mesh: the devices.
      data: the population.

    >>> from fedsim.execution import Jit
    >>> data = FederatedData.from_arrays({"x": [1.0, 2.0]}, sizes=[1, 1])
    >>> small, large = (jax.ShapeDtypeStruct([size], jnp.float32) for size in (2**10, 2**20))
    >>> most_side_by_side(small, Jit().mesh(), data) > most_side_by_side(large, Jit().mesh(), data) > 0
    True
    """
    import psutil

    clients = parts_of(state).clients
    rest = state._replace(clients=()) if clients != () else state
    size = tree.num_bits(rest) // 8
    if clients != ():
        size += data.num_clients * (tree.num_bits(_memory.row_shapes(clients)) // 8 + 1)
    device, free = mesh.devices.flat[0], psutil.virtual_memory().available
    available = free // mesh.size if device.platform == "cpu" else _placement.memory_limit(device)
    return int(_SHARE_OF_MEMORY * available) // max(1, _COPIES_OF_STATE * size)


class Wave:
    """Members that run at the same time. Their states stay on the devices between dispatches.

    Every device runs some members: one after another, or several side by side (`jax.vmap`). No device waits for another one.

    Args:
      members: one or more, at most ``side_by_side`` for each device, for which `obstacle` returns None.
      execution: the devices, and the number of clients that run side by side in all members of a device together.
      side_by_side: how many members run side by side on a device.
      widest: the cohort with the most slots of all members.
      length: the number of rounds that a dispatch has space for. Waves with equal lengths share one compiled program.
      plans: the plans of rounds that waves share. It is empty for the first wave.

    Attributes:
      states: the states of all members and their tables of clients' memories, on the devices, for `read_states`.

    >>> import fedsim, optax
    >>> data, model = fedsim.datasets.load("digits").train, fedsim.models.digits_logistic()
    >>> algorithm = fedsim.algorithms.FedSGD(model=model, server_optimizer=optax.sgd(0.1), execution=Jit())
    >>> cohorts = [list(fedsim.UniformSampler(data, clients=2, seed=seed).rounds(3)) for seed in (0, 1)]
    >>> members = [Member(algorithm, algorithm.init(jax.random.key(i)), own[0], i) for i, own in enumerate(cohorts)]
    >>> wave = Wave(members, Jit(), side_by_side=2, widest=cohorts[0][0], length=3, plans={})
    >>> infos = wave.read_infos(wave.run(cohorts), rounds=3)
    >>> len(infos), infos[0].clients["loss"].shape, len(wave.read_states(wave.states))
    (2, (3, 2), 2)
    """

    def __init__(
        self,
        members: Sequence[Member],
        execution: Jit,
        *,
        side_by_side: int,
        widest: Cohort,
        length: int,
        plans: dict[Any, RoundPlan],
    ) -> None:
        mesh, data = execution.mesh(), widest.data
        assert all(member.first.data is data for member in members), "members that run together have the same data"
        device = mesh.devices.flat[0]
        self._size, self._length, self._slots, self._plans = len(members), length, widest.slots, plans
        self._attack = widest.attack
        # Places without a member have the state of the last one and run no round.
        self._members = [*members, *[members[-1]] * (side_by_side * mesh.size - len(members))]
        full = [remembered(member.algorithm, member.state, data) for member in self._members]
        pairs = [traced_rounds(own.algorithm, state, data) for own, state in zip(self._members, full, strict=True)]
        self._traced, numbers = pairs[0][0], [numbers for _, numbers in pairs]
        assert all(traced is self._traced for traced, _ in pairs), "members that run together share programs"
        lanes = execution.lanes
        if lanes is None and device.platform != "cpu":
            lanes = max(1, lanes_for(self._traced.trace().state_bytes) // side_by_side)
        alone = Pmap(devices=(device,), lanes=lanes)
        self._layout = alone._layout(self._traced, widest, alone.mesh())
        self._columns = _placement.resident_columns(data, mesh)
        rows, keys = max(1, data.num_examples), [rng.typed(member.first.key) for member in self._members]
        options = CompileOptions(
            alone.mesh(), self._layout, True, True, widest.attack, execution.deterministic, rows, keys[0].dtype
        )
        self._traced.check(widest, options)
        self._run = _compiled(self._traced, options, mesh, side_by_side)
        placed = [_memory.placed(state, alone.mesh(), "resident") for state in full]
        tables = [parts_of(state).clients for state in placed]
        states = [state._replace(clients=()) if clients != () else state for state, clients in zip(placed, tables, strict=True)]
        table, state, key = (joined(jax.device_get(of_members), np.stack) for of_members in (tables, states, keys))
        # Unlike NumPy, JAX keeps Python floats weakly typed here, as they are as arguments of a program.
        numbers = jax.tree.map(lambda *values: jnp.stack([jnp.asarray(value) for value in values]), *numbers)
        own = NamedSharding(mesh, P(AXIS))
        self._numbers, self._key, self.states = jax.device_put((numbers, key, (state, table)), own)
        self._members = [member._replace(state=None) for member in self._members]  # frees the memory of the first states

    def run(self, cohorts: Sequence[Sequence[Cohort]]) -> Any:
        """Dispatches the next rounds of every member.

        Args:
          cohorts: those of the rounds of each member. All have the same number of rounds; a member without cohorts runs no
            round, and its state must not be used afterwards.

        Returns:
          The infos of the rounds on the devices, for `read_infos`.

        Raises:
          ValueError: an algorithm refuses its cohorts, or the attack is not that of ``widest``.
        """
        given = [*cohorts, *[[]] * (len(self._members) - len(cohorts))]
        for member, own in zip(self._members, given, strict=True):
            if own:
                check_cohorts(member.algorithm, own)
                if own[0].attack != self._attack:
                    raise ValueError(
                        f"Expected one attack in all rounds of members that run at the same time, got {self._attack} and "
                        f"in round {own[0].round} {own[0].attack}: give how='sequential' (--sweep-mode sequential)."
                    )
        plans = [self._plans_of(member, own) for member, own in zip(self._members, given, strict=True)]
        of_members = jax.tree.map(lambda *fields: np.stack(fields), *plans)
        state, table = self.states
        state, table, info = self._run(
            self._numbers, self._columns, table, state, self._key, of_members, np.int32(max(map(len, cohorts)))
        )
        self.states = state, table
        return info

    def _plans_of(self, member: Member, cohorts: Sequence[Cohort]) -> RoundPlan:
        """Returns the plans of some rounds of a member, leaves ``[length, ...]``, which members with equal cohorts share."""
        name = self._layout, member.plans, tuple(cohort.round for cohort in cohorts), self._length
        if name not in self._plans:
            batches, loops = member.algorithm.batches, self._traced.trace().loops
            plans = [plan_round(cohort, self._layout, batches, loops) for cohort in cohorts or [member.first]]
            found = RoundPlan.stacked(plans, self._length)
            found = found if cohorts else jax.tree.map(np.zeros_like, found)  # rounds without clients
            if len(self._plans) * sum(x.nbytes for x in found) > _KEPT_PLANS_BYTES:  # All plans have about the same size.
                self._plans.clear()
            self._plans[name] = found
        return self._plans[name]

    def read_infos(self, info: Any, rounds: int) -> list[Any]:
        """Waits for a dispatch of ``rounds`` rounds; returns the infos of each member on the host, leaves ``[rounds, ...]``."""
        info = jax.tree.map(lambda x: x[:, :rounds], jax.device_get(info))
        if isinstance(info, RoundInfo):
            info = info._replace(clients=jax.tree.map(lambda x: x[:, :, : self._slots], info.clients))
        return self._unstacked(info)

    def read_states(self, states: Any) -> list[State]:
        """Returns the state of each member on the host; ``states`` is a value that the attribute had."""
        state, table = jax.device_get(states)
        return self._unstacked(state._replace(clients=table) if table != () else state)

    def _unstacked(self, of_members: Any) -> list[Any]:
        return [jax.tree.map(lambda x, i=i: x[i, ...], of_members) for i in range(self._size)]


@functools.lru_cache(maxsize=32)
def _compiled(traced: TracedRounds, options: CompileOptions, mesh: Mesh, side_by_side: int) -> CompiledFunction:
    """Compiles the rounds of ``side_by_side`` members per device."""
    rounds = traced.compiled(options).run_rounds

    def together(
        numbers: Any, columns: Any, table: Any, state: State, key: jax.Array, plans: RoundPlan, num_rounds: jax.Array
    ) -> tuple[State, Any, RoundInfo]:
        if side_by_side == 1:
            own = jax.tree.map(lambda x: x[0], (numbers, table, state, key, plans))
            numbers, table, state, key, plans = own
            return jax.tree.map(lambda x: x[None], rounds(numbers, columns, table, state, key, plans, num_rounds))
        return jax.vmap(rounds, in_axes=(0, None, 0, 0, 0, 0, None))(numbers, columns, table, state, key, plans, num_rounds)

    own = P(AXIS)
    specs = (own, P(), own, own, own, own, P())
    return compiled(together, mesh, (specs, own), deterministic=options.deterministic)


def joined(parts: Sequence[Any], join: Callable[..., np.ndarray]) -> Any:
    """Joins the leaves of pytrees on the host. Arrays of random keys stay JAX arrays.

    Args:
      parts: pytrees of one structure.
      join: a function from a list of arrays to one, such as `np.stack` or `np.concatenate`.

    >>> joined([{"w": np.zeros(3)}, {"w": np.ones(3)}], np.stack)["w"].shape
    (2, 3)
    """

    def join_leaves(*leaves: Any) -> Any:
        if isinstance(leaves[0], jax.Array) and jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key):
            words = join([np.asarray(jax.random.key_data(leaf)) for leaf in leaves])
            return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(leaves[0]))
        return join([np.asarray(leaf) for leaf in leaves])

    return jax.tree.map(join_leaves, *parts)
