"""A configuration combines aggregators, compressors, attacks and stragglers by name with any algorithm."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from fedsim import aggregators, algorithms, compressors, datasets, decentralized, samplers
from fedsim.configuration import RunConfig, Settings, build
from fedsim.names import parse_call

EXAMPLES = Path(__file__).parents[2] / "examples"


def built(**changes):
    return build(RunConfig(dataset="digits", **changes), Settings(execution="jit"))


def test_names_and_their_options_are_combined_into_one_aggregator():
    algorithm, *_ = built(
        aggregator="trimmed_mean(trim=0.2)", compressor="top_k(fraction=0.5)", error_feedback=True, clip=2.0, downlink="cast"
    )
    clipped = algorithm.aggregator
    assert isinstance(clipped, aggregators.Clipped) and clipped.norm == 2
    assert isinstance(clipped.inner, aggregators.Compressed)
    assert isinstance(clipped.inner.compressor, compressors.ErrorFeedback)
    assert isinstance(clipped.inner.inner, aggregators.TrimmedMean) and clipped.inner.inner.trim == 0.2
    assert isinstance(algorithm.downlink, compressors.Cast)


def test_aggregators_and_attacks_are_nested_by_name():
    algorithm, sampler, *_ = built(
        aggregator="bucketing(size=3, inner='krum(attackers=1)')",
        attack="model_replacement(inner='label_flip(num_classes=10)', server_learning_rate=0.5)",
        clients=20,
    )
    assert algorithm.aggregator.size == 3 and algorithm.aggregator.inner.attackers == 1
    attack = sampler.cohort(0).attack
    assert (type(attack.inner).__name__, attack.clients, attack.server_learning_rate) == ("LabelFlip", 20, 0.5)
    assert built(attack="model_replacement(inner='label_flip(num_classes=10)', clients=7)")[1].cohort(0).attack.clients == 7


def test_clip_of_an_algorithm_that_clips_itself_is_its_own():
    algorithm, *_ = built(algorithm="dssgd", clip=0.01, hyperparameters={"epsilon": 1.0, "selection": "random"})
    assert (algorithm.clip, type(algorithm.aggregator)) == (0.01, aggregators.Sum)


def test_a_sampler_has_the_weighting_that_an_algorithm_determines():
    algorithm, sampler, *_ = built(algorithm="ifca", sampler="importance_by_norm")
    assert algorithm.weighting == sampler.weighting == "uniform"


@pytest.mark.parametrize("algorithm", ["reptile", "fedavg"])
def test_fedbuff_gives_clients_equal_weights(algorithm):
    assert built(algorithm=algorithm, synchronization="fedbuff(size=5, concurrency=10)").algorithm.weighting == "uniform"


def test_every_field_that_options_build_is_one_of_an_algorithm():
    classes = [*algorithms.ALGORITHMS.values(), *decentralized.ALGORITHMS.values()]
    options = [*dataclasses.fields(RunConfig), *dataclasses.fields(Settings)]
    assert {built for option in options for built in option.metadata["builds"]} <= {
        field.name for cls in classes for field in dataclasses.fields(cls)
    }


def test_without_names_the_algorithm_s_defaults_are_used():
    algorithm, sampler, *_ = built()
    assert type(algorithm.aggregator) is aggregators.Mean and algorithm.downlink is None
    assert type(sampler) is samplers.UniformSampler


def test_cohorts_have_attackers_and_stragglers():
    _, sampler, *_ = built(attack="sign_flip", attackers=0.3, stragglers=0.5, epochs=5, clients=20)
    cohorts = [sampler.cohort(round) for round in range(20)]
    assert {int((cohort.work < 1).sum()) for cohort in cohorts} == {10}
    assert 0.2 < sum(cohort.attackers.mean() for cohort in cohorts) / 20 < 0.4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(aggregator="medain"), "There is no aggregator 'medain'"),
        (dict(aggregator="trimmed_mean(trim=0.7)"), "trim=0.7"),
        (dict(compressor="eden(bits=0)"), "bits=0"),
        (dict(compressor="eden(bit=1)"), "bit"),
        (dict(error_feedback=True), "error_feedback=True requires a compressor"),
        (
            dict(algorithm="chocosgd", compressor="top_k", error_feedback=True),
            "ChocoSGD has a compressor of its own, for which error_feedback=True has no meaning",
        ),
        (dict(clip=-1.0), "clip=-1.0"),
        (dict(algorithm="dpsgd", weighting="uniform"), "DPSGD determines the weights of clients itself"),
        (
            dict(algorithm="agnosticfedavg", weighting="uniform", hyperparameters={"num_domains": 2}),
            "AgnosticFedAvg determines the weights of clients itself, so it takes no weighting, got weighting='uniform'",
        ),
        (dict(aggregator="bucketing(inner='kurm')"), "There is no aggregator 'kurm'. Did you mean 'krum'"),
        (dict(aggregator="bucketing(inner=3)"), "Expected inner to name a registered aggregator, in quotes, got inner=3"),
        (dict(aggregator="bucketing(inner='mine.py:own')"), "Expected inner to name a registered aggregator"),
        (
            dict(aggregator="krum(attackers=1, inner='secure_mean(max_weight=1)')"),
            "krum needs every single update, and of secure_mean, for example, the server sees the sum alone",
        ),
        (dict(attack="model_replacement"), "The attack 'model_replacement' needs the option inner"),
        (dict(attack="sing_flip"), "There is no attack 'sing_flip'. Did you mean 'sign_flip'"),
        (dict(attack="sign_flip", attackers=1.5), "attackers=1.5"),
        (dict(stragglers=0.5, epochs=1), "epochs"),
        (dict(stragglers=0.5, epochs=2, algorithm="adpsgd"), "without a clock in Stragglers, got FinishingNodes"),
        (
            dict(algorithm=f"{EXAMPLES}/python_loop.py:WeightTransfer", clip=1.0),
            "aggregates updates in its own way and takes no clip",
        ),
    ],
)
def test_invalid_names_and_numbers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        built(**changes)


DRAWN = [
    "digits", "digits(partition='shards', clients=20)", "synthetic(clients=5)", "synthetic_iid(clients=5)",
    "toy_regression(clients=5)", "emnist62_like(clients=3, max_examples=5)", "stackoverflow_like(clients=3, max_examples=5)",
]  # fmt: skip


@pytest.mark.parametrize("dataset", DRAWN)
def test_a_dataset_is_drawn_with_the_seed_of_the_run_unless_it_has_a_seed(dataset):
    name, options = parse_call(dataset)
    expected = [datasets.load(name, **options, seed=seed) for seed in (0, 1)]
    assert not same(expected[0].train, expected[1].train)

    def drawn(run_seed, **own):
        text = f"{name}({', '.join(f'{key}={value!r}' for key, value in (options | own).items())})"
        _, sampler, test, *_ = build(RunConfig(dataset=text, seed=run_seed, clients=2), Settings(execution="jit"))
        return sampler.data, test

    for data, splits in ((drawn(0), expected[0]), (drawn(1), expected[1]), (drawn(1, seed=0), expected[0])):
        assert same(data[0], splits.train) and same(data[1], splits.test)


def same(data, other):
    both = [[each.columns[name] for name in sorted(each.columns)] for each in (data, other)]
    return np.array_equal(data.sizes, other.sizes) and all(map(np.array_equal, *both))
