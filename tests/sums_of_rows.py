"""An algorithm whose aggregate is a sum of known rows, for tests of what a mechanism adds to it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import fedsim

SIZE = 4_000


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SendRows(fedsim.Algorithm):
    """Every client sends the sum of its examples, repeated; the state is the last aggregate."""

    weight: float = 1.0

    def init(self, key):
        return jnp.zeros([SIZE], jnp.float32)

    def client_update(self, shared, client):
        def add(total, batch):
            return total + jnp.sum(batch.examples["x"], where=batch.mask[:, None])

        total = client.for_each_batch(self.batches, add, jnp.float32(0))
        return fedsim.ClientUpdate(jnp.full([SIZE], total / SIZE**0.5), jnp.float32(self.weight))

    def server_update(self, state, update, info):
        return update


JIT = fedsim.Jit()


def send_rows(aggregator, execution=JIT, **options):
    batches = fedsim.Batches(size=4, shuffle=False)
    return SendRows(batches=batches, aggregator=aggregator, execution=execution, **options)


def population(values):
    """Returns clients whose update has these norms, and directions by their signs."""
    return fedsim.FederatedData.from_arrays({"x": np.asarray(values, np.float32)[:, None]}, sizes=[1] * len(values))


def rounds_of(algorithm, data, rounds, dispatches=1):
    """Returns the server's state after the rounds, and the sum of all aggregates."""
    state, aggregates = algorithm.with_memory(algorithm.init(jax.random.key(0)), data), []
    cohorts = [fedsim.Cohort.of(data, data.client_ids, round=round) for round in range(rounds)]
    for cohort in cohorts:
        state, _ = algorithm.apply(state, cohort)
        aggregates.append(np.asarray(fedsim.rounds.server_state(state)))
    return state, np.stack(aggregates)


EXECUTIONS = {
    "one device": fedsim.Jit(),
    "lanes": fedsim.Jit(lanes=4),
    "eight devices": fedsim.Pmap(devices=8),
    "plain Python": fedsim.Debug(),
}
