"""Parameters in half precision: states keep their dtypes, and rounds in one dispatch equal single rounds."""

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls",
    [algorithms.FedAvgM, algorithms.FedAdam, algorithms.APFL, algorithms.FedCM, algorithms.MimeLite, algorithms.DSSGD],
)
def test_states_keep_their_dtypes_and_rounds_run_in_one_dispatch(cls):
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
    server = fedsim.rounds.server_state(alone)
    assert [x.dtype for x in jax.tree.leaves(server)] == [x.dtype for x in jax.tree.leaves(start)]
    assert np.any(np.asarray(server.params["linear"]["w"] != start.params["linear"]["w"]))


def test_weights_of_fedala_move_by_less_than_half_precision_can_represent():
    """They start from 1, below which bfloat16 has no number before 0.996."""
    found = []
    for model in (federation.model(), halved(federation.model())):
        algorithm = algorithms.FedALA(
            model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), weight_learning_rate=1e-3
        )
        shared = algorithm.broadcast(algorithm.init(jax.random.key(0)))

        def weights(shared, client, algorithm=algorithm):
            own = jax.tree.map(lambda x: x + 1, shared.params)
            memory = algorithm.client_memory(shared)._replace(params=own)
            return algorithm.mixture(shared, dataclasses.replace(client, memory=memory)).weights

        with jax.numpy_dtype_promotion("standard"):
            rows = fedsim.map_clients(weights, shared, federation.cohort(federation.data(sizes=(8,))))
        found.append(np.asarray(rows["linear"]["w"]))
    assert found[1].dtype == np.float32 and np.any(found[1] < 1) and found[1].min() > 0.996
    np.testing.assert_allclose(found[1] - 1, found[0] - 1, rtol=0.1, atol=1e-5)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Adding(fedsim.Algorithm):
    """Each client sends one number and adds the received update to its memory, in half precision."""

    start: float
    first: float
    dtype: type

    def init(self, key):
        return jnp.float32(0)

    def client_memory(self, shared):
        return jnp.full(2, self.start, jnp.float16)

    def client_update(self, shared, client):
        update = jnp.where(client.position == 0, self.first, 1.0).astype(self.dtype)
        return fedsim.ClientUpdate(update, jnp.float32(1), {}, lambda arrived: client.memory + arrived.astype(jnp.float16))

    def server_update(self, state, update, info):
        return state + update


def adding(**options):
    return Adding(batches=fedsim.Batches(size=4), execution=fedsim.Jit(memory="stream"), **options)


@pytest.mark.filterwarnings("ignore:.*did not reach the server")
def test_an_update_whose_memory_overflows_is_dropped():
    """The update and the old memory are finite; their sum in half precision is not."""
    algorithm = adding(start=6e4, first=1e4, dtype=jnp.float16)
    state, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(federation.data()))
    assert info.clients["dropped"].tolist() == [True] + 7 * [False]
    assert state.clients.index[0] == -1 and float(state.server) == 1


def test_an_attacker_s_update_counts_if_its_own_memory_is_finite():
    """The attacker sends -1e5, which overflows half precision, and its memory is its honest 1."""
    algorithm, cohort = adding(start=0.0, first=1.0, dtype=jnp.float32), federation.cohort(federation.data())
    attackers = np.arange(len(cohort)) == 0
    cohort = dataclasses.replace(cohort, attack=fedsim.attacks.SignFlip(scale=1e5), attackers=attackers)
    state, info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
    counts = np.asarray(info.clients["weight"]) > 0
    assert counts[0] and not np.any(info.clients["dropped"])
    assert float(state.server) == pytest.approx((np.sum(counts) - 1 - 1e5) / np.sum(counts), rel=1e-6)
    rows, seen = state.clients.gather(np.flatnonzero(counts))
    assert np.all(seen)
    np.testing.assert_array_equal(jax.tree.leaves(rows)[0], 1)
