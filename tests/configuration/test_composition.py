"""A configuration combines aggregators, compressors, attacks and stragglers by name with any algorithm."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsim
from fedsim import aggregators, algorithms, compressors, datasets, decentralized, samplers
from fedsim.configuration import RunConfig, Settings, _build, build
from fedsim.names import parse_call

EXAMPLES = Path(__file__).parents[2] / "examples"
BUFFERED = "buffered(size=1, concurrency=3)"


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
    assert attack.attackers == 4  # a fifth of the clients


@pytest.mark.parametrize(
    ("options", "changes", "clients", "attackers"),
    [
        (", clients=7", {"synchronization": "buffered(size=7, concurrency=9)"}, 7, 1),
        (", attackers=2", {}, 10, 2),
        ("", {"attackers": 0.01}, 10, 1),
        ("", {"synchronization": "synchronous(over_selection=1.3)", "clients": 13, "attackers": 0.3}, 10, 3),
    ],
)
def test_model_replacement_scales_by_the_updates_of_a_server_step(options, changes, clients, attackers):
    text = f"model_replacement(inner='label_flip(num_classes=10)'{options})"
    attack = built(attack=text, rounds=2, **{"clients": 10} | changes)[1].cohort(0).attack
    assert (attack.clients, attack.attackers) == (clients, attackers)


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
        (
            dict(labels=0.1, model="digits_autoencoder"),
            "labels, the feature 'y', with labels=0.1, got a model that reads x",
        ),
        (dict(labels=0.1, algorithm="kmeans"), "labels, the feature 'y', with labels=0.1, got KMeans without a model"),
        (dict(attack="model_replacement"), "The attack 'model_replacement' needs the option inner"),
        (
            dict(attack="model_replacement(inner='label_flip(num_classes=10)')", synchronization=BUFFERED),
            r"Expected the option clients of model_replacement with synchronization='buffered\(.*such as the size of buffered",
        ),
        (dict(attack="a_little_is_enough", synchronization=BUFFERED), "ALittleIsEnough needs honest updates in every server"),
        (dict(attack="min_max", synchronization="asynchronous(concurrency=3)"), "MinMax needs honest .* those of Asynchronous"),
        (dict(attack="sing_flip"), "There is no attack 'sing_flip'. Did you mean 'sign_flip'"),
        (dict(attack="sign_flip", attackers=1.5), "attackers=1.5"),
        (
            dict(sampler="poisson", clients=101),
            "A cohort of clients=101 on average is larger than the population of 100. Give at most clients=100",
        ),
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


def test_a_random_topology_is_drawn_with_the_seed_of_the_run_unless_it_has_a_seed():
    def edges(topology, seed):
        config = RunConfig(algorithm="dpsgd", dataset="digits(clients=20, seed=0)", topology=topology, seed=seed)
        return sorted(build(config, Settings(execution="jit")).algorithm.topology.graphs[0].edges)

    expected = [sorted(decentralized.random_regular(20, degree=4, seed=seed).graphs[0].edges) for seed in (0, 1)]
    assert expected[0] != expected[1]
    assert [edges("random_regular(degree=4)", seed) for seed in (0, 1)] == expected
    assert edges("random_regular(degree=4, seed=0)", 1) == expected[0] and len(edges("ring", 1)) == 20


def same(data, other):
    both = [[each.columns[name] for name in sorted(each.columns)] for each in (data, other)]
    return np.array_equal(data.sizes, other.sizes) and all(map(np.array_equal, *both))


WORDS = "vocabulary=1, oov_buckets=2, length=5"


@pytest.mark.parametrize(
    ("options", "model", "ids"),
    [
        ("vocabulary=1", None, 5),  # pad, bos, eos, one word, unknown
        ("vocabulary=1", "stackoverflow_lstm(embedding=4, hidden=4)", 5),
        (WORDS, "stackoverflow_transformer(embedding=8, feedforward=4)", 6),
        (WORDS, "stackoverflow_lstm(hidden=4, vocabulary=7)", 12),  # what the user gives stays
    ],
)
def test_a_model_has_the_vocabulary_of_its_dataset(options, model, ids, tmp_path):
    users = [{"client_id": name, "train": [{"tokens": "a x y z"}], "test": [{"tokens": "a p q r"}]} for name in "uv"]
    (tmp_path / "posts.jsonl").write_text("\n".join(map(json.dumps, users)))
    config = RunConfig(dataset=f"stackexchange({options})", data=str(tmp_path), clients=1, model=model)
    own, _, test, *_ = build(config, Settings(execution="jit"))
    assert own.model.num_classes == ids
    rate = own.model.metrics["oov_rate"]({"y": np.asarray(test.columns["y"])}, None)
    # Three of the five tokens "a p q r eos" are unknown. A model of another vocabulary takes other ids for these.
    assert rate.total.sum() / rate.weight.sum() == pytest.approx(0.6 if ids < 12 else 0)


@pytest.mark.parametrize(
    ("dataset", "model", "divisor"),
    [
        ("stackexchange(vocabulary=5)", "stackoverflow_lstm(tanh=True)", 13.3),
        ("stackexchange(vocabulary=5)", "stackoverflow_transformer", 13.3),
        ("stackexchange(vocabulary=5)", "stackoverflow_lstm(expected_length=2)", 2),
        ("stackoverflow_like", "stackoverflow_lstm", 13.3),
        ("stackoverflow_tag(vocabulary=5, length=4)", "stackoverflow_logistic", 5),
    ],
)
def test_a_model_that_is_named_has_the_loss_of_the_default_model(dataset, model, divisor):
    default = datasets.describe(dataset).default_model
    of_data = frozenset({"vocabulary", "length", "oov_buckets", "tags"})
    own = _build._model(model, dataset, default, of_data)
    if model == "stackoverflow_logistic":
        loss, plain = own.loss({"y": jnp.zeros((1, 500), jnp.uint8)}, jnp.zeros((1, 500))), 500 * np.log(2)
    else:
        loss = own.loss({"y": jnp.full((1, 20), 3)}, jnp.zeros((1, 20, own.num_classes)))
        plain = 20 * np.log(own.num_classes)
    assert loss[0] == pytest.approx(plain / divisor, rel=1e-5)


def test_a_model_that_means_something_else_by_a_vocabulary_does_not_get_it():
    description = datasets.describe("stackexchange(vocabulary=70)")
    assert description.default_model == "stackoverflow_lstm(vocabulary=70, length=20, oov_buckets=1, expected_length=13.3)"
    with pytest.raises(ValueError, match="needs the option"):
        build(RunConfig(dataset="stackexchange(vocabulary=70)", model="decoder"), Settings(execution="jit"))


def test_a_model_of_tags_has_the_numbers_of_its_dataset():
    posts = fedsim.FederatedData.from_arrays({"x": np.zeros((2, 6), np.int16), "y": np.zeros((2, 3), np.uint8)}, sizes=[1, 1])
    dataset = "stackoverflow_tag(vocabulary=8, tags=3, length=6)"
    splits = datasets.FederatedSplits(posts, posts, datasets.describe(dataset))
    for model in (None, "stackoverflow_logistic"):
        config = RunConfig(dataset=dataset, model=model, clients=1)
        own = build(config, Settings(execution="jit"), splits=splits).algorithm.model
        assert own.features["x"].shape == (6,)
        assert jax.eval_shape(own.init, jax.random.key(0))["linear"]["w"].shape == (8, 3)
