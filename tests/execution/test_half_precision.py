"""Parameters of half precision: states keep their dtypes, and rounds in one dispatch are those one by one."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import algorithms


def halved(model):
    return dataclasses.replace(model, init=lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.init(key)))


@pytest.mark.parametrize(
    "cls",
    [algorithms.FedAvgM, algorithms.FedAdam, algorithms.SCAFFOLD, algorithms.FedDyn, algorithms.MimeLite, algorithms.DSSGD],
)
def test_states_keep_their_dtypes_and_rounds_go_together(cls):
    model = halved(federation.model())
    options = {"theta_d": 0.5} if cls is algorithms.DSSGD else {}
    with jax.numpy_dtype_promotion("standard"):
        algorithm = cls(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), **options)
        start = algorithm.init(jax.random.key(0))
        population = federation.data()
        rounds = [federation.cohort(population, round=r) for r in range(3)]
        together, _ = algorithm.apply_rounds(start, rounds)
        alone = start
        for cohort in rounds:
            alone, _ = algorithm.apply(alone, cohort)
    states = [federation.plain(state) for state in (together, alone)]
    federation.assert_trees_equal(*states)
    server = fedsim.execution.split(alone).server
    assert [x.dtype for x in jax.tree.leaves(server)] == [x.dtype for x in jax.tree.leaves(start)]
    assert np.any(np.asarray(server.params["linear"]["w"] != start.params["linear"]["w"]))


@pytest.mark.filterwarnings("ignore:.*were left out")
def test_what_overflows_where_it_is_kept_is_dropped():
    """What was sent is finite, and so is the old row; their sum in half precision is not."""

    class Adding(fedsim.Algorithm):
        def init(self, key):
            return jnp.float32(0)

        def client_memory(self, shared):
            return jnp.full(2, 6e4, jnp.float16)

        def client_init(self, shared, client):
            return jnp.float32(0)

        def client_step(self, shared, state, batch):
            return state

        def client_final(self, shared, state, client):
            update = jnp.where(client.position == 0, 1e4, 1.0).astype(jnp.float16)
            return fedsim.ClientUpdate(update, jnp.float32(1))

        def client_sent(self, result, client, arrived):
            return client.memory + arrived

        def server_update(self, state, update):
            return state + update

    algorithm = Adding(batches=fedsim.Batches(size=4), execution=fedsim.Jit(memory="stream"))
    state, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(federation.data()))
    assert info.clients["dropped"].tolist() == [True] + 7 * [False]
    assert state.clients.index[0] == -1 and float(state.server) == 1
