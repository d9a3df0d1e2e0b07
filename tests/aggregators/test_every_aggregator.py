"""Every robust aggregator, inside a round: the aggregate depends neither on the execution nor on the order of clients."""

import dataclasses
import functools

import federation
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedsim
from fedsim import aggregators

AGGREGATORS = {
    "median": aggregators.CoordinateMedian(),
    "trimmed": aggregators.TrimmedMean(0.2),
    "krum": aggregators.Krum(attackers=1),
    "multi-krum": aggregators.Krum(attackers=2, selected=3),
    "bulyan": aggregators.Bulyan(attackers=1),
    "geometric": aggregators.GeometricMedian(),
    "min norm": aggregators.MinNorm(),
    "aux mean": aggregators.AuxMean(inner=aggregators.TrimmedMean(0.2)),
    "clipped": aggregators.Clipped(1.0),
    "clipped median": aggregators.Clipped(1.0, inner=aggregators.CoordinateMedian()),
    "centred": aggregators.CentredClipping(1.0),
    "secure": aggregators.SecureMean(max_weight=12.0, clip=3000.0),
    "partly uniform": aggregators.PartlyUniform("x"),
    "noised": aggregators.GaussianMechanism(0.1, clip=1.0, denominator=5),
    "noised, adaptive": aggregators.GaussianMechanism(0.1, clip=aggregators.AdaptiveClip(), denominator=5),
    "locally noised": aggregators.LocallyNoised(0.1, clip=1.0),
    "noised by a tree": aggregators.MatrixMechanism(0.1, clip=1.0, denominator=5, matrix=aggregators.BinaryTree(rounds=10)),
    "divide and conquer": aggregators.DivideAndConquer(attackers=2, coordinates=20, iterations=2),
    "flame": aggregators.FLAME(),
    "fools gold": aggregators.AuxMean(inner=aggregators.FoolsGold()),
    "bucketing": aggregators.Bucketing(2, inner=aggregators.CoordinateMedian()),
}
MEAN, JIT = aggregators.Mean(), fedsim.Jit()
EXECUTIONS = {
    "pmap, 8 devices": fedsim.Pmap(devices=8),
    "pmap, 2 devices, 2 lanes, streamed": fedsim.Pmap(devices=2, lanes=2, memory="stream"),
    "debug": fedsim.Debug(),
}


@pytest.fixture(autouse=True)
def _small_leaves_are_divided_too(monkeypatch):
    monkeypatch.setattr("fedsim.aggregators._stack._MAX_UNDIVIDED", 4)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class MeanOfExamples(fedsim.Algorithm):
    """Each client sends the mean of its examples and sines of it; the server adds the aggregate to its state."""

    def init(self, key):
        return {"x": jnp.zeros(3), "y": jnp.float32(0), "z": jnp.zeros((16, 3))}

    def client_update(self, shared, client):
        def add(total, batch):
            mask = batch.mask.astype(jnp.float32)
            x = jnp.einsum("n,nf->f", mask, batch.examples["x"])
            y = total["y"] + jnp.vdot(mask, batch.examples["y"].astype(jnp.float32))
            return {"x": total["x"] + x, "y": y, "z": total["z"] + jnp.sin(jnp.outer(jnp.arange(16.0), x))}

        size = client.num_examples.astype(jnp.float32)
        total = client.for_each_batch(self.batches, add, jax.tree.map(jnp.zeros_like, shared))
        mean = jax.tree.map(lambda x: x / jnp.maximum(size, 1), total)
        with_aux = isinstance(self.aggregator, aggregators.AuxMean)
        return fedsim.ClientUpdate(aggregators.WithAux(mean, size) if with_aux else mean, size)

    def server_update(self, state, update, info):
        return jax.tree.map(jnp.add, state, update.update if isinstance(update, aggregators.WithAux) else update)


@functools.cache
def make(aggregator, execution):
    return MeanOfExamples(batches=fedsim.Batches(size=4), aggregator=aggregator, execution=execution)


def run(aggregator, execution=JIT, backwards=False):
    population, algorithm = federation.data(sizes=(7, 0, 3, 12, 1, 5, 9, 2, 4, 6, 8)), make(aggregator, execution)
    state = algorithm.init(jax.random.key(0))
    ids = population.client_ids[::-1] if backwards else population.client_ids
    for round in range(2):
        state, _ = algorithm.apply(state, fedsim.Cohort.of(population, ids, round=round))
    return jax.device_get(getattr(state, "server", state))


@functools.cache
def reference(name):
    return run(AGGREGATORS[name])


@pytest.mark.slow
@pytest.mark.parametrize("how", EXECUTIONS)
@pytest.mark.parametrize("name", AGGREGATORS)
def test_the_execution_does_not_change_the_result(name, how):
    federation.assert_trees_close(run(AGGREGATORS[name], EXECUTIONS[how]), reference(name))


@pytest.mark.first(2)
@pytest.mark.parametrize("name", [each for each in AGGREGATORS if each != "bucketing"])  # drawn from positions in the cohort
def test_client_order_does_not_matter(name):
    federation.assert_trees_close(run(AGGREGATORS[name], backwards=True), reference(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in AGGREGATORS if each != "secure"])
def test_they_differ_from_the_mean(name):
    """A control for the other tests: every aggregator, except one that only rounds, differs from the mean."""
    assert np.abs(reference(name)["x"] - run(MEAN)["x"]).max() > 1e-3


def test_a_cohort_too_small_for_krum_raises_an_error_before_the_first_round():
    algorithm = MeanOfExamples(batches=fedsim.Batches(size=4), aggregator=aggregators.Krum(attackers=3))
    with pytest.raises(ValueError, match=r"Krum\(attackers=3\) needs cohorts of at least"):
        algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())


class Doubled(aggregators.AuxMean):
    def send(self, update, server_memory, memory, key):
        sent = super().send(update, server_memory, memory, key)
        return sent._replace(update=sent.update._replace(update=jax.tree.map(lambda x: 2 * x, sent.update.update)))


def test_what_a_subclass_of_aux_mean_sends_is_what_arrives():
    plain, doubled = (make(cls(), JIT) for cls in (aggregators.AuxMean, Doubled))
    moved = [each.apply(each.init(jax.random.key(0)), federation.cohort())[0] for each in (plain, doubled)]
    once, twice = (jax.device_get(getattr(state, "server", state)) for state in moved)
    federation.assert_trees_close(jax.tree.map(lambda x: 2 * x, once), twice)
    assert np.any(once["x"])
