"""Distributed selective SGD: agreement with NumPy and with plain SGD, its noise and its memory."""

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
    """Returns a linear model in five parameters with squared loss, which is computed exactly for small integers."""

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
    """Returns the indices of the parameters that a download contains."""
    return np.flatnonzero(np.unpackbits(np.asarray(download.which), count=SIZE))


def sgd(w, dataset, key, rate=RATE):
    for batch in dataset.batches(fedsim.Batches(size=4), key):
        x, y = batch.examples["x"][batch.mask].astype(np.float64), batch.examples["y"][batch.mask]
        w = w - rate * x.T @ (x @ w - y) / len(y)
    return w


def test_one_participant_that_shares_everything_equals_plain_sgd_bit_for_bit():
    """A step adds four bits to each parameter, so four steps are computed without rounding."""
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


def test_one_participant_that_shares_everything_equals_sgd_up_to_rounding():
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
        # The algorithm breaks ties by a random draw, so the downloaded parameters are checked by their counts.
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
        # Upload: two of five values, each with its index in 32 + 3 bits. Download: three values, a mask of a byte, round, seed.
        some = np.asarray(info.clients["num_examples"]) > 0
        assert info.clients["bits_up"].tolist() == (70 * some).tolist()
        assert info.clients["bits_down"].tolist() == ((3 * 32 + 8 + 32 + 64) * some).tolist()
    clients = state.clients
    rows, _ = clients.gather(np.arange(4)) if isinstance(clients, fedsim.data.ClientRows) else clients
    for client_id, mine in kept.items():
        np.testing.assert_allclose(jax.tree.leaves(rows)[0][int(client_id)], mine, rtol=1e-5, atol=1e-6)


def test_ties_are_broken_by_the_seed_of_the_run():
    """Before the first round all counts are equal."""
    algorithm = make(theta_d=0.4)
    broadcast = jax.jit(lambda key: algorithm.broadcast(algorithm.init(key)))

    def indices_of(seed):
        return tuple(places_of(broadcast(jax.random.key(seed))).tolist())

    # There are 10 possible pairs of indices. If the draw did not depend on the seed, all 20 seeds would give the same pair.
    assert len({indices_of(seed) for seed in range(20)}) > 3
    assert indices_of(7) == indices_of(7)


class Scaling(fedsim.attacks.Attack):
    """An attack as a user may write it, without regard to the counts."""

    def corrupt(self, update, key):
        return jax.tree.map(lambda x: -2 * x, update)


@pytest.mark.first(1)
@pytest.mark.parametrize("attack", [fedsim.attacks.SignFlip(), Scaling(), fedsim.attacks.GaussianNoise()])
def test_attackers_report_correctly_which_parameters_they_update(attack):
    cohort, algorithm = federation.cohort(population()), make(theta_u=0.4, theta_d=0.6)
    attacked = dataclasses.replace(cohort, attack=attack, attackers=np.array([True, False, True, False]))
    state = algorithm.init(jax.random.key(0))
    (honest, _), (harmed, _) = (algorithm.apply(state, each) for each in (cohort, attacked))
    np.testing.assert_array_equal(harmed.server.updates, honest.server.updates)
    assert honest.server.updates.sum() == 3 * 2
    assert np.abs(params(harmed) - params(honest)).max() > 0.1


@pytest.mark.first(1)
@pytest.mark.parametrize("attack", [fedsim.attacks.ALittleIsEnough(), fedsim.attacks.InnerProduct()])
def test_counts_of_colluding_attackers_are_the_mean_of_the_others(attack):
    cohort, algorithm = federation.cohort(population()), make(theta_u=0.4, theta_d=0.6)
    state = algorithm.init(jax.random.key(0))
    attacked, others = np.array([True, False, False, False]), fedsim.Cohort.of(cohort.data, ["2", "3"])
    after, _ = algorithm.apply(state, dataclasses.replace(cohort, attack=attack, attackers=attacked))
    honest, _ = algorithm.apply(state, others)
    np.testing.assert_allclose(after.server.updates, 1.5 * honest.server.updates, rtol=1e-6)


def test_counts_below_zero_are_valid():
    """A user's own server update may produce them. The number of downloaded parameters is the same, the most updated first."""
    algorithm = make(theta_d=0.6)
    state = algorithm.init(jax.random.key(0))
    state = state._replace(updates=jnp.array([-5.0, 2.0, -1.0, -4.0, 1.0]))
    places = places_of(algorithm.broadcast(state)).tolist()
    assert len(set(places)) == 3 and {1, 4} < set(places)


def test_a_complete_download_contains_no_mask_and_no_seed():
    algorithm = make(theta_u=0.4, theta_d=1.0)
    _, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(population()))
    assert info.clients["bits_down"].tolist() == [SIZE * 32 + 32 if size else 0 for size in (8, 0, 3, 5)]


@pytest.mark.first(2)
@pytest.mark.parametrize("size", [5, 8, 70])
def test_downloaded_parameters_replace_those_of_a_participant(size):
    draw = np.random.default_rng(size)
    own, values = draw.normal(size=[2, size]).astype(np.float32)
    chosen = draw.random(size) < 0.5
    leaves = [own[:2], own[2:, None]]
    participant = types.SimpleNamespace(model=types.SimpleNamespace(init=lambda key: leaves), theta_d=0.5)
    download = _dssgd.Download(values[chosen], np.packbits(chosen), jnp.int32(0), jnp.zeros(2, jnp.uint32))
    arrived = algorithms.DSSGD.downloaded(participant, download, types.SimpleNamespace(memory=leaves))
    expected = np.where(chosen, values, own)
    np.testing.assert_array_equal(arrived[0], expected[:2])
    np.testing.assert_array_equal(arrived[1], expected[2:, None])


@pytest.mark.slow
@pytest.mark.parametrize("theta", [0.1, 0.6])
def test_a_downlink_compressor_receives_only_the_downloaded_values(theta):
    data, batches = federation.data(sizes=(8,)), fedsim.Batches(size=4, epochs=1)
    for downlink, width in ((None, 32), (fedsim.compressors.Cast(), 16)):
        algorithm = make(model=federation.model(), batches=batches, theta_d=theta, downlink=downlink)
        state = algorithm.init(jax.random.key(0))
        size = len(fedsim.tree.flat(state.params))
        _, info = algorithm.apply(state, federation.cohort(data))
        sent = int(theta * size)
        assert jax.jit(algorithm.broadcast)(state).values.size == sent
        assert info.clients["bits_down"].tolist() == [sent * width + 8 * -(-size // 8) + 32 + 64]


@pytest.mark.first(1)
@pytest.mark.parametrize("options", [{"clip": 1.0}, {"selection": "random"}, {"theta_d": 0.6, "clip": 1.0}])
@pytest.mark.filterwarnings("ignore:.*held a NaN")
def test_a_diverged_participant_is_dropped_for_any_selection_and_clipping(options):
    """The values are finite but their squares overflow. After clipping or selection they would look valid."""
    data = population(sizes=(1, 1))
    data.columns["x"][:], data.columns["y"][:] = np.float32([[1, 0, 0, 0, 0]]), -1e25
    algorithm = make(theta_u=0.4, **options)
    state = algorithm.init(jax.random.key(0))
    after, info = algorithm.apply(state, federation.cohort(data))
    assert int(info.num_dropped) == 2
    np.testing.assert_array_equal(params(after), params(state))


def test_random_selection_without_a_threshold_uploads_the_maximum_number():
    data = population(sizes=(8,))
    algorithm = make(theta_u=0.6, selection="random")
    state, info = algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort(data))
    assert np.sum(params(state) != 1) <= 3 and info.clients["bits_up"].tolist() == [3 * 35]


def test_random_selection_uploads_only_changes_above_the_threshold():
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
    assert len(seen) > 2  # the selection is random


@pytest.mark.parametrize("above", range(6))
def test_changes_below_the_threshold_are_never_selected(above):
    change = jnp.where(jnp.arange(10) % 5 < 3, 1.0, -1.0) * jnp.where(jnp.arange(10) < above, 0.6, 0.4)
    upload = jax.jit(make(theta_u=0.3, selection="random", threshold=0.5).selected)
    for seed in range(10):
        _, sent = upload(change, jax.random.key(seed))
        which = np.flatnonzero(sent)
        assert len(which) == min(3, above) and np.all(which < above)


def test_noise_has_the_scale_of_the_paper():
    """If all changes and the threshold are 0, half of the tests pass, and the uploads are clipped noise."""
    size, clip, epsilon, count = 4000, 0.01, 3000.0, 400
    algorithm = make(theta_u=0.1, selection="random", clip=clip, epsilon=epsilon)
    noisy, sent = algorithm.selected(jnp.zeros(size), jax.random.key(0))
    assert np.sum(sent) == count
    scale = 2 * count * 2 * clip / (epsilon * 2 / 9)  # Lap(2 c Δf / ε₂), with Δf = 2 γ
    uploads = np.asarray(noisy)[np.asarray(sent)]
    assert np.abs(uploads).max() <= clip
    # With clipped Laplace noise, a value is at an end with probability exp(-clip / scale).
    ends = np.mean(np.abs(uploads) >= clip * (1 - 1e-6))
    chance = np.exp(-clip / scale)
    assert abs(ends - chance) < 4 * np.sqrt(chance * (1 - chance) / count)
    # More budget gives less noise. In the limit, the changes above the threshold are uploaded exactly.
    change = jnp.linspace(-clip, clip, size)
    exact = make(theta_u=1.0, selection="random", clip=clip, epsilon=1e12, threshold=clip / 2)
    uploaded, sent = exact.selected(change, jax.random.key(0))
    np.testing.assert_array_equal(sent, np.abs(change) >= clip / 2)
    np.testing.assert_allclose(uploaded, change, atol=1e-6)


def test_a_new_threshold_is_drawn_after_every_upload():
    """A change that just misses one threshold sometimes passes the next. With a single threshold, all would pass or none."""
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
def test_invalid_dssgd_settings_are_rejected(wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)
