"""An algorithm with client memory, similar to SCAFFOLD, for tests of client memory."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedsim
from fedsim import tree


class State(NamedTuple):
    params: Any
    round: jax.Array


class Memory(NamedTuple):
    drift: Any
    visits: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Drifting(fedsim.Algorithm):
    """Each client adds a tenth of its previous update to its gradients, and stores that update and its number of rounds."""

    model: fedsim.Model
    learning_rate: float = 0.1

    def init(self, key):
        return State(self.model.init(key), jnp.int32(0))

    def client_memory(self, shared):
        return Memory(jax.tree.map(jnp.zeros_like, shared.params), jnp.int32(0))

    def client_update(self, shared, client):
        def step(params, batch):
            gradient = jax.grad(self.model.train_loss)(params, batch)
            return jax.tree.map(lambda x, g, d: x - self.learning_rate * (g + d / 10), params, gradient, client.memory.drift)

        params = client.for_each_batch(self.batches, step, shared.params)
        update = tree.subtract(shared.params, params)
        return fedsim.ClientUpdate(update, jnp.float32(1), {}, Memory(update, client.memory.visits + 1))

    def server_update(self, state, update, info):
        return State(tree.subtract(state.params, update), state.round + 1)


def bits(state):
    """Returns the bytes of each leaf of a state, wherever client memory is stored."""

    def dense(value):
        if isinstance(value, fedsim.data.ClientRows):
            return value.gather(np.arange(len(value.index)))
        return value

    plain = jax.tree.map(dense, state, is_leaf=lambda x: isinstance(x, fedsim.data.ClientRows))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]
