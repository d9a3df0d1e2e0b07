"""The time of a round, from a short measurement of its clients' steps."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import rng
from fedsim.algorithm import Algorithm, Capabilities
from fedsim.data import Cohort
from fedsim.planning._flops import flops_of
from fedsim.rounds import Client, Clients, ClientUpdate, TracedCall

_SECONDS = 0.8
_SECONDS_OF_STEPS = 0.1
_LEAST_REPEATS = 3


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Steps(Algorithm):
    """Clients that take the steps of another algorithm's clients, on its data, for nothing but their time.

    Execution compiles these loops and the aggregation in the same way as those of the algorithm. The state is a number that
    depends on all results, so that the compiler keeps them, and for each loop its constants and its first state.
    """

    capabilities = Capabilities(microbatches=True)  # The steps of the algorithm have its microbatches.

    calls: Sequence[TracedCall]
    memory: Any

    def client_memory(self, shared: Any) -> Any:
        return jax.tree.map(_zeros, self.memory)

    def round(self, state: Any, clients: Clients) -> tuple[Any, Any]:
        total, loops = state
        for call, shared in zip(self.calls, loops, strict=True):
            if call.aggregator is None:
                results = clients.map(functools.partial(self._run, call), shared)
            else:
                results, _ = clients.aggregate(
                    functools.partial(self._update, call), shared, aggregator=call.aggregator, downlink=call.downlink
                )
            total += _sum(results)
        return (total, loops), clients.info or ()

    def _run(self, call: TracedCall, shared: Any, client: Client) -> jax.Array:
        ends = [
            client.for_each_batch(loop.batches, functools.partial(loop.step, constants), start)
            for loop, (constants, start) in zip(call.loops, shared, strict=True)
        ]
        return _sum(ends)

    def _update(self, call: TracedCall, shared: Any, client: Client) -> ClientUpdate:
        number = jnp.tanh(self._run(call, shared, client) + _sum(client.memory))
        filled = functools.partial(jax.tree.map, lambda x: jnp.broadcast_to(number, x.shape).astype(x.dtype))
        return ClientUpdate(filled(call.update), jnp.float32(1), memory=filled(self.memory))


def seconds_of_round(algorithm: Algorithm, calls: Sequence[TracedCall], memory: Any, cohort: Cohort, devices: int) -> float:
    """Estimates the time of a round.

    A few of the cohort's clients take a few steps each, or none, with the algorithm's execution. The times of a step, of a
    client without steps and of a round without clients follow. The measurement takes about a second; before it, the program is
    compiled.

    Args:
      algorithm: whose rounds run.
      calls: the calls of its round.
      memory: the shapes of what a client keeps, () if nothing.
      cohort: the clients.
      devices: the number of devices of the execution.
    """
    training = algorithm.batches
    limited = [
        dataclasses.replace(call, loops=tuple(dataclasses.replace(loop, purpose=None) for loop in call.loops)) for call in calls
    ]  # Only loops for training can be stopped early.
    steps = _Steps(
        batches=training, aggregator=algorithm.aggregator, execution=algorithm.execution, calls=limited, memory=memory
    )
    flops = np.array([max(1.0, flops_of(loop.jaxpr)) for call in calls for loop in call.loops])
    shares = flops / flops.sum()

    def num_steps(of: Sequence[TracedCall], clients: Cohort) -> np.ndarray:
        """Returns the number of steps of each client, where a step of every loop together count as one."""
        loops = [loop for call in of for loop in call.loops]
        own = [share * loop.num_steps(clients, training) for share, loop in zip(shares, loops, strict=True)]
        return sum(own, np.zeros(len(clients)))

    most_steps = cohort.num_steps(training)
    longest = np.argsort(-most_steps, kind="stable")

    def part(of_each_device: int, steps: int) -> Cohort:
        """Returns the longest clients of the cohort, which stop after a number of steps."""
        chosen = longest[: of_each_device * devices]
        work = np.minimum(steps, most_steps[chosen]) / np.maximum(training.num_steps(cohort.sizes[chosen]), 1)
        rows = None if cohort.rows is None else cohort.rows[chosen]
        clients = cohort.clients[chosen]
        return dataclasses.replace(
            cohort, clients=clients, rows=rows, work=work, slots=cohort.slots, attack=None, attackers=None, arrivals=None
        )

    loops = [[jax.tree.map(_zeros, (loop.constants, loop.state)) for loop in call.loops] for call in calls]
    state = steps.with_memory((jnp.float32(0), loops), cohort.data)

    def seconds(of: Cohort) -> float:
        began = time.perf_counter()
        jax.block_until_ready(steps.execution.run_one(steps, state, of))
        return time.perf_counter() - began

    one, started = part(1, 1), part(1, 0)
    seconds(one)  # compiles
    rough = max(1e-6, min(seconds(one) for _ in range(3)) - min(seconds(started) for _ in range(3)))
    each = int(np.clip(_SECONDS_OF_STEPS / rough, 1, most_steps.max(initial=1)))
    several = int(np.clip(_SECONDS_OF_STEPS / rough / each, 1, max(1, len(cohort) // devices)))
    # With one client on each device, two of these are the same and are measured once.
    counts = [(1, 0), (several, 0), (1, each), (several, each)]
    parts = {count: part(*count) for count in counts}
    # The shortest of several times, taken in turns, because other work on the machine only adds time.
    least, repeats, began = dict.fromkeys(parts, np.inf), 0, time.perf_counter()
    while repeats < _LEAST_REPEATS or time.perf_counter() - began < _SECONDS:
        least = {count: min(least[count], seconds(of)) for count, of in parts.items()}
        repeats += 1

    no_steps = least[1, 0]
    client = max(0.0, least[several, 0] - no_steps) / max(1, several - 1)

    def seconds_of_step(clients_of_each: int) -> float:
        taken = num_steps(limited, parts[clients_of_each, each]).sum() / devices
        return max(0.0, least[clients_of_each, each] - least[clients_of_each, 0]) / max(1e-9, taken)

    alone, together = seconds_of_step(1), seconds_of_step(several)
    own = num_steps(calls, cohort)
    return float(
        no_steps - client + client * len(cohort) / devices + max(alone * own.max(initial=0), together * own.sum() / devices)
    )


def _sum(values: Any) -> jax.Array:
    """Returns a number that depends on all numbers of a pytree, ``float32 []``."""
    leaves = [x for x in jax.tree.leaves(values) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return sum((jnp.sum(x).astype(jnp.float32) for x in leaves), jnp.float32(0))


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.split(rng.root(0), shape.shape) if shape.shape else rng.root(0)
    return jnp.zeros(shape.shape, shape.dtype)
