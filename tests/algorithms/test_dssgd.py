"""Distributed selective SGD: against NumPy, as plain SGD, and what its noise and its memory promise."""

import dataclasses
import types

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import algorithms
from fedsim.aggregators import Clipped, Mean, Sum
from fedsim.algorithms import _dssgd

RATE = 0.25
SIZE = 5


def linear_model():
    """A squared loss in five parameters: all that it computes of small integers is exact."""

    def forward(examples):
        return examples["x"] @ hk.get_parameter("w", [SIZE], init=hk.initializers.Constant(1.0))

    return fedsim.Model.from_haiku(
        hk.transform(forward),
        features={"x": jax.ShapeDtypeStruct((SIZE,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.float32)},
        loss=lambda examples, outputs: jnp.square(outputs - examples["y"]) / 2,
        metrics={},
    )


def population(sizes=(8, 0, 3, 5), seed=0):
    draw = np.random.default_rng(seed)
    columns = {"x": draw.integers(-1, 2, (sum(sizes), SIZE)), "y": draw.integers(-2, 3, sum(sizes))}
    return fedsim.FederatedData.from_arrays({name: c.astype(np.float32) for name, c in columns.items()}, sizes=sizes)


def make(**options):
    batches = fedsim.Batches(size=4, epochs=1)
    return algorithms.DSSGD(**{"model": linear_model(), "batches": batches, "client_optimizer": optax.sgd(RATE)} | options)


def params(state):
    return np.asarray(jax.tree.leaves(state.params)[0])


def places_of(download):
    """Indices of the parameters that a download holds."""
    return np.flatnonzero(np.unpackbits(np.asarray(download.which), count=SIZE))


def sgd(w, dataset, key, rate=RATE):
    for batch in dataset.batches(fedsim.Batches(size=4), key):
        x, y = batch.examples["x"][batch.mask].astype(np.float64), batch.examples["y"][batch.mask]
        w = w - rate * x.T @ (x @ w - y) / len(y)
    return w


def test_all_shared_and_one_participant_is_plain_sgd_to_the_bit():
    """A step adds four bits to each parameter: four steps are computed without rounding."""
    data = population(sizes=(8,))
    algorithm = make(theta_u=1.0, theta_d=1.0)
    state = algorithm.init(jax.random.key(0))
    expected = np.ones(SIZE)
    for r in range(2):
        cohort = federation.cohort(data, round=r)
        state, _ = algorithm.apply(state, cohort)
        ((_, dataset, key),) = cohort
        expected = sgd(expected, dataset, key)
        np.testing.assert_array_equal(params(state), expected)


def test_all_shared_is_also_sgd_where_rounding_is_inexact():
    model, data = federation.model(), federation.data(sizes=(23,))
    batches = fedsim.Batches(size=4, epochs=2)
    algorithm = algorithms.DSSGD(model=model, batches=batches, client_optimizer=optax.sgd(0.3), theta_u=1.0)
    fedavg = algorithms.FedAvg(model=model, batches=batches, client_optimizer=optax.sgd(0.3))
    state, expected = algorithm.init(jax.random.key(1)), fedavg.init(jax.random.key(1))
    for r in range(5):
        state, _ = algorithm.apply(state, federation.cohort(data, round=r))
        expected, _ = fedavg.apply(expected, federation.cohort(data, round=r))
    federation.assert_trees_close(state.params, expected.params)


EXECUTIONS = {
    "jit": fedsim.Jit(),
    "jit, 3 lanes, streamed": fedsim.Jit(lanes=3, memory="stream"),
    "pmap, 2 devices": fedsim.Pmap(devices=2),
    "debug": fedsim.Debug(),
}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "clip"), [*((how, 0.3) for how in EXECUTIONS), ("jit", None)])
def test_participants_exchange_the_largest_changes_and_keep_the_rest(how, clip):
    data = population()
    algorithm = make(theta_u=0.4, theta_d=0.6, clip=clip, decay=0.5, execution=EXECUTIONS[how])
    broadcast = jax.jit(algorithm.broadcast)
    state = algorithm.init(jax.random.key(0))
    server, updates, kept = np.ones(SIZE), np.zeros(SIZE), {}
    for r in range(4):
        cohort = fedsim.Cohort(data, np.array([0, 1, 2, 3] if r % 2 else [3, 0]), r, fedsim.rng.root(0))
        # Ties are broken by the algorithm's own draw: which parameters come down is checked against the counts.
        places = places_of(broadcast(state.server if r else state))
        assert len(places) == 3 and np.sort(updates)[::-1][:3].sum() == updates[places].sum()
        state, info = algorithm.apply(state, cohort)
        total, times = np.zeros(SIZE), np.zeros(SIZE)
        for client_id, dataset, key in cohort:
            if len(dataset):
                start = kept.get(client_id, np.ones(SIZE)).copy()
                start[places] = server[places]
                kept[client_id] = sgd(start, dataset, key)
                change = kept[client_id] - start
                change = change if clip is None else np.clip(change, -clip, clip)
                chosen = np.argsort(-np.abs(change), kind="stable")[:2]
                total[chosen] += change[chosen]
                times[chosen] += 1
        server, updates = server + total, 0.5 * updates + times
        np.testing.assert_allclose(params(state), server, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.server.updates, updates)
        # Two values of five, a value with its place in 32 + 3 bits; three come down, with a mask in a byte, round and seed.
        some = np.asarray(info.clients["num_examples"]) > 0
        assert info.clients["bits_up"].tolist() == (70 * some).tolist()
        assert info.clients["bits_down"].tolist() == ((3 * 32 + 8 + 32 + 64) * some).tolist()
    clients = state.clients
    rows, _ = clients.gather(np.arange(4)) if isinstance(clients, fedsim.data.ClientRows) else clients
    for client_id, mine in kept.items():
        np.testing.assert_allclose(jax.tree.leaves(rows)[0][int(client_id)], mine, rtol=1e-5, atol=1e-6)


def test_ties_are_broken_by_the_seed_of_the_run():
    """Before the first round all counts are ties."""
    algorithm = make(theta_d=0.4)
    broadcast = jax.jit(lambda key: algorithm.broadcast(algorithm.init(key)))

    def indices_of(seed):
        return tuple(places_of(broadcast(jax.random.key(seed))).tolist())

    # Of 10 pairs of places, 20 seeds that all give the same one are no accident.
    assert len({indices_of(seed) for seed in range(20)}) > 3
    assert indices_of(7) == indices_of(7)


class Scaling(fedsim.attacks.Attack):
    """What a user may write, who does not know of counts."""

    def corrupt(self, update, key):
        return jax.tree.map(lambda x: -2 * x, update)


@pytest.mark.parametrize("attack", [fedsim.attacks.SignFlip(), Scaling(), fedsim.attacks.GaussianNoise()])
def test_attackers_tell_truly_which_parameters_they_update(attack):
    cohort, algorithm = federation.cohort(population()), make(theta_u=0.4, theta_d=0.6)
    attacked = dataclasses.replace(cohort, attack=attack, attackers=np.array([True, False, True, False]))
    state = algorithm.init(jax.random.key(0))
    (honest, _), (harmed, _) = (algorithm.apply(state, each) for each in (cohort, attacked))
    np.testing.assert_array_equal(harmed.server.updates, honest.server.updates)
    assert honest.server.updates.sum() == 3 * 2
    assert np.abs(params(harmed) - params(honest)).max() > 0.1


@pytest.mark.parametrize("attack", [fedsim.attacks.ALittleIsEnough(), fedsim.attacks.InnerProduct()])
def test_colluding_attackers_count_as_the_others_do_in_the_mean(attack):
    cohort, algorithm = federation.cohort(population()), make(theta_u=0.4, theta_d=0.6)
    state = algorithm.init(jax.random.key(0))
    attacked, others = np.array([True, False, False, False]), fedsim.Cohort.of(cohort.data, ["2", "3"])
    after, _ = algorithm.apply(state, dataclasses.replace(cohort, attack=attack, attackers=attacked))
    honest, _ = algorithm.apply(state, others)
    np.testing.assert_allclose(after.server.updates, 1.5 * honest.server.updates, rtol=1e-6)


def test_counts_below_zero_count_as_none():
    """As a user's own server may make them: as many come down as ever, the most updated first."""
    algorithm = make(theta_d=0.6)
    state = algorithm.init(jax.random.key(0))
    state = state._replace(updates=jnp.array([-5.0, 2.0, -1.0, -4.0, 1.0]))
    places = places_of(algorithm.broadcast(state)).tolist()
    assert len(set(places)) == 3 and {1, 4} < set(places)


def test_all_that_comes_down_needs_no_places_and_no_seed():
    algorithm = make(theta_u=0.4, theta_d=1.0)
    _, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population()))
    assert info.clients["bits_down"].tolist() == [SIZE * 32 + 32 if size else 0 for size in (8, 0, 3, 5)]


@pytest.mark.parametrize("size", [5, 8, 70])
def test_downloaded_parameters_replace_a_participant_s_own(size):
    draw = np.random.default_rng(size)
    own, values = draw.normal(size=[2, size]).astype(np.float32)
    chosen = draw.random(size) < 0.5
    leaves = [own[:2], own[2:, None]]
    participant = types.SimpleNamespace(model=types.SimpleNamespace(init=lambda key: leaves), theta_d=0.5)
    download = _dssgd.Download(values[chosen], np.packbits(chosen), jnp.int32(0), jnp.zeros(2, jnp.uint32))
    arrived = algorithms.DSSGD.client_params(participant, download, types.SimpleNamespace(memory=leaves))
    expected = np.where(chosen, values, own)
    np.testing.assert_array_equal(arrived[0], expected[:2])
    np.testing.assert_array_equal(arrived[1], expected[2:, None])


@pytest.mark.parametrize("theta", [0.1, 0.6])
def test_a_compressor_of_what_comes_down_gets_what_is_sent_and_no_more(theta):
    data, batches = federation.data(sizes=(8,)), fedsim.Batches(size=4, epochs=1)
    for downlink, width in ((None, 32), (fedsim.compressors.Cast(), 16)):
        algorithm = make(model=federation.model(), batches=batches, theta_d=theta, downlink=downlink)
        state = algorithm.init(jax.random.key(0))
        size = len(fedsim.tree.flat(state.params))
        _, info = algorithm.apply(state, federation.cohort(data))
        sent = int(theta * size)
        assert jax.jit(algorithm.broadcast)(state).values.size == sent
        assert info.clients["bits_down"].tolist() == [sent * width + 8 * -(-size // 8) + 32 + 64]


@pytest.mark.parametrize("options", [{"clip": 1.0}, {"selection": "random"}, {"theta_d": 0.6, "clip": 1.0}])
@pytest.mark.filterwarnings("ignore:.*held a NaN")
def test_who_diverged_is_dropped_whatever_it_would_send(options):
    """Numbers are finite and their squares are not; clipped, or left out, they would look harmless."""
    data = population(sizes=(1, 1))
    data.columns["x"][:], data.columns["y"][:] = np.float32([[1, 0, 0, 0, 0]]), -1e25
    algorithm = make(theta_u=0.4, **options)
    state = algorithm.init(jax.random.key(0))
    after, info = algorithm.apply(state, federation.cohort(data))
    assert int(info.num_dropped) == 2
    np.testing.assert_array_equal(params(after), params(state))


def test_random_selection_without_a_threshold_takes_as_many_as_may_go_up():
    data = population(sizes=(8,))
    algorithm = make(theta_u=0.6, selection="random")
    state, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(data))
    assert np.sum(params(state) != 1) <= 3 and info.clients["bits_up"].tolist() == [3 * 35]


def test_random_selection_takes_only_changes_above_the_threshold():
    data = population(sizes=(8,))
    algorithm = make(theta_u=0.4, selection="random", threshold=0.05, client_optimizer=optax.sgd(0.1))
    start = algorithm.init(jax.random.key(0))
    seen = set()
    for r in range(30):
        cohort = federation.cohort(data, round=r)
        ((_, dataset, key),) = cohort
        change = sgd(np.ones(SIZE), dataset, key, rate=0.1) - 1
        state, info = algorithm.apply(start, cohort)
        moved = params(state) - 1
        chosen = np.flatnonzero(moved)
        assert len(chosen) == min(2, np.sum(np.abs(change) > 0.05))
        np.testing.assert_allclose(moved[chosen], change[chosen], rtol=1e-5)
        assert np.all(np.abs(change[chosen]) > 0.05 - 1e-6)
        assert info.clients["bits_up"].tolist() == [35 * len(chosen)]
        seen.add(tuple(chosen))
    assert len(seen) > 2  # it is random


@pytest.mark.parametrize("above", range(6))
def test_nothing_below_the_threshold_is_taken_however_few_are_above(above):
    change = jnp.where(jnp.arange(10) % 5 < 3, 1.0, -1.0) * jnp.where(jnp.arange(10) < above, 0.6, 0.4)
    upload = jax.jit(make(theta_u=0.3, selection="random", threshold=0.5).selected)
    for seed in range(10):
        _, sent = upload(change, jax.random.key(seed))
        which = np.flatnonzero(sent)
        assert len(which) == min(3, above) and np.all(which < above)


def test_noise_follows_the_paper_s_budget():
    """With every change 0 and a threshold of 0, half of the tests pass; uploads are the noise of their values, clipped."""
    size, clip, epsilon, count = 4000, 0.01, 3000.0, 400
    algorithm = make(theta_u=0.1, selection="random", clip=clip, epsilon=epsilon)
    noisy, sent = algorithm.selected(jnp.zeros(size), jax.random.key(0))
    assert np.sum(sent) == count
    scale = 2 * count * 2 * clip / (epsilon * 2 / 9)  # Lap(2 c Δf / ε₂), with Δf = 2 γ
    uploads = np.asarray(noisy)[np.asarray(sent)]
    assert np.abs(uploads).max() <= clip
    # Clipped Laplace: the part at the ends has probability exp(-clip / scale).
    ends = np.mean(np.abs(uploads) >= clip * (1 - 1e-6))
    chance = np.exp(-clip / scale)
    assert abs(ends - chance) < 4 * np.sqrt(chance * (1 - chance) / count)
    # The more budget, the less noise: in the limit, exactly the changes above the threshold.
    change = jnp.linspace(-clip, clip, size)
    exact = make(theta_u=1.0, selection="random", clip=clip, epsilon=1e12, threshold=clip / 2)
    uploaded, sent = exact.selected(change, jax.random.key(0))
    np.testing.assert_array_equal(sent, np.abs(change) >= clip / 2)
    np.testing.assert_allclose(uploaded, change, atol=1e-6)


def test_thresholds_are_drawn_anew_after_every_upload():
    """Tests that just miss a threshold pass the next one now and then; one threshold for all would let all pass, or none."""
    upload = jax.jit(make(theta_u=0.5, selection="random", clip=1.0, epsilon=100.0, threshold=0.0).selected)
    passed = [int(np.sum(upload(jnp.zeros(8), jax.random.key(seed))[1])) for seed in range(200)]
    assert max(passed) == 4 and len(set(passed)) > 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"theta_u": 0.0}, "Expected 0 < theta_u <= 1, got theta_u=0.0"),
        ({"theta_d": 1.1}, "Expected 0 < theta_d <= 1, got theta_d=1.1"),
        ({"decay": 0.0}, "Expected 0 < decay <= 1"),
        ({"selection": "smallest"}, "got selection='smallest'"),
        ({"threshold": -1.0}, "Expected threshold >= 0 and finite, got threshold=-1.0"),
        ({"clip": 0.0}, "Expected clip > 0 and finite, or None, got clip=0.0"),
        ({"epsilon": 1.0, "selection": "random"}, "epsilon=1.0 needs clip"),
        ({"epsilon": 1.0, "clip": 1.0}, "and selection='random'"),
        ({"aggregator": Clipped(1.0, inner=Sum())}, "participants send, got aggregator=Clipped.*: leave it out"),
        ({"aggregator": Mean()}, r"got aggregator=Mean\(\): leave it out"),
    ],
)
def test_dssgd_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)
