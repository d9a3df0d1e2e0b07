"""What `fedsim.differentiable` accepts and refuses, the derivatives of aggregators, and straight-through derivatives."""

import dataclasses

import federation
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import aggregators, compressors
from fedsim.differentiation._straight_through import StraightThroughCompressor, with_straight_through

POPULATION = federation.data()
COHORTS = [federation.cohort(POPULATION, round=round) for round in range(2)]
BATCHES = fedsim.Batches(size=4, epochs=2)

# Functions from a number to an aggregator, and the number. Derivatives are by this number, too.
DIFFERENTIABLE = {
    "mean": (lambda _: aggregators.Mean(), 1.0),
    "partly uniform": (lambda _: aggregators.PartlyUniform("*/w"), 1.0),
    "sum": (lambda _: aggregators.Sum(), 1.0),
    "clipped": (lambda norm: aggregators.Clipped(norm), 0.1),
    "centred clipping": (lambda radius: aggregators.CentredClipping(radius), 0.1),
    "noised": (lambda multiplier: aggregators.GaussianMechanism(multiplier, clip=1.0, denominator=3), 0.1),
    "locally noised": (lambda multiplier: aggregators.LocallyNoised(multiplier, clip=1.0), 0.1),
    "noised by a tree": (
        lambda multiplier: aggregators.MatrixMechanism(
            multiplier, clip=1.0, denominator=3, matrix=aggregators.BinaryTree(rounds=10)
        ),
        0.1,
    ),
    "geometric median": (lambda _: aggregators.GeometricMedian(), 1.0),
    "fools gold": (lambda confidence: aggregators.FoolsGold(confidence), 0.3),
    "bucketed geometric median": (lambda _: aggregators.Bucketing(2, inner=aggregators.GeometricMedian()), 1.0),
    "min norm": (lambda epsilon: aggregators.MinNorm(epsilon), 0.05),
    "random-k": (lambda _: aggregators.Compressed(compressors.RandomK(fraction=0.5)), 1.0),
    "identity, with feedback": (lambda _: aggregators.Compressed(compressors.ErrorFeedback(compressors.Identity())), 1.0),
    "clipped geometric median": (lambda norm: aggregators.Clipped(norm, inner=aggregators.GeometricMedian()), 0.3),
}
REFUSED = {
    "sorts the updates": [aggregators.CoordinateMedian(), aggregators.TrimmedMean(0.2)],
    "selects updates": [
        aggregators.Krum(attackers=0), aggregators.Bulyan(attackers=0), aggregators.DivideAndConquer(attackers=0),
        aggregators.FLAME(),
    ],
    "keeps the largest coordinates": [compressors.TopK(fraction=0.3), compressors.MagnitudePruning()],
    "orthogonalizes factors": [compressors.PowerSGD(rank=1)],
    "sends signs": [compressors.ScaledSign(), compressors.Drive()],
    "rounds": [
        compressors.Cast(), compressors.UniformQuantizer(), compressors.IntegerQuantizer(), compressors.QSGD(),
        compressors.RotatedUniformQuantizer(), compressors.TernGrad(), compressors.Eden(),
        aggregators.SecureMean(max_weight=12.0), aggregators.DistributedMechanism(1.0, clip=1.0, clients=3),
    ],
}  # fmt: skip
ATTACKS = {
    "sign flip": fedsim.attacks.SignFlip(),
    "noise": fedsim.attacks.GaussianNoise(deviation=0.1),
    "inner product": fedsim.attacks.InnerProduct(),
    "alie": fedsim.attacks.ALittleIsEnough(),
    "min-max": fedsim.attacks.MinMax(),
    "min-sum": fedsim.attacks.MinSum("deviation"),
}


def make(rate=0.2, **options):
    return fedsim.algorithms.FedAvg(
        model=federation.model(), client_optimizer=optax.sgd(rate), batches=BATCHES, weighting="uniform", **options
    )


START = make().init(jax.random.key(1))


def loss_of(state):
    """A smooth function of the parameters, which does not have a small derivative by accident."""
    return sum(jnp.sum(jnp.sin(2 * x + 1)) for x in jax.tree.leaves(state.params))


def assert_derivatives_agree(loss, *at, step=0.005):
    value_and_slopes = jax.jit(jax.value_and_grad(loss, tuple(range(len(at)))))
    _, slopes = value_and_slopes(*at)
    for i, slope in enumerate(slopes):
        above, below = (value_and_slopes(*(x + sign * (i == j) for j, x in enumerate(at)))[0] for sign in (step, -step))
        assert float(slope) == pytest.approx(float(above - below) / (2 * step), rel=0.02, abs=3e-3)
    assert max(abs(float(slope)) for slope in slopes) > 0.01


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k != "clipped")) for k in DIFFERENTIABLE])
def test_derivatives_through_aggregators_agree_with_finite_differences(kind):
    aggregator_of, number = DIFFERENTIABLE[kind]

    def loss(factor, of_number):
        algorithm = fedsim.differentiable(make(0.2 * factor, aggregator=aggregator_of(number * of_number)))
        return loss_of(algorithm.apply_rounds(START, COHORTS)[0])

    assert_derivatives_agree(loss, 1.0, 1.0)


# Client "2" overflows, client "4" has no examples, and the update of client "5" is 0.
ONE_NUMBER_EACH = fedsim.FederatedData.from_arrays({"x": np.array([1, 3, 3e38, 2, 0], np.float32)}, sizes=[1, 1, 1, 1, 0, 1])


def after_one_round(rate, client_ids, lanes=1, attack=None, **options):
    """Three steps of w + rate (x - w) per client, from w = 0. With an attack, the first client is an attacker."""
    net = hk.transform(lambda e: jnp.broadcast_to(hk.get_parameter("w", [], init=jnp.zeros), e["x"].shape))
    model = fedsim.Model.from_haiku(
        net, features={"x": jax.ShapeDtypeStruct((), jnp.float32)}, loss=lambda e, w: 0.5 * (w - e["x"]) ** 2
    )
    algorithm = fedsim.algorithms.FedAvg(
        model=model, client_optimizer=optax.sgd(rate), batches=fedsim.Batches(size=1, epochs=3),
        execution=fedsim.Jit(lanes=lanes), **options,
    )  # fmt: skip
    algorithm = fedsim.differentiable(algorithm)
    cohort = fedsim.Cohort.of(ONE_NUMBER_EACH, list(client_ids))
    if attack is not None:
        cohort = dataclasses.replace(cohort, attack=attack, attackers=np.arange(len(client_ids)) == 0)
    return jax.tree.leaves(algorithm.apply(algorithm.init(jax.random.key(0)), cohort)[0].params)[0]


@pytest.mark.parametrize("lanes", [1, pytest.param(2, marks=pytest.mark.first(2))])
def test_clients_with_fewer_steps_have_the_same_derivatives_beside_others(lanes):
    """The gradient of a step that a client does not take is 0, where the slope of clipping is NaN."""
    data = fedsim.FederatedData.from_arrays({"x": np.float32([3, 1, 2])}, sizes=[1, 2])
    net = hk.transform(lambda e: jnp.broadcast_to(hk.get_parameter("w", [], init=jnp.zeros), e["x"].shape))
    features = {"x": jax.ShapeDtypeStruct((), jnp.float32)}
    model = fedsim.Model.from_haiku(net, features=features, loss=lambda e, w: 0.5 * (w - e["x"]) ** 2)

    def after(rate):
        optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(rate))
        algorithm = fedsim.algorithms.FedAvg(
            model=model, client_optimizer=optimizer, batches=fedsim.Batches(size=1), execution=fedsim.Jit(lanes=lanes)
        )
        algorithm = fedsim.differentiable(algorithm)
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, ["0", "1"]))
        return jax.tree.leaves(state.params)[0]

    # Every step is clipped to 0.5, so that w after the round is (1 · 0.5 + 2 · 2 · 0.5) / 3 times the rate.
    np.testing.assert_allclose(jax.value_and_grad(after)(0.1), (0.25 / 3, 2.5 / 3), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:1 client update.* held a NaN:UserWarning")
@pytest.mark.parametrize("lanes", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_clients_that_do_not_count_have_no_part_in_derivatives(lanes):
    def after(rate):
        return after_one_round(rate, "01234", lanes)

    rates = np.array([1.9, 0.5], np.float32)
    expected = 2 * 3 * (1 - rates) ** 2  # of the mean of x (1 - (1 - rate)³) over x = 1, 3, 2
    np.testing.assert_allclose(jax.vmap(jax.grad(after))(rates), expected, rtol=1e-5)
    np.testing.assert_allclose(jax.jvp(after, (1.9,), (1.0,))[1], expected[0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:1 client update.* held a NaN:UserWarning")
@pytest.mark.parametrize(
    "kind",
    # The clients' only parameter makes all of them equal for FoolsGold, so that nobody counts. With noise of its own, a dropped
    # client counts as one with an update of 0.
    [k for k in DIFFERENTIABLE if k not in ("fools gold", "locally noised")],
)
def test_derivatives_of_aggregates_are_those_without_the_client_that_was_dropped(kind):
    aggregator_of, number = DIFFERENTIABLE[kind]

    def after(rate, client_ids):
        return after_one_round(rate, client_ids, aggregator=aggregator_of(number), weighting="uniform")

    slope = jax.grad(after)(0.5, "012345")
    assert float(slope) == pytest.approx(float(jax.grad(after)(0.5, "01345")), rel=1e-5)
    assert np.isfinite(slope) and slope != 0


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("client_ids", "options", "mean"),
    [
        ("15", {"update_norms": True}, (3 + 0) / 2),  # The update of client "5" is 0.
        ("01", {"attack": fedsim.attacks.ALittleIsEnough()}, 3),  # One honest client: the deviation of the updates is 0.
        ("01", {"attack": fedsim.attacks.MinMax("deviation")}, 3),
        ("01", {"attack": fedsim.attacks.MinSum("deviation")}, 3),
    ],
)
def test_roots_of_zero_have_no_part_in_derivatives(client_ids, options, mean):
    slope = jax.grad(after_one_round)(0.5, client_ids, weighting="uniform", **options)
    np.testing.assert_allclose(slope, 3 * (1 - 0.5) ** 2 * mean, rtol=1e-5)  # mean of x (1 - (1 - rate)³)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ATTACKS)
def test_derivatives_through_attacks_agree_with_finite_differences(kind):
    attacked = [dataclasses.replace(cohort, attack=ATTACKS[kind], attackers=np.arange(8) % 4 == 0) for cohort in COHORTS]

    def loss(factor):
        return loss_of(fedsim.differentiable(make(0.2 * factor)).apply_rounds(START, attacked)[0])

    assert_derivatives_agree(loss, 1.0)


@pytest.mark.parametrize("reason", REFUSED)
def test_parts_without_a_useful_derivative_say_so(reason):
    for part in REFUSED[reason]:
        is_compressor = isinstance(part, compressors.Compressor)
        aggregator = aggregators.Compressed(compressors.ErrorFeedback(part)) if is_compressor else part
        name = "aggregator.inner.compressor.compressor" if is_compressor else "aggregator.inner"
        with pytest.raises(ValueError, match="Use straight_through=True") as caught:
            fedsim.differentiable(make(aggregator=aggregators.Clipped(1.0, inner=aggregator)))
        assert f"{name}={part}, which {reason}" in str(caught.value)


def test_one_error_names_all_parts():
    refused = make(aggregator=aggregators.Clipped(1.0, inner=aggregators.TrimmedMean(0.2)), downlink=compressors.Cast())
    expected = r"got aggregator.inner=TrimmedMean\(.*\), which sorts the updates; downlink=Cast\(.*\), which rounds"
    with pytest.raises(ValueError, match=expected):
        fedsim.differentiable(refused)


def test_every_compressor_and_aggregator_is_covered():
    """A new part must pass finite differences, or say that it has no useful derivative."""
    refused = {type(part) for parts in REFUSED.values() for part in parts}
    known = {*compressors.COMPRESSORS.values(), *aggregators.AGGREGATORS.values()}
    made = [aggregator_of(number) for aggregator_of, number in DIFFERENTIABLE.values()]
    used = {type(part) for aggregator in made for part in (aggregator, aggregator.innermost)}
    assert known - refused - used == {compressors.Identity, compressors.RandomK}
    assert not refused & used


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["top_k", "tern_grad", *sorted(compressors.COMPRESSORS.keys() - {"top_k", "tern_grad"})])
def test_straight_through_compressors_send_the_same_bits_and_have_the_derivative_of_no_compression(name):
    plain, key = compressors.COMPRESSORS[name](), jax.random.key(3)
    through = with_straight_through(plain)
    if not plain.not_differentiable:
        assert through is plain
        return
    assert isinstance(through, StraightThroughCompressor)
    draw = np.random.default_rng(0)
    x, direction = (jnp.asarray(draw.normal(size=(6, 8)), jnp.float32) for _ in range(2))
    sent, slope = jax.jvp(lambda x: through.transmit(x, key, through.init(x)).value, (x,), (direction,))
    expected = plain.transmit(x, key, plain.init(x))
    np.testing.assert_array_equal(sent, expected.value)
    np.testing.assert_array_equal(slope, direction)
    assert through.transmit(x, key, through.init(x)).bits == expected.bits


def aggregate_of(aggregator, updates):
    """Returns what a server makes of updates ``[n, ...]`` with the weights 1, 2, ..., n."""
    memory, sent = aggregator.init(updates[0]), updates
    if not aggregator.sends_unchanged:
        keys = jax.random.split(jax.random.key(0), len(updates))
        sent = [aggregator.send(x, memory, (), key).update for x, key in zip(updates, keys, strict=True)]
    aggregator.check(sent[0], len(sent))
    accumulator = aggregator.zero(sent[0], len(sent))
    for slot, message in enumerate(sent):
        accumulator = aggregator.accumulate(accumulator, message, jnp.float32(slot + 1), jnp.int32(slot))
    return aggregator.finish_round(accumulator, memory, jax.random.key(9))[0]


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "plain",
    [part for parts in reversed(REFUSED.values()) for part in parts if isinstance(part, aggregators.Aggregator)],
    ids=lambda part: type(part).__name__,
)
def test_straight_through_aggregators_have_the_same_aggregate_and_the_derivative_of_the_mean(plain):
    through = with_straight_through(aggregators.Clipped(100.0, inner=plain))
    draw = np.random.default_rng(0)
    updates, direction = (jnp.asarray(draw.normal(size=(5, 4)), jnp.float32) for _ in range(2))
    aggregate, slope = jax.jvp(lambda x: aggregate_of(through, x), (updates,), (direction,))
    np.testing.assert_array_equal(aggregate, aggregate_of(plain, updates))
    np.testing.assert_allclose(slope, np.average(direction, axis=0, weights=[1, 2, 3, 4, 5]), rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # test_exact.py has a fast test of a straight-through round.
@pytest.mark.parametrize(
    "options",
    [
        {"aggregator": aggregators.Compressed(compressors.ErrorFeedback(compressors.ScaledSign()))},
        {"aggregator": aggregators.CoordinateMedian()},
        {"aggregator": aggregators.Bulyan(attackers=0)},
        {"aggregator": aggregators.DistributedMechanism(0.0, clip=100.0, clients=8, minimum=2, bits=20)},
        {"downlink": compressors.TopK(fraction=0.3)},
    ],
)
def test_straight_through_rounds_have_the_same_result(options):
    """For one round with a linear loss and without a downlink, the derivative is that of the plain mean."""
    draw = np.random.default_rng(0)
    slopes = jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype), START.params)

    def loss(factor, options):
        algorithm = fedsim.differentiable(make(0.2 * factor, **options), straight_through=True)
        state, _ = algorithm.apply(START, COHORTS[0])
        return fedsim.tree.dot(slopes, state.params), state.params

    (_, params), slope = jax.jit(jax.value_and_grad(lambda factor: loss(factor, options), has_aux=True))(1.0)
    expected, _ = make(**options).apply(START, COHORTS[0])
    federation.assert_trees_close(params, expected.params)
    if "downlink" not in options:
        plain, _ = jax.jit(jax.grad(lambda factor: loss(factor, {}), has_aux=True))(1.0)
        assert float(slope) == pytest.approx(float(plain), rel=1e-4)
        assert abs(float(plain)) > 0.01
    assert np.isfinite(slope) and slope != 0


def test_algorithms_that_choose_are_accepted_with_fixed_choices():
    clusters = fedsim.algorithms.HypCluster(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=BATCHES)
    with pytest.raises(ValueError, match="HypCluster itself, which lets each client choose"):
        fedsim.differentiable(clusters)
    assert fedsim.differentiable(clusters, straight_through=True).num_clusters == 2
    settings = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "batches": BATCHES}
    with pytest.raises(ValueError, match="DSSGD itself, which selects coordinates"):
        fedsim.differentiable(fedsim.algorithms.DSSGD(**settings))
    assert fedsim.differentiable(fedsim.algorithms.DSSGD(**settings, theta_u=1.0)).theta_u == 1.0


def test_a_round_in_plain_python_is_refused():
    @dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
    class Looping(fedsim.Algorithm):
        def apply(self, state, cohort):
            return state, None

    with pytest.raises(ValueError, match="got Looping, which overrides apply: define client_update or round instead"):
        fedsim.differentiable(Looping(batches=BATCHES))
    with pytest.raises(ValueError, match="Expected algorithm to be an instance of Algorithm"):
        fedsim.differentiable(3)


def test_the_copy_keeps_settings_and_the_original_does_not_change():
    algorithm = fedsim.algorithms.FedMGDA(
        model=federation.model(), client_optimizer=optax.sgd(0.1), batches=BATCHES, epsilon=0.2, execution=fedsim.Jit(lanes=3)
    )
    copy = fedsim.differentiable(algorithm)
    assert copy.execution == fedsim.Jit(lanes=3, differentiable=True) and algorithm.execution == fedsim.Jit(lanes=3)
    assert type(copy) is fedsim.algorithms.FedMGDA and copy.aggregator is algorithm.aggregator
    assert fedsim.differentiable(copy).execution is copy.execution
    adam = fedsim.algorithms.FedAdam(model=federation.model(), client_optimizer=optax.sgd(0.1), batches=BATCHES, tau=0.5)
    assert fedsim.differentiable(adam).tau == 0.5
