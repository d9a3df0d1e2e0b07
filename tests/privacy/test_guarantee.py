"""What a run promises: which algorithms reach the server through the mechanism alone, and how several updates are counted."""

import dataclasses
import functools
import math

import federation
import jax
import jax.numpy as jnp
import optax
import pytest

import fedsim
from fedsim import aggregators, compressors
from fedsim.aggregators import BinaryTree, DistributedMechanism, GaussianMechanism
from fedsim.privacy import (
    DistributedGuarantee,
    EveryRound,
    Guarantee,
    Poisson,
    calibrated,
    check,
    correlated,
    distributed_epsilon,
    epsilon,
    with_likely_minimum,
)

MECHANISM = GaussianMechanism(1.0, clip=0.5, denominator=4)
DISTRIBUTED = DistributedMechanism(1.0, clip=0.5, clients=4, minimum=2, bits=20)


def make(cls, aggregator=MECHANISM, **options):
    options = {"model": federation.model(), "client_optimizer": optax.sgd(0.1), "weighting": "uniform"} | options
    known = {field.name for field in dataclasses.fields(cls) if field.init}
    options = {name: value for name, value in options.items() if name in known}
    return cls(batches=fedsim.Batches(size=4), aggregator=aggregator, **options)


class Own(GaussianMechanism):
    """A user's subclass, of which nothing is known."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Leaky(fedsim.algorithms.FedAvg):
    """Its server also reads what one of these functions returns, of the clients, their info or the update."""

    leak: str = ""

    def round(self, state, clients):
        shared = self.broadcast(state)
        if self.leak == "map":
            largest = jnp.max(clients.map(lambda shared, client: client.num_examples, shared))
            shared = shared._replace(params=jax.tree.map(lambda x: x * jnp.asarray(largest, x.dtype), shared.params))
        others = {"another call": aggregators.Mean(), "less noise": dataclasses.replace(MECHANISM, noise_multiplier=0.1)}
        if self.leak in others:
            clients.aggregate(self.client_update, shared, name="other", aggregator=others[self.leak])
        update, info = clients.aggregate(self.client_update, shared)
        factor = {"loss": info.clients["loss"].sum(), "cohort": info.num_clients, "map": 1}.get(self.leak, 1)
        update = jax.tree.map(lambda x: x * jnp.asarray(factor, x.dtype), update)
        return self.server_update(state, update, info), info


@pytest.mark.parametrize(
    ("algorithm", "calls"),
    [
        (make(fedsim.algorithms.FedAvg), 1),
        (make(fedsim.algorithms.FedAdam), 1),
        (make(fedsim.algorithms.Mime), 2),
        (make(fedsim.algorithms.FedAvg, averaging=0.9), 1),
        (
            make(
                fedsim.algorithms.FedAvg,
                aggregators.Clipped(1.0, inner=aggregators.Compressed(compressors.Eden(), inner=MECHANISM)),
            ),
            1,
        ),
        (make(Leaky), 1),
    ],
)
def test_updates_of_a_client_are_counted(algorithm, calls):
    assert check(algorithm, federation.data()) == calls


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            make(fedsim.algorithms.FedAvg, aggregators.Mean()),
            "updates to be aggregated by GaussianMechanism, got Mean in FedAvg",
        ),
        (make(fedsim.algorithms.FedAvg, Own(1.0, clip=0.5, denominator=4)), "updates .*, got Own in FedAvg: what clients"),
        (
            make(fedsim.algorithms.SCAFFOLD),
            "the server of SCAFFOLD .* depends on weight of 'update' and on population of the co",
        ),
        (
            make(fedsim.algorithms.FedNova),
            "updates to be aggregated by GaussianMechanism, got AuxMean in FedNova: what clients",
        ),
        (make(fedsim.algorithms.FedAvg, weighting="examples"), "weighting='uniform' with GaussianMechanism, got weighting="),
        (make(fedsim.algorithms.FedAvg, staleness=fedsim.Staleness(bound=2)), "rounds whose clients start from this round's"),
        (make(fedsim.algorithms.FedAvg, nonfinite="raise"), "nonfinite='drop', got nonfinite='raise' in FedAvg: one client's"),
        (
            make(Leaky, DISTRIBUTED, leak="loss"),
            "the server of Leaky to learn of clients through DistributedMechanism alone, .* depends on loss of 'update'",
        ),
        (make(Leaky, leak="loss"), "the server of Leaky .* depends on loss of 'update', without noise: use another algorithm"),
        (make(Leaky, leak="cohort"), "the server of Leaky .* depends on count of the cohort, without noise"),
        (make(Leaky, leak="map"), "the server of Leaky .* depends on result of 'map', without noise"),
        (make(Leaky, leak="another call"), "updates to be aggregated by GaussianMechanism, got Mean in Leaky"),
        (
            make(Leaky, leak="less noise"),
            "updates to be aggregated by the algorithm's own GaussianMechanism, got another one in",
        ),
    ],
)
def test_other_ways_from_clients_to_the_server_are_named(algorithm, message):
    with pytest.raises(ValueError, match=f"^Expected {message}"):
        check(algorithm, federation.data())


def test_a_client_in_two_calls_is_counted_twice():
    """Two updates with independent noise are one of twice the dimension, whose sensitivity is √2 times the norm."""
    sampler = fedsim.samplers.PoissonSampler(federation.data(), probability=0.5, seed=0)
    one, two = (Guarantee.of(make(cls), sampler, delta=1e-3) for cls in (fedsim.algorithms.FedAvg, fedsim.algorithms.Mime))
    assert (one.participation, one.noise_multiplier) == (Poisson(0.5), 1.0)
    assert two.noise_multiplier == pytest.approx(2**-0.5)
    every = dataclasses.replace(two, participation=EveryRound())
    assert every.epsilon(5) == pytest.approx(epsilon(1.0, EveryRound(), rounds=10, delta=1e-3))
    with pytest.raises(ValueError, match=r"^Expected 0 < delta <= 0.125, got delta=0.2: .* one of 8 clients may be published"):
        Guarantee.of(make(fedsim.algorithms.FedAvg), sampler, delta=0.2)


@pytest.mark.slow
def test_noise_of_the_clients_has_the_epsilon_of_its_accountant():
    sampler = fedsim.samplers.PoissonSampler(federation.data(), probability=0.5, seed=0)
    algorithm = make(fedsim.algorithms.FedAvg, aggregators.Clipped(1.0, inner=DISTRIBUTED))
    size = sum(leaf.size for leaf in jax.tree.leaves(federation.model().init(jax.random.key(0))))
    guarantee = Guarantee.of(algorithm, sampler, delta=0.01)
    assert isinstance(guarantee, DistributedGuarantee) and (guarantee.size, guarantee.noise_multiplier) == (size, 1.0)
    assert guarantee.epsilon(3) == distributed_epsilon(DISTRIBUTED, size, Poisson(0.5), rounds=3, delta=0.01)
    assert guarantee.epsilon_if_seen(3**0.5) == distributed_epsilon(DISTRIBUTED, size, EveryRound(), rounds=3, delta=0.01)
    assert guarantee.epsilon_if_seen(0.0) == 0
    private = calibrated(algorithm, sampler, epsilon=2.0, delta=0.01, rounds=3)
    assert 1.99 < Guarantee.of(private, sampler, delta=0.01).epsilon(3) <= 2


def test_what_the_accountant_of_the_clients_noise_does_not_know_is_refused():
    sampler = fedsim.samplers.PoissonSampler(federation.data(), probability=0.5, seed=0)
    one, two = (make(cls, DISTRIBUTED) for cls in (fedsim.algorithms.FedAvg, fedsim.algorithms.Mime))
    with pytest.raises(ValueError, match="^Expected one update of a client in a round with DistributedMechanism, got 2"):
        Guarantee.of(two, sampler, delta=0.01)
    with pytest.raises(ValueError, match="^Expected one update of a client in a round with DistributedMechanism, got 2"):
        calibrated(two, sampler, epsilon=1.0, delta=0.01, rounds=3)
    with pytest.raises(
        ValueError, match="^Expected relation='zero_out' with DistributedMechanism, got relation='add_or_remove'"
    ):
        Guarantee.of(one, sampler, delta=0.01, relation="add_or_remove")
    with pytest.raises(
        ValueError, match="^Expected a GaussianMechanism for noise that is correlated between rounds, got Distr"
    ):
        correlated(one, BinaryTree(rounds=3))
    with pytest.raises(ValueError, match="^Expected a DistributedMechanism, got Gaussian"):
        with_likely_minimum(make(fedsim.algorithms.FedAvg), sampler)


def test_a_likely_minimum_is_missed_seldom():
    """By the binomial law, summed up."""
    data = federation.singletons(60)
    algorithm = make(fedsim.algorithms.FedAvg, DistributedMechanism(1.0, clip=0.5, clients=15))
    sampler = fedsim.samplers.PoissonSampler(data, probability=0.25, seed=0)
    chances = [math.comb(60, k) * 0.25**k * 0.75 ** (60 - k) for k in range(61)]
    for chance in (0.01, 0.2):
        minimum = with_likely_minimum(algorithm, sampler, chance=chance).aggregator.minimum
        assert sum(chances[:minimum]) < chance <= sum(chances[: minimum + 1])
    everyone = fedsim.samplers.PoissonSampler(data, probability=1.0, seed=0)
    assert with_likely_minimum(algorithm, everyone) is algorithm
    given = make(fedsim.algorithms.FedAvg, DISTRIBUTED)
    assert with_likely_minimum(given, sampler) is given
    # Clients without examples send nothing.
    half_empty = fedsim.FederatedData.from_arrays(data.columns, sizes=[1, 0] * 60)
    of_half = fedsim.samplers.PoissonSampler(half_empty, probability=0.25, seed=0)
    assert (
        with_likely_minimum(algorithm, of_half).aggregator.minimum == with_likely_minimum(algorithm, sampler).aggregator.minimum
    )


def test_with_all_clients_in_every_round_the_minimum_is_the_number_of_those_that_take_a_step():
    """One of the eight clients has no examples, so a sum of eight would never be revealed."""
    everyone = fedsim.UniformSampler(federation.data(), clients=8, seed=0)
    algorithm = make(fedsim.algorithms.FedAvg, DistributedMechanism(1.0, clip=0.5, clients=8, bits=20))
    for use in (Guarantee.of, functools.partial(calibrated, epsilon=1.0, rounds=3)):
        with pytest.raises(ValueError, match="^Expected at least minimum=8 clients that take a step .* got 7 in the po"):
            use(algorithm, everyone, delta=0.01)
    fitting = with_likely_minimum(algorithm, everyone)
    assert fitting.aggregator.minimum == 7
    assert "nobody sees a sum of fewer than 7 clients" in Guarantee.of(fitting, everyone, delta=0.01).assumptions[1]


def test_the_initial_parameters_are_an_assumption():
    guarantee = Guarantee(noise_multiplier=1.0, participation=Poisson(0.1), delta=0.01)
    assert "Of the start: the initial parameters were not computed from these clients." in guarantee.assumptions


@pytest.mark.slow
def test_updates_that_depend_on_what_clients_keep_are_refused_where_sampling_should_hide_who_takes_part():
    data = federation.data()
    feedback = aggregators.Compressed(compressors.ErrorFeedback(compressors.TopK(fraction=0.5)), inner=MECHANISM)
    algorithm = make(fedsim.algorithms.FedAvg, feedback)
    poisson = fedsim.samplers.PoissonSampler(data, probability=0.5, seed=0)
    for use in (Guarantee.of, functools.partial(calibrated, epsilon=1.0, rounds=3)):
        with pytest.raises(ValueError, match="^Expected clients to send nothing that depends on what they keep .*Feedback"):
            use(algorithm, poisson, delta=0.01)
    Guarantee.of(algorithm, fedsim.samplers.CyclicSampler(data, clients=4, seed=0), delta=0.01)
    without = aggregators.Compressed(compressors.TopK(fraction=0.5), inner=MECHANISM)
    Guarantee.of(make(fedsim.algorithms.FedAvg, without), poisson, delta=0.01)
    kept = fedsim.models.digits_dense().with_parts(kept="linear_2/*")
    digits = fedsim.datasets.load("digits(clients=8)").train
    of_digits = fedsim.samplers.PoissonSampler(digits, probability=0.5, seed=0)
    with pytest.raises(ValueError, match="what they keep between rounds where .* got FedAvg"):
        Guarantee.of(make(fedsim.algorithms.FedAvg, model=kept), of_digits, delta=0.01)
    # Ditto's clients keep models that they do not send.
    Guarantee.of(make(fedsim.algorithms.Ditto, personal_optimizer=optax.sgd(0.1)), poisson, delta=0.01)


def test_a_run_refuses_the_guarantee_of_another_one_and_an_end_by_its_losses():
    data = federation.data()
    sampler = fedsim.samplers.PoissonSampler(data, probability=0.5, seed=0)
    FedAvg = fedsim.algorithms.FedAvg
    algorithm = make(FedAvg)
    guarantee = Guarantee.of(algorithm, sampler, delta=0.01)
    start = functools.partial(fedsim.experiment.run, rounds=1, folder=None, progress=False)
    less = make(fedsim.algorithms.FedAvg, dataclasses.replace(MECHANISM, noise_multiplier=0.5))
    tree = correlated(algorithm, BinaryTree(rounds=1))
    other = fedsim.samplers.PoissonSampler(data, probability=0.6, seed=0)
    two = make(fedsim.algorithms.Mime)
    for wrong in ((less, sampler), (algorithm, other), (tree, sampler), (two, sampler), (make(FedAvg, DISTRIBUTED), sampler)):
        with pytest.raises(
            ValueError,
            match="^Expected (the guarantee of this algorithm with this sampler, .*Guarantee|clients whose rounds have a min)",
        ):
            start(*wrong, privacy=guarantee)
    bits = make(FedAvg, dataclasses.replace(DISTRIBUTED, bits=12))
    with pytest.raises(ValueError, match=r"this sampler, DistributedGuarantee.*bits=12.* got DistributedGuarantee.*bits=20"):
        start(bits, sampler, privacy=Guarantee.of(make(FedAvg, DISTRIBUTED), sampler, delta=0.01))
    with pytest.raises(ValueError, match="^Expected no stop_when with privacy, got stop_when='spent"):
        start(algorithm, sampler, privacy=guarantee, stop_when="spent(megabytes=1)")
    guarantee.check_run(algorithm, sampler)
    Guarantee.of(two, sampler, delta=0.01).check_run(two, sampler)
