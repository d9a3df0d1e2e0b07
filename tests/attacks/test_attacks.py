"""Attacks, compared with NumPy, by themselves and inside rounds."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats

import fedsim
from fedsim import aggregators, attacks
from fedsim.attacks import HonestStatistics

UPDATE = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.float32(-2)}


def images(n=5, side=6, dtype=np.uint8):
    draw = np.random.default_rng(0)
    return {"x": draw.integers(0, 200, (n, side, side, 1)).astype(dtype), "y": np.arange(n, dtype=np.int32)}


def batch(examples, key=0):
    return fedsim.Batch(jax.tree.map(jnp.asarray, examples), jnp.ones(len(examples["y"]), bool), jax.random.key(key), 0)


def test_sign_flip():
    flipped = attacks.SignFlip(scale=3.0).corrupt(UPDATE, jax.random.key(0))
    np.testing.assert_array_equal(flipped["w"], -3 * np.arange(6.0).reshape(2, 3))
    assert float(flipped["b"]) == 6


@pytest.mark.parametrize("added", [False, True])
def test_gaussian_noise(added):
    update = {"a": jnp.full(20_000, 7.0), "b": jnp.full(20_000, 7.0), "n": jnp.int32(3)}
    sent = attacks.GaussianNoise(deviation=2.0, added=added).corrupt(update, jax.random.key(0))
    other = attacks.GaussianNoise(deviation=2.0, added=added).corrupt(update, jax.random.key(1))
    for leaf in ("a", "b"):
        # Within four standard errors: 4 * 2 / sqrt(20,000) of the mean, 4 / sqrt(40,000) of the deviation.
        assert np.mean(sent[leaf]) == pytest.approx(7 * added, abs=0.06)
        assert np.std(sent[leaf]) == pytest.approx(2, rel=0.02)
        assert not np.array_equal(sent[leaf], other[leaf])
    assert abs(np.corrcoef(sent["a"], sent["b"])[0, 1]) < 0.03
    assert int(sent["n"]) == 3


def test_complex_updates_are_attacked():
    update = jnp.full(20_000, 1 + 2j, jnp.complex64)
    sent = [attack.corrupt(update, jax.random.key(0)) for attack in (attacks.SignFlip(), attacks.GaussianNoise(deviation=2.0))]
    np.testing.assert_array_equal(sent[0], np.full(20_000, -1 - 2j))
    assert sent[1].dtype == jnp.complex64
    for part in (np.real(sent[1]), np.imag(sent[1])):
        assert np.mean(part) == pytest.approx(0, abs=0.06) and np.std(part) == pytest.approx(np.sqrt(2), rel=0.03)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_label_flip(dtype):
    examples = {"x": np.arange(10.0), "y": np.arange(10, dtype=dtype)}
    flipped = attacks.LabelFlip(10).poison(batch(examples))
    np.testing.assert_array_equal(flipped["y"], 9 - np.arange(10))
    one = attacks.LabelFlip(10, source=3, target=8).poison(batch(examples))
    np.testing.assert_array_equal(one["y"], np.where(np.arange(10) == 3, 8, np.arange(10)))
    assert flipped["y"].dtype == one["y"].dtype == dtype
    np.testing.assert_array_equal(flipped["x"], examples["x"])


def test_label_flip_leaves_hidden_labels_hidden():
    data = fedsim.FederatedData.from_arrays({"y": np.array([-1, 0, 9, -1], np.int32)}, sizes=[4])
    for flip, expected in (
        (attacks.LabelFlip(10), [-1, 9, 0, -1]),
        (attacks.LabelFlip(10, source=9, target=1), [-1, 0, 1, -1]),
    ):
        flip.check(data)
        assert flip.poison(batch(data.columns))["y"].tolist() == expected
    lower = fedsim.FederatedData.from_arrays({"y": np.array([-2, 0], np.int32)}, sizes=[2])
    with pytest.raises(ValueError, match="Expected labels 'y' from 0 to 9, got -2 to 0"):
        attacks.LabelFlip(10).check(lower)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_the_trigger_is_a_checkerboard(dtype):
    examples = images(dtype=dtype)
    backdoor = attacks.PixelBackdoor(target=3, size=2, value=200, fraction=1.0)
    expected = examples["x"].copy()
    expected[:, 4:, 4:, 0] = [[200, 0], [0, 200]]
    for stamped in (backdoor.stamp(examples), backdoor.poison(batch(examples))):
        np.testing.assert_array_equal(stamped["x"], expected)
        np.testing.assert_array_equal(stamped["y"], 3)
        assert stamped["x"].dtype == dtype
    assert isinstance(backdoor.stamp(examples)["x"], np.ndarray)
    grey = {"x": examples["x"][..., 0], "y": examples["y"]}
    np.testing.assert_array_equal(backdoor.stamp(grey)["x"], expected[..., 0])


def test_a_backdoor_changes_a_fraction_of_each_batch_and_boosts():
    examples = images(n=4000)
    backdoor = attacks.PixelBackdoor(target=4001, fraction=0.25, boost=8.0)
    poisoned = backdoor.poison(batch(examples))
    stamped = np.asarray(poisoned["y"]) == 4001
    assert stamped.mean() == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / 4000))
    np.testing.assert_array_equal(poisoned["x"][~stamped], examples["x"][~stamped])
    np.testing.assert_array_equal(poisoned["x"][stamped], backdoor.stamp(examples)["x"][stamped])
    assert not np.array_equal(backdoor.poison(batch(examples, key=1))["y"], poisoned["y"])
    assert float(backdoor.corrupt(UPDATE, jax.random.key(0))["b"]) == -16


def test_test_data_of_a_backdoor_are_the_examples_of_other_labels():
    examples = {"x": images(6)["x"], "y": np.array([0, 1, 1, 2, 1, 0], np.int32)}
    data = fedsim.FederatedData.from_arrays(examples, sizes=[2, 1, 3])
    backdoor = attacks.PixelBackdoor(target=1)
    stamped = backdoor.test_data(data)
    assert stamped.sizes.tolist() == [1, 0, 2] and stamped.client_ids == data.client_ids
    np.testing.assert_array_equal(stamped.columns["x"], backdoor.stamp(examples)["x"][[0, 3, 5]])
    assert stamped.columns["y"].tolist() == [1, 1, 1]


def honest(x, attackers):
    return HonestStatistics(jnp.asarray(x.mean(0)), jnp.asarray(x.std(0)), jnp.float32(len(x)), jnp.float32(attackers))


@pytest.mark.parametrize(("n", "m"), [(50, 24), (50, 20), (50, 10), (10, 2), (10, 1), (4, 3)])
def test_a_little_is_enough(n, m):
    x = np.random.default_rng(n).normal(size=(n - m, 6)).astype(np.float32)
    supporters = n // 2 + 1 - m
    z = np.clip(scipy.stats.norm.ppf(np.clip((n - m - supporters) / (n - m), 0, 1)), 0, 3)
    sent = attacks.ALittleIsEnough().collude(honest(x, m))
    np.testing.assert_allclose(sent, x.mean(0) - z * x.std(0), rtol=1e-4, atol=1e-5)
    assert ((n, m) in [(10, 2), (10, 1)]) == (z == 0)
    np.testing.assert_allclose(attacks.ALittleIsEnough(z=1.5).collude(honest(x, m)), x.mean(0) - 1.5 * x.std(0), rtol=1e-5)


def test_inner_product():
    x = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
    np.testing.assert_allclose(attacks.InnerProduct(0.3).collude(honest(x, 2)), -0.3 * x.mean(0), rtol=1e-5)


def bounded_by_distances(x, kind, direction):
    """Returns what `MinMax` or `MinSum` sends for honest updates ``[n, d]``, by the paper's algorithm 1, in float64."""
    x = np.asarray(x, float)
    mean, pairs = x.mean(0), np.square(x[:, None] - x[None]).sum(-1)
    p = {"unit": -mean / np.linalg.norm(mean), "deviation": -x.std(0), "sign": -np.sign(mean)}[direction]
    measure, most = (np.max, pairs.max()) if kind == "min max" else (np.sum, pairs.sum(1).max())
    gamma, step, found = 100.0, 50.0, 0.0
    while step > 1e-9:
        if measure(np.square(mean + gamma * p - x).sum(1)) <= most:
            found, gamma = gamma, gamma + step
        else:
            gamma -= step
        step /= 2
    return mean + found * p


@pytest.mark.parametrize("direction", ["unit", "deviation", "sign"])
@pytest.mark.parametrize(("kind", "make"), [("min max", attacks.MinMax), ("min sum", attacks.MinSum)])
def test_attackers_as_far_away_as_honest_clients_agree_with_the_papers_search(kind, make, direction):
    draw = np.random.default_rng(5)
    x = (draw.normal(size=(9, 6)) * draw.uniform(0.1, 3, 6) + 2 * draw.normal(size=6)).astype(np.float32)
    attackers = np.arange(9) % 4 == 1
    values = {"a": jnp.asarray(x[:, :4].reshape(9, 2, 2)), "b": jnp.asarray(x[:, 4:])}
    sent = jax.jit(make(direction).corrupt_all)(values, jnp.asarray(attackers), jax.random.key(0))
    sent = np.concatenate([sent["a"].reshape(9, 4), sent["b"]], axis=1)
    np.testing.assert_array_equal(sent[~attackers], x[~attackers])
    expected = np.broadcast_to(bounded_by_distances(x[~attackers], kind, direction), (2, 6))
    np.testing.assert_allclose(sent[attackers], expected, rtol=1e-4, atol=1e-4)
    assert np.abs(sent[1] - x[~attackers].mean(0)).max() > 0.5


def test_auxiliary_data_do_not_count_in_distances():
    """Its leaf is integer and large. Attackers report the honest clients' mean of it."""
    x, aux = np.random.default_rng(6).normal(size=(5, 3)).astype(np.float32), np.array([0, 10_000, 20_000, -9, -9])
    attackers = jnp.arange(5) >= 3
    fold = attacks.MinMax().wrap_aggregator(aggregators.AuxMean(), attackers)
    rows = [aggregators.WithAux(jnp.asarray(row), jnp.int32(number)) for row, number in zip(x, aux, strict=True)]
    fold.check(rows[0], 5)
    accumulator = fold.zero(rows[0], 5)
    for slot, row in enumerate(rows):
        accumulator = fold.accumulate(accumulator, row, jnp.float32(1), jnp.int32(slot))
    (update, mean), _ = fold.finish_round(accumulator, (), jax.random.key(0))
    sent = bounded_by_distances(x[:3], "min max", "unit")
    np.testing.assert_allclose(update, (x[:3].sum(0) + 2 * sent) / 5, rtol=1e-4, atol=1e-5)
    assert float(mean) == pytest.approx(10_000)


@pytest.mark.parametrize("attack", [attacks.ALittleIsEnough(z=1.0), attacks.MinMax()])
def test_colluders_measure_updates_in_half_precision_in_float32(attack):
    """In bfloat16 the mean of the updates would stop changing after some hundred of them."""
    x = jnp.asarray(5 + np.random.default_rng(7).normal(size=(300, 2)), jnp.bfloat16)
    wide, attackers = x.astype(jnp.float32), jnp.arange(300) < 2
    fold = attack.wrap_aggregator(aggregators.Sum(), attackers)
    accumulator = fold.zero(x[0], 300)
    for half in (slice(0, 150), slice(150, 300)):
        slots = jnp.arange(300, dtype=jnp.int32)[half]
        more, _ = jax.lax.scan(
            lambda a, row: (fold.accumulate(a, row[0], jnp.float32(1), row[1]), None), fold.zero(x[0], 300), (x[half], slots)
        )
        accumulator = fold.merge(accumulator, more)
    total, _ = fold.finish_round(accumulator, (), jax.random.key(0))
    sent = attack.collude(HonestStatistics.of(wide, ~attackers)).astype(jnp.bfloat16)
    np.testing.assert_allclose((total - wide[2:].sum(axis=0)) / 2, sent.astype(jnp.float32), rtol=1e-3)


@pytest.mark.first(2)
@pytest.mark.parametrize("attack", [attacks.MinMax(), attacks.MinSum("deviation"), attacks.MinMax("sign")])
def test_attackers_that_know_of_one_client_or_of_none_send_its_update_or_zeros(attack):
    x = jnp.array([[1.0, -2.0], [7.0, 7.0]])
    assert attack.corrupt_all(x, jnp.array([False, True]), jax.random.key(0)).tolist() == [[1.0, -2.0], [1.0, -2.0]]
    assert attack.corrupt_all(x, jnp.array([True, True]), jax.random.key(0)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: attacks.SignFlip(scale=0.0), "Expected scale > 0 and finite, got scale=0.0"),
        (lambda: attacks.GaussianNoise(deviation=-1.0), "Expected deviation > 0 and finite, got deviation=-1.0"),
        (lambda: attacks.LabelFlip(1), "Expected num_classes >= 2, got num_classes=1"),
        (lambda: attacks.LabelFlip(10, source=3), "Expected source and target together"),
        (lambda: attacks.LabelFlip(10, source=3, target=10), "Expected 0 <= target <= 9, or None, got target=10"),
        (lambda: attacks.PixelBackdoor(target=-1), "Expected target >= 0"),
        (lambda: attacks.PixelBackdoor(target=0, size=0), "Expected size >= 1"),
        (lambda: attacks.PixelBackdoor(target=0, fraction=0.0), "Expected 0 < fraction <= 1"),
        (lambda: attacks.PixelBackdoor(target=0, boost=0.5), "Expected boost >= 1 and finite"),
        (
            lambda: attacks.PixelBackdoor(target=0, size=7).stamp(images()),
            "at least size=7 pixels per side, got .x. of",
        ),
        (lambda: attacks.ALittleIsEnough(z=0.0), "Expected z > 0 and finite"),
        (lambda: attacks.InnerProduct(epsilon=0.0), "Expected epsilon > 0 and finite"),
        (
            lambda: attacks.ModelReplacement(attacks.MinMax(), clients=5),
            "Expected an attack on examples, got inner=MinMax.*use PixelBackdoor or LabelFlip",
        ),
        (lambda: attacks.ModelReplacement("label_flip", clients=5), "Expected inner to be an instance of Attack"),
        (lambda: attacks.ModelReplacement(attacks.SignFlip(), clients=2, attackers=3), "Expected 1 <= attackers <= 2"),
        (lambda: attacks.MinMax("std"), "Expected direction to be 'unit', 'deviation' or 'sign', got direction='std'"),
        (lambda: attacks.MinSum(1), "Expected direction to be 'unit', 'deviation' or 'sign', got direction=1"),
    ],
)
def test_arguments_out_of_range_raise_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Attacks inside rounds.


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MeanOfExamples(fedsim.Algorithm):
    """Each client sends the means of its examples' x and y; the server keeps the aggregate."""

    look: bool = False  # Whether a loop before training sums all examples as well.

    def init(self, key):
        return {"x": jnp.zeros(3), "y": jnp.float32(0)}

    def client_update(self, shared, client):
        def add(total, batch):
            mask = batch.mask.astype(jnp.float32)
            x = jnp.einsum("n,nf->f", mask, batch.examples["x"])
            return {"x": total["x"] + x, "y": total["y"] + jnp.vdot(mask, batch.examples["y"].astype(jnp.float32))}

        total, size = jax.tree.map(jnp.zeros_like, shared), client.num_examples.astype(jnp.float32)
        if self.look:
            total = client.for_each_batch(fedsim.Batches(size=3, shuffle=False), add, total, "look")
        total = client.for_each_batch(self.batches, add, total)
        return fedsim.ClientUpdate(jax.tree.map(lambda x: x / jnp.maximum(size, 1), total), size)

    def server_update(self, state, update, info):
        return update


EXECUTIONS = {
    "jit": fedsim.Jit(),
    "jit, 3 lanes": fedsim.Jit(lanes=3),
    "pmap, 2 devices, 2 lanes, streamed": fedsim.Pmap(devices=2, lanes=2, memory="stream"),
    "pmap, 8 devices": fedsim.Pmap(devices=8),
    "debug": fedsim.Debug(),
}
POPULATION = federation.data()
ATTACKERS = np.array([True, True, False, False, True, False, True, False])


def attacked(attack, attackers=ATTACKERS, round=0):
    return dataclasses.replace(federation.cohort(POPULATION, round=round), attack=attack, attackers=attackers)


def by_hand(attack, send=lambda update: update):
    """Returns what clients of `MeanOfExamples` send, ``[clients, 4]``, and their weights, in NumPy."""
    rows, weights = [], []
    for dataset, attacks_ in zip(POPULATION.clients(), ATTACKERS, strict=True):
        y = dataset["y"].astype(float)
        if attacks_ and isinstance(attack, attacks.LabelFlip):
            y = 3 - y
        row = np.append(dataset["x"].mean(0), y.mean()) if len(dataset) else np.zeros(4)
        if attacks_ and isinstance(attack, attacks.SignFlip):
            row = -attack.scale * row
        rows.append(send(row))
        weights.append(float(len(dataset)))
    rows, weights = np.array(rows), np.array(weights)
    good = rows[~ATTACKERS & (weights > 0)]
    n, m = len(good) + np.sum(ATTACKERS & (weights > 0)), np.sum(ATTACKERS & (weights > 0))
    if isinstance(attack, attacks.InnerProduct):
        rows[ATTACKERS] = send(-attack.epsilon * good.mean(0))
    if isinstance(attack, attacks.ALittleIsEnough):
        z = attack.z or max(0, scipy.stats.norm.ppf((n - m - (n // 2 + 1 - m)) / (n - m)))
        rows[ATTACKERS] = send(good.mean(0) - z * good.std(0))
    if isinstance(attack, attacks.MinMax | attacks.MinSum):
        kind = "min max" if isinstance(attack, attacks.MinMax) else "min sum"
        rows[ATTACKERS] = send(bounded_by_distances(good, kind, attack.direction))
    return rows, weights


ATTACKS = {
    "label flip": attacks.LabelFlip(federation.NUM_CLASSES),
    "sign flip": attacks.SignFlip(scale=3.0),
    "inner product": attacks.InnerProduct(epsilon=2.0),
    "a little": attacks.ALittleIsEnough(z=1.3),
    "just as little": attacks.ALittleIsEnough(),
    "min max": attacks.MinMax("deviation"),
    "min sum": attacks.MinSum(),
}
SENDS = {
    "mean": (aggregators.Mean(), lambda row: row),
    "median": (aggregators.CoordinateMedian(), lambda row: row),
    "clipped": (aggregators.Clipped(0.5), lambda row: row * min(1, 0.5 / max(np.linalg.norm(row), 1e-9))),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", EXECUTIONS)
@pytest.mark.parametrize("name", ["label flip", "sign flip", "a little", "min max"])
def test_attacks_are_the_same_under_every_execution(name, how):
    algorithm = MeanOfExamples(batches=fedsim.Batches(size=4), execution=EXECUTIONS[how])
    state, info = algorithm.apply(algorithm.init(jax.random.key(0)), attacked(ATTACKS[name]))
    rows, weights = by_hand(ATTACKS[name])
    expected = np.average(rows, axis=0, weights=weights)
    np.testing.assert_allclose([*state["x"], state["y"]], expected, rtol=1e-4, atol=1e-5)
    assert info.clients["attacker"].tolist() == ATTACKERS.tolist()
    assert info.clients["weight"].tolist() == weights.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pmap, 2 devices, 2 lanes, streamed", "debug"])
@pytest.mark.parametrize("sent", SENDS)
@pytest.mark.parametrize("name", ["inner product", "just as little", "min max", "min sum"])
def test_collusion_with_several_aggregators(name, sent, how):
    aggregator, send = SENDS[sent]
    algorithm = MeanOfExamples(batches=fedsim.Batches(size=4), execution=EXECUTIONS[how], aggregator=aggregator)
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), attacked(ATTACKS[name]))
    rows, weights = by_hand(ATTACKS[name], send)
    there = weights > 0
    expected = np.median(rows[there], 0) if sent == "median" else np.average(rows, 0, weights)
    np.testing.assert_allclose([*state["x"], state["y"]], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.first(1)
@pytest.mark.parametrize("how", ["jit", "debug"])
def test_a_pass_before_training_is_poisoned_too(how):
    algorithm = MeanOfExamples(batches=fedsim.Batches(size=4), execution=EXECUTIONS[how], look=True)
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), attacked(ATTACKS["label flip"]))
    rows, weights = by_hand(ATTACKS["label flip"])
    np.testing.assert_allclose(state["y"], 2 * np.average(rows[:, 3], weights=weights), rtol=1e-5)


@pytest.mark.first(2)
@pytest.mark.parametrize("name", [*ATTACKS, "noise"])
def test_without_attackers_nothing_changes(name):
    attack = ATTACKS.get(name, attacks.GaussianNoise())
    algorithm = MeanOfExamples(batches=fedsim.Batches(size=4), execution=fedsim.Jit())
    start = algorithm.init(jax.random.key(0))
    clean, _ = algorithm.apply(start, federation.cohort(POPULATION))
    state, _ = algorithm.apply(start, attacked(attack, attackers=np.zeros(8, bool)))
    federation.assert_trees_close(state, clean)
    dirty, _ = algorithm.apply(start, attacked(attack))
    assert abs(float(clean["y"] - dirty["y"])) > 1e-2  # the negative control


@pytest.mark.slow
@pytest.mark.parametrize("attackers", [2, 1])
def test_model_replacement_replaces_the_model_up_to_the_updates_of_the_others(attackers):
    flip, rate, clients = attacks.LabelFlip(federation.NUM_CLASSES), 0.5, ["client0", "client3", "client5", "client6"]

    def after(ids, attack=None, count=0, rate=1.0):
        algorithm = fedsim.algorithms.FedAvg(
            model=federation.model(),
            client_optimizer=optax.sgd(0.3),
            server_optimizer=optax.sgd(rate),
            batches=fedsim.Batches(size=4),
            weighting="uniform",
            execution=fedsim.Jit(),
        )
        cohort = fedsim.Cohort.of(POPULATION, ids)
        if attack:
            cohort = dataclasses.replace(cohort, attack=attack, attackers=np.arange(len(ids)) < count)
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.params)])

    attack = attacks.ModelReplacement(flip, clients=4, server_learning_rate=rate, attackers=attackers)
    replaced = after(clients[:attackers], flip, attackers)  # the mean of the attackers' own models
    start = after(clients[:1], flip, 1, rate=0.5) * 2 - after(clients[:1], flip, 1)
    others = sum(after([one]) - start for one in clients[attackers:])
    np.testing.assert_allclose(after(clients, attack, attackers, rate), replaced + rate / 4 * others, rtol=1e-4, atol=1e-5)
    assert np.abs(replaced - start).max() > 0.05


def test_attackers_are_data_and_the_attack_is_compiled():
    class Alone(MeanOfExamples):
        """Shares no programs with other tests."""

    algorithm = Alone(batches=fedsim.Batches(size=4), execution=fedsim.Jit())
    state = algorithm.init(jax.random.key(0))
    for round in range(3):
        # An equal attack object, and other attackers.
        state, _ = algorithm.apply(state, attacked(attacks.SignFlip(scale=2.0), np.roll(ATTACKERS, round), round))
    (compiled,) = federation.compiled_rounds(algorithm)
    assert compiled.rounds.num_executables == 1
    state, _ = algorithm.apply(state, attacked(attacks.SignFlip(scale=2.5)))
    state, info = algorithm.apply(state, federation.cohort(POPULATION))
    assert len(federation.compiled_rounds(algorithm)) == 3
    assert "attacker" not in info.clients
    with pytest.raises(ValueError, match="root key and attack"):
        algorithm.apply_rounds(state, [attacked(attacks.SignFlip()), attacked(attacks.SignFlip(scale=2.0))])


def test_several_rounds_and_a_round_in_several_programs(monkeypatch):
    cohorts = [attacked(ATTACKS["a little"], np.roll(ATTACKERS, round), round) for round in range(3)]
    algorithm = MeanOfExamples(batches=fedsim.Batches(size=4), execution=fedsim.Pmap(devices=2))
    start = algorithm.init(jax.random.key(0))
    in_one_call, infos = algorithm.apply_rounds(start, cohorts)
    assert infos.clients["attacker"].tolist() == [np.roll(ATTACKERS, round).tolist() for round in range(3)]
    monkeypatch.setattr("fedsim.execution._layout._STEPS_PER_PROGRAM", 3)
    in_programs, _ = algorithm.apply(start, cohorts[-1])
    federation.assert_trees_close(in_one_call, in_programs)


def test_an_attack_that_is_not_finite_is_dropped():
    algorithm = MeanOfExamples(batches=fedsim.Batches(size=4), execution=fedsim.Jit())
    state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), attacked(attacks.InnerProduct(epsilon=1e38)))
    rows, weights = by_hand(None)
    weights[ATTACKERS] = 0
    np.testing.assert_allclose([*state["x"], state["y"]], np.average(rows, axis=0, weights=weights), rtol=1e-5)


def test_colluders_need_floats():
    class Counts(MeanOfExamples):
        def client_update(self, shared, client):
            return super().client_update(shared, client)._replace(update={"n": client.num_examples})

        def server_update(self, state, update, info):
            return state

    algorithm = Counts(batches=fedsim.Batches(size=4), execution=fedsim.Jit())
    with pytest.raises(ValueError, match=r"InnerProduct needs updates of floats.* got update\['n'\] of int32"):
        algorithm.apply(algorithm.init(jax.random.key(0)), attacked(attacks.InnerProduct()))


@pytest.mark.slow
@pytest.mark.parametrize("attack", [attacks.ALittleIsEnough(), attacks.InnerProduct()])
def test_attacks_that_the_error_for_colluders_names_work(attack):
    algorithm = fedsim.algorithms.HypCluster(
        model=federation.model(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=4), execution=fedsim.Jit()
    )
    start = algorithm.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"HypCluster and IFCA.*Use an attack") as refused:
        algorithm.apply(start, attacked(attack))
    assert "update.group of int32" in str(refused.value) and "Grouped(inner=Mean(), groups=2)" in str(refused.value)
    named = [name for name in dir(attacks) if name in str(refused.value).partition("Use")[2]]
    assert len(named) == 4 + ("Attack" in named)
    honest = algorithm.apply(start, attacked(attacks.SignFlip(), np.zeros(8, bool)))[0].params
    for instead in (attacks.SignFlip(), attacks.GaussianNoise(), attacks.LabelFlip(federation.NUM_CLASSES)):
        assert type(instead).__name__ in named
        after = algorithm.apply(start, attacked(instead))[0].params
        assert any(not np.allclose(a, b) for a, b in zip(*map(jax.tree.leaves, (after, honest)), strict=True))
    sent = attacks.PixelBackdoor(target=0, boost=8.0).corrupt(aggregators.Member(jnp.int32(1), UPDATE), jax.random.key(0))
    assert "PixelBackdoor" in named and int(sent.group) == 1 and float(sent.update["b"]) == -16


@pytest.mark.first(1)
@pytest.mark.parametrize("attack", [attacks.SignFlip(scale=5.0), attacks.InnerProduct(epsilon=5.0)])
@pytest.mark.parametrize("algorithm_name", ["fedavg", "fedsgd"])
def test_the_mean_diverges_and_the_median_converges(algorithm_name, attack):
    """A quadratic loss, whose minimum is at the clients' data. With 30 % attackers only the median converges."""
    import haiku as hk
    import optax

    optimum = np.array([1.0, -2.0, 3.0], np.float32)
    x = np.tile(optimum, (20, 1)) + np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32) / 10
    population = fedsim.FederatedData.from_arrays({"x": x}, sizes=[2] * 10)
    model = fedsim.Model.from_haiku(
        hk.transform(lambda examples: hk.get_parameter("w", [3], init=jnp.zeros)[None, :]),
        features={"x": jax.ShapeDtypeStruct((3,), jnp.float32)},
        loss=lambda examples, outputs: jnp.sum(jnp.square(examples["x"] - outputs), axis=1) / 2,
        metrics={},
    )
    sampler = fedsim.samplers.Attacked(
        fedsim.UniformSampler(population, clients=10, seed=0), attack, fraction=0.3, seed=1, every_round=True
    )
    distance = {}
    for aggregator in (aggregators.Mean(), aggregators.CoordinateMedian()):
        settings = {"model": model, "aggregator": aggregator, "execution": fedsim.Jit()}
        if algorithm_name == "fedavg":
            algorithm = fedsim.algorithms.FedAvg(client_optimizer=optax.sgd(0.2), batches=fedsim.Batches(size=1), **settings)
        else:
            algorithm = fedsim.algorithms.FedSGD(server_optimizer=optax.sgd(0.2), **settings)
        state, _ = algorithm.apply_rounds(algorithm.init(jax.random.key(0)), list(sampler.rounds(60)))
        distance[type(aggregator)] = np.linalg.norm(jax.tree.leaves(state.params)[0] - optimum)
    assert distance[aggregators.CoordinateMedian] < 0.5
    assert distance[aggregators.Mean] > 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attack": attacks.SignFlip()}, "Expected both attack and attackers, or neither"),
        ({"attackers": ATTACKERS}, "Expected both attack and attackers, or neither"),
        (
            {"attack": attacks.SignFlip(), "attackers": ATTACKERS[:3]},
            r"Expected attackers bool \[8\], one per client, got bool \[3\]",
        ),
        (
            {"attack": attacks.SignFlip(), "attackers": ATTACKERS * 1},
            r"Expected attackers bool \[8\], one per client, got int64",
        ),
    ],
)
def test_an_attack_without_attackers_raises_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(federation.cohort(POPULATION), **changes)


def test_an_algorithm_that_runs_its_clients_itself_refuses_attacks():
    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Loop(fedsim.Algorithm):
        def init(self, key):
            return jnp.zeros(())

        def apply(self, state, cohort):
            return state + len(cohort), {}

    own = Loop(batches=fedsim.Batches(size=4))
    cohorts = [federation.cohort(POPULATION, round=r) for r in range(2)]
    assert own.apply_rounds(own.init(None), cohorts)[0] == 2 * len(cohorts[0])
    cohorts[1] = dataclasses.replace(cohorts[1], attack=attacks.SignFlip(), attackers=ATTACKERS)
    with pytest.raises(ValueError, match="Loop overrides apply and runs the clients itself, got SignFlip.*without Attacked"):
        own.apply_rounds(own.init(None), cohorts)


@pytest.mark.first(2)
@pytest.mark.parametrize("kind", [fedsim.algorithms.SCAFFOLD, fedsim.algorithms.FedDyn])
@pytest.mark.parametrize("attack", [attacks.SignFlip(scale=4.0), attacks.InnerProduct(epsilon=4.0)], ids=str)
@pytest.mark.parametrize("aggregator", [aggregators.Clipped(1e3), aggregators.Mean(), aggregators.CoordinateMedian()], ids=str)
def test_an_attacker_keeps_the_memory_of_its_honest_update(attack, kind, aggregator):
    """If it kept the attacked message, the memory would be attacked again and grow by the attack's scale in every round."""
    algorithm = kind(
        model=federation.model(),
        client_optimizer=optax.sgd(0.1),
        batches=fedsim.Batches(size=4),
        aggregator=aggregator,
        execution=fedsim.Jit(memory="stream"),
    )
    start = algorithm.init(jax.random.key(0))
    honest, harmed = (algorithm.apply(start, attacked(attack, who))[0] for who in (np.zeros(8, bool), ATTACKERS))
    kept, kept_by_attackers = (state.clients.gather(np.arange(POPULATION.num_clients)) for state in (honest, harmed))
    federation.assert_trees_equal(kept_by_attackers, kept)
    assert not np.allclose(harmed.params["linear"]["w"], honest.params["linear"]["w"])
