"""An algorithm whose clients keep something, in the way of SCAFFOLD, for tests of what is kept."""

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


class Kept(NamedTuple):
    drift: Any
    visits: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Drifting(fedsim.Algorithm):
    """Each client steps against its gradient and a tenth of how far it went last time, and keeps that and its visits."""

    model: fedsim.Model
    learning_rate: float = 0.1

    def init(self, key):
        return State(self.model.init(key), jnp.int32(0))

    def client_memory(self, shared):
        return Kept(jax.tree.map(jnp.zeros_like, shared.params), jnp.int32(0))

    def client_update(self, shared, client):
        def step(params, batch):
            gradient = jax.grad(self.model.train_loss)(params, batch)
            return jax.tree.map(lambda x, g, d: x - self.learning_rate * (g + d / 10), params, gradient, client.memory.drift)

        params = client.for_each_batch(self.batches, step, shared.params)
        went = tree.subtract(shared.params, params)
        return fedsim.ClientUpdate(went, jnp.float32(1), {}, Kept(went, client.memory.visits + 1))

    def server_update(self, state, update, info):
        return State(tree.subtract(state.params, update), state.round + 1)


def bits(state):
    """A state as bytes, leaf by leaf, however what clients keep is kept."""

    def dense(part):
        if isinstance(part, fedsim.data.ClientRows):
            return part.gather(np.arange(len(part.index)))
        return part

    plain = jax.tree.map(dense, state, is_leaf=lambda x: isinstance(x, fedsim.data.ClientRows))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]
