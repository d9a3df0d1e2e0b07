"""`plan`: the costs of a round, from shapes, from compiled programs and from a short measurement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.interpreters import partial_eval
from jax.sharding import Mesh

from fedsim import checks, rng, tree
from fedsim.algorithm import Algorithm
from fedsim.data import ClientRows, Cohort, FederatedData
from fedsim.execution import AXIS, Jit, check_cohorts, is_resident, memory_limit, placed, rounded_slots, traced_rounds
from fedsim.planning._collectives import collectives_of
from fedsim.planning._flops import flops_of
from fedsim.planning._plan import Plan
from fedsim.planning._timing import seconds_of_round
from fedsim.rounds import FederatedState, TracedCall, parts_of, send_down, server_state
from fedsim.samplers import check_is_cohort

_MANY = 4  # memory is determined for a second cohort that is this many times as large


def plan(algorithm: Algorithm, cohort: Cohort, *, measure: bool = True) -> Plan:
    """Determines the costs of a round before any round runs.

    The round is traced with shapes and compiled, but not run.

    - Messages: from shapes, as `RoundInfo` counts them.
    - Computation: XLA's count of the operations of one local step as it runs on this platform, times the number of steps.
      What a client does outside of its loops does not count.
    - Memory: XLA's analysis of the round as one program, for this cohort and for a larger one, with the examples and the
      clients' memories where the execution places them.
    - Collectives: those in the text of the compiled program.
    - Time: a few clients of the cohort take a few steps of the recorded loops, for about a second. Their results are not used.
      The time of the server's update is not included.

    Args:
      algorithm: the algorithm to run, with its execution. Its devices may be descriptions, see
        `jax.experimental.topologies`, without ``measure``.
      cohort: the clients of a round. Another cohort of the same sampler has nearly the same costs.
      measure: whether to measure and to estimate the time.

    Raises:
      ValueError: an argument is of another type, or the algorithm cannot run on these clients.

    >>> import optax, fedsim
    >>> data = fedsim.datasets.load("digits").train
    >>> algorithm = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10),
    ...     execution=fedsim.Jit())
    >>> costs = plan(algorithm, fedsim.UniformSampler(data, clients=5, seed=0).cohort(0), measure=False)
    >>> costs.parameters, costs.bytes_up, costs.collectives_in_loops, costs.largest_cohort
    (650, 2600.0, {}, 100)
    """
    checks.instance(Algorithm, "fedsim.algorithms.FedAvg(...)", algorithm=algorithm)
    check_is_cohort(cohort, "fedsim.plan got")
    checks.truth(measure=measure)
    state = server_state(jax.eval_shape(algorithm.init, rng.root(0)))
    execution = algorithm.execution
    mesh = execution.mesh() if isinstance(execution, Jit) else Jit().mesh()
    numbers = jax.tree.leaves(getattr(state, "params", state))
    known = Plan(
        algorithm=type(algorithm).__name__,
        platform=mesh.devices.flat[0].platform,
        devices=mesh.size,
        population=cohort.data.num_clients,
        clients=len(cohort),
        parameters=sum(x.size for x in numbers),
    )
    if type(algorithm).apply is not Algorithm.apply:
        return known
    check_cohorts(algorithm, [cohort])
    program = traced_rounds(algorithm, state, cohort.data)[0].trace()
    calls, memory = program.calls, program.first.clients[0] if program.first.clients != () else ()
    fields = _messages(calls, cohort.num_steps(algorithm.batches) > 0) | _computation(algorithm, calls, cohort)
    if isinstance(execution, Jit):
        fields |= _compiled(algorithm, execution, cohort, mesh) | _division(execution, getattr(algorithm, "model", None))
    if measure:
        fields["seconds"] = seconds_of_round(algorithm, calls, memory, cohort, mesh.shape[AXIS])
    return dataclasses.replace(known, **fields)


def _division(execution: Jit, model: Any) -> dict[str, Any]:
    """Returns how a model is divided over the devices of a client, and what is not."""
    division = execution.division(model)
    if not any(any(spec) for _, _, spec in division.parameters) and getattr(execution, "model", 1) == 1:
        return {}
    whole = {name: math.prod(shape) for name, shape, spec in division.parameters if not any(spec)}
    return {"divided_by": "largest axes" if model.shardings is None else "the rule of the model", "whole": whole}


def _messages(calls: Sequence[TracedCall], takes_part: np.ndarray) -> dict[str, Any]:
    """Returns the sizes of messages, in total over the calls of a round whose updates are aggregated."""
    sizes = [(_bits_up(call), _bits_down(call)) for call in calls if call.aggregator is not None]
    fields: dict[str, Any] = {"passes": sum(not call.is_divisible for call in calls)}
    for number, name in enumerate(("up", "down")):
        each = sum(size[number][0] for size in sizes) / 8
        fields |= {f"bytes_{name}": each, f"bytes_{name}_per_round": each * int(takes_part.sum())}
        fields[f"{name}_is_exact"] = all(size[number][1] for size in sizes)
    return fields


def _bits_up(call: TracedCall) -> tuple[float, bool]:
    aggregator, update = call.aggregator, call.update
    assert aggregator is not None
    if aggregator.sends_unchanged:
        # An algorithm may report the size itself, see `fedsim.rounds.RoundInfo`.
        return float(tree.num_bits(update)), "bits_up" not in call.entries

    def bits(update: Any, state: Any, memory: Any, key: jax.Array) -> jax.Array:
        return jnp.asarray(aggregator.send(update, state, memory, key).bits)

    kept = jax.eval_shape(lambda update: (aggregator.init(update), aggregator.client_memory(update)), update)
    return _size(bits, update, *kept, jax.eval_shape(lambda: rng.root(0)))


def _bits_down(call: TracedCall) -> tuple[float, bool]:
    statistics = tree.num_bits(call.statistics)
    if call.downlink is None:
        return float(tree.num_bits(call.shared) + statistics), True
    floats = [x for x in jax.tree.leaves(getattr(call.shared, "params", call.shared)) if tree.is_float(x)]
    memory = jax.eval_shape(call.downlink.init, floats)

    def bits(shared: Any, memory: Any, key: jax.Array) -> jax.Array:
        return tree.add_bits(send_down(call.downlink, shared, memory, key)[2], statistics)

    return _size(bits, call.shared, memory, jax.eval_shape(lambda: rng.root(0)))


def _size(bits: Callable[..., jax.Array], *shapes: Any) -> tuple[float, bool]:
    """Returns the size of a message, and whether it depends only on shapes; otherwise it is that of normal values."""
    jaxpr = jax.make_jaxpr(bits)(*shapes).jaxpr
    is_exact = not any(partial_eval.dce_jaxpr(jaxpr, [True])[1])
    return float(jax.jit(bits)(*_normal(shapes))), is_exact


def _normal(shapes: Any) -> Any:
    draw = np.random.default_rng(0)

    def drawn(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return rng.root(0)
        return jnp.asarray(draw.normal(size=x.shape) if tree.is_float(x) else np.zeros(x.shape), x.dtype)

    return jax.tree.map(drawn, shapes)


def _computation(algorithm: Algorithm, calls: Sequence[TracedCall], cohort: Cohort) -> dict[str, Any]:
    steps, flops = 0, 0.0
    for loop in (loop for call in calls for loop in call.loops):
        own = int(loop.num_steps(cohort, algorithm.batches).sum())
        steps, flops = steps + own, flops + own * flops_of(loop.jaxpr)
    clients = max(1, int(np.count_nonzero(cohort.num_steps(algorithm.batches))))
    return {
        "steps_per_round": steps,
        "steps_per_client": steps / clients,
        "flops_per_round": flops,
        "flops_per_client": flops / clients,
    }


def _compiled(algorithm: Algorithm, execution: Jit, cohort: Cohort, mesh: Mesh) -> dict[str, Any]:
    """Returns what compiled programs show: memory, collectives, and the largest cohort that fits."""
    population, clients, device = cohort.data.num_clients, max(1, len(cohort)), mesh.devices.flat[0]
    are_gathered = _are_gathered(algorithm, execution, cohort, mesh)
    are_resident = is_resident(cohort.data, mesh, execution.memory)
    another = min(_MANY * clients, population) if clients < population else -(-clients // _MANY)
    texts, needed, slots, examples = [], [], [], 0.0
    for size in (clients, another):
        slots.append(min(population, max(size, cohort.slots * size // clients)))
        stand_in = _stand_in(cohort, size, slots[-1], slots[-1] if are_gathered else population)
        compiled = execution.lower(algorithm, stand_in).compile()
        texts.append(compiled.as_text() or "")
        memory: Any = compiled.memory_analysis()
        own = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        if are_resident:
            needed.append(own - memory.alias_size_in_bytes + _bytes_on_device(cohort.data) - _bytes_on_device(stand_in.data))
            continue
        needed.append(own - memory.alias_size_in_bytes - _bytes_on_device(stand_in.data))
        # Streamed examples are divided among the devices, and those of two dispatches are there at a time.
        examples = examples or 2 * _bytes_on_device(stand_in.data) / mesh.shape[AXIS] / clients
    is_cpu = device.platform == "cpu"
    free = psutil.virtual_memory().available // mesh.size if is_cpu else memory_limit(device)
    outside, inside = collectives_of(texts[0])
    return {
        "bytes_per_device": needed[0] + int(examples * clients),
        "free_bytes_per_device": free,
        "collectives": outside,
        "collectives_in_loops": inside,
        "largest_cohort": _largest(population, cohort.slots / clients, slots, needed, examples, free),
    }


def _bytes_on_device(data: FederatedData) -> int:
    """Returns the size of examples as devices have them, where without x64 numbers of 64 bits have 32."""
    columns = data.columns.values()
    return sum(math.prod(column.shape) * jax.dtypes.canonicalize_dtype(column.dtype).itemsize for column in columns)


def _are_gathered(algorithm: Algorithm, execution: Jit, cohort: Cohort, mesh: Mesh) -> bool:
    """Returns whether a device has only the memories of the cohort's clients, and not those of the whole population."""
    state = algorithm.with_memory(jax.eval_shape(algorithm.init, rng.root(0)), cohort.data)
    # Nothing can be placed on devices that are only descriptions.
    if parts_of(state).clients == () or mesh.devices.flat[0] not in jax.local_devices():
        return False
    only_clients = FederatedState((), parts_of(state).clients)
    return isinstance(placed(only_clients, mesh, execution.memory).clients, ClientRows)


def _stand_in(cohort: Cohort, clients: int, slots: int, population: int) -> Cohort:
    """Returns a cohort of so many clients and slots, with the sizes of the given one in turn, whose examples take no memory."""
    sizes = np.zeros(max(clients, population), np.int64)
    sizes[:clients] = np.resize(cohort.sizes, clients)
    columns = {
        name: np.broadcast_to(np.zeros((), column.dtype), (int(sizes.sum()), *column.shape[1:]))
        for name, column in cohort.data.columns.items()
    }
    data = FederatedData(columns, np.concatenate([[0], np.cumsum(sizes)]), [str(i) for i in range(len(sizes))])
    attackers = None if cohort.attackers is None else np.resize(cohort.attackers, clients)
    return Cohort(data, np.arange(clients), cohort.round, cohort.key, slots, attack=cohort.attack, attackers=attackers)


def _largest(
    population: int, slots_per_client: float, slots: Sequence[int], needed: Sequence[int], examples: float, free: int
) -> int:
    """Returns the largest cohort that fits.

    Args:
      population: number of clients.
      slots_per_client: more than 1 if the sizes of cohorts vary.
      slots: those of two cohorts.
      needed: the bytes that they need, which grow linearly with the slots.
      examples: the bytes that the examples of each client take besides.
      free: the bytes that there are.

    >>> _largest(10_000, 1.0, [10, 50], [1_000, 1_400], 0, 7_000), _largest(10_000, 1.0, [10, 50], [1_000, 1_400], 20, 7_000)
    (500, 200)
    >>> _largest(10_000, 2.0, [10, 50], [1_000, 1_400], 0, 7_000), _largest(300, 1.0, [10, 50], [1_000, 1_400], 0, 7_000)
    (200, 300)
    """
    first, second = map(rounded_slots, slots)
    of_each = max(0.0, (needed[1] - needed[0]) / ((second - first) or 1))

    def slots_of(clients: int) -> int:
        return rounded_slots(min(population, math.ceil(slots_per_client * clients)))

    fits = [
        size
        for digits in range(len(str(population)))
        for size in (10**digits, 2 * 10**digits, 5 * 10**digits, 10 ** (digits + 1))
        if needed[0] + of_each * (slots_of(size) - first) + examples * size <= free
    ]
    return min(population, max(fits, default=0))
