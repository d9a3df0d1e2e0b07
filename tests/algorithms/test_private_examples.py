"""DP-SGD in local steps, against NumPy from the paper's algorithm, and mechanisms that are broken."""

import dataclasses

import federation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedsim
from fedsim import algorithms, metrics, tree
from fedsim.algorithms import LocalTraining, with_private_examples
from fedsim.data import Batch, Batches

CLIP, ROWS = 0.7, 5
DRAW = np.random.default_rng(0)
X, Y = DRAW.normal(size=(ROWS, 3)).astype(np.float32), DRAW.normal(size=ROWS).astype(np.float32) * 3
AUGMENTED = {"weak": fedsim.augmentations.noise, "strong": fedsim.augmentations.noise}
PARAMS = {"w": jnp.array([0.5, -1.0, 2.0]), "b": jnp.float32(0.3)}


def loss(params, batch):
    """Half the squared error of a linear model."""
    error = batch.examples["x"] @ params["w"] + params["b"] - batch.examples["y"]
    return metrics.masked_mean(0.5 * jnp.square(error), batch.mask)


def batch_of(rows, size, key=0):
    mask = np.arange(size) < rows
    at = np.minimum(np.arange(size), rows - 1)
    return Batch({"x": jnp.array(X[at]), "y": jnp.array(Y[at])}, jnp.array(mask), jax.random.key(key), 0)


def private(noise=0.0, clip=CLIP, size=8, **options):
    training = LocalTraining(loss, Batches(size=size, **options), optax.sgd(1.0))
    return with_private_examples(training, clip=clip, noise_multiplier=noise)


def expected(rows, size, clip=CLIP):
    """Returns the gradient of algorithm 1 without noise: by w and by b."""
    total = np.zeros(4)
    for x, y in zip(X[:rows].astype(np.float64), Y[:rows].astype(np.float64), strict=True):
        gradient = (x @ [0.5, -1.0, 2.0] + 0.3 - y) * np.append(x, 1)
        total += gradient * min(1, clip / np.linalg.norm(gradient))
    return total / size


def flat(gradient):
    return np.append(gradient["w"], gradient["b"])


@pytest.mark.parametrize(("rows", "microbatch"), [(5, None), (5, 3), (1, 1)])
def test_without_noise_it_is_the_papers_algorithm_in_numpy(rows, microbatch):
    value, gradient = private(microbatch=microbatch).step_gradient(PARAMS, batch_of(rows, 8))
    np.testing.assert_allclose(flat(gradient), expected(rows, 8), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(value, loss(PARAMS, batch_of(rows, 8)), rtol=1e-5)


def test_clipping_the_mean_of_a_batch_is_something_else():
    """The negative control of the test above."""
    plain = LocalTraining(loss, Batches(size=8), optax.sgd(1.0)).step_gradient(PARAMS, batch_of(5, 8))[1]
    assert np.abs(flat(tree.clip(plain, CLIP)) - expected(5, 8)).max() > 0.05


def test_one_example_moves_the_gradient_by_at_most_the_norm():
    one, other = (private(noise=3.0).step_gradient(PARAMS, batch_of(rows, 8))[1] for rows in (4, 5))
    moved = np.linalg.norm(flat(one) - flat(other)) * 8
    assert moved <= CLIP * 1.0001
    assert moved > 0.1


def test_the_noise_has_its_deviation_and_a_key_of_each_step():
    wide = {"w": jnp.zeros(4_000)}
    training = LocalTraining(lambda params, batch: 0.0 * jnp.sum(params["w"]), Batches(size=8), optax.sgd(1.0))
    training = with_private_examples(training, clip=CLIP, noise_multiplier=2.0)
    one, other = (np.asarray(training.step_gradient(wide, batch_of(5, 8, key))[1]["w"]) for key in (0, 1))
    assert np.std(one) == pytest.approx(2 * CLIP / 8, rel=0.05)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.08


def test_an_example_whose_gradient_is_not_finite_counts_as_zeros():
    def broken(params, batch):
        return loss(params, batch) * jnp.where(batch.examples["y"][0] == Y[1], jnp.nan, 1.0)

    training = LocalTraining(broken, Batches(size=8), optax.sgd(1.0))
    training = with_private_examples(training, clip=CLIP, noise_multiplier=0.0)
    gradient = flat(training.step_gradient(PARAMS, batch_of(3, 8))[1])
    others = expected(3, 8) - (expected(2, 8) - expected(1, 8))
    np.testing.assert_allclose(gradient, others, rtol=1e-5, atol=1e-7)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Sends(fedsim.Algorithm):
    noise: float

    def init(self, key):
        return {"w": jnp.zeros(500)}

    def client_update(self, shared, client):
        training = LocalTraining(lambda p, batch: jnp.mean(batch.examples["x"]) * jnp.sum(p["w"]), self.batches, optax.sgd(1.0))
        local = with_private_examples(training, clip=CLIP, noise_multiplier=self.noise).run(client, shared)
        return fedsim.ClientUpdate(local.params, jnp.float32(1))

    def server_update(self, state, update, info):
        return update


def test_clients_have_noise_of_their_own_in_any_execution():
    """Two clients with the same examples send different updates; with no noise, they send the same."""
    data = fedsim.FederatedData.from_arrays({"x": np.zeros([6, 2], np.float32), "y": np.zeros(6, np.int32)}, sizes=[3, 3])

    def after(noise, execution):
        algorithm = Sends(noise=noise, batches=Batches(size=2), execution=execution)
        state, _ = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, data.client_ids))
        return np.asarray(fedsim.rounds.server_state(state)["w"])

    one = after(2.0, fedsim.Jit())
    # Two steps of each of two clients: the mean of two sums of two draws.
    assert np.std(one) == pytest.approx(2 * CLIP / 2, rel=0.1)
    assert np.abs(after(0.0, fedsim.Jit())).max() == 0
    np.testing.assert_allclose(after(2.0, fedsim.Jit(lanes=2)), one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0}, "clip > 0 and finite, got clip=0.0"),
        ({"noise": -1.0}, "noise_multiplier >= 0"),
        ({"epochs": 2}, "batches of one epoch, got epochs=2 and steps=None"),
        ({"steps": 3}, "batches of one epoch, got epochs=1 and steps=3"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^Expected {message}"):
        private(**options)
    with pytest.raises(ValueError, match="^Expected training without a gradient of its own"):
        with_private_examples(private(), clip=1.0, noise_multiplier=1.0)


def after_a_round(cls, **options):
    """Returns the state after a round of an algorithm whose local training makes examples private."""

    def local_training(self, shared, client):
        return with_private_examples(cls.local_training(self, shared, client), clip=1.0, noise_multiplier=1.0)

    options = {"model": federation.model(), "batches": Batches(size=4), "client_optimizer": optax.sgd(0.1)} | options
    algorithm = type(f"Private{cls.__name__}", (cls,), {"local_training": local_training})(**options)
    return algorithm.apply(algorithm.init(jax.random.key(0)), federation.cohort())[0]


@pytest.mark.parametrize(
    ("cls", "options", "what"),
    [
        (algorithms.MimeLite, {}, "LocalTraining.full_gradient"),
        (algorithms.SCAFFOLD, {"control_variate": "I"}, "LocalTraining.full_gradient"),
        (algorithms.QFedAvg, {}, "LocalTraining.mean_loss"),
        (algorithms.AdaptiveFedProx, {}, "LocalTraining.mean_loss"),
        (algorithms.FedALA, {}, "LocalTraining.loss_and_gradient"),
        (algorithms.AgnosticFedAvg, {"num_domains": 4, "domain": "y"}, "PrivateAgnosticFedAvg"),
        (algorithms.PFedMe, {}, "PrivatePFedMe"),
        (algorithms.FedProto, {}, "PrivateFedProto"),
        (algorithms.FedDistill, {}, "PrivateFedDistill"),
        (algorithms.HypCluster, {}, "PrivateHypCluster"),
        (algorithms.IFCA, {}, "PrivateIFCA"),
        (algorithms.FedEM, {}, "PrivateFedEM"),
        (algorithms.FixMatch, AUGMENTED, "PrivateFixMatch"),
        (algorithms.FedMatch, AUGMENTED, "PrivateFedMatch"),
    ],
)
def test_algorithms_that_use_examples_in_other_ways_are_refused(cls, options, what):
    with pytest.raises(ValueError, match=f"^Expected training without private examples for {what}, got .*noise. Use FedAvg."):
        after_a_round(cls, **options)


@pytest.mark.parametrize("cls", [algorithms.Mime, algorithms.FedSAM, algorithms.PerFedAvg, algorithms.SplitFed])
def test_algorithms_with_gradients_of_their_own_are_refused(cls):
    with pytest.raises(ValueError, match="^Expected training without a gradient of its own"):
        after_a_round(cls)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [algorithms.FedProx, algorithms.SCAFFOLD, algorithms.Ditto, algorithms.MOON, algorithms.FedDyn])
def test_algorithms_that_send_what_comes_of_the_steps_are_not_refused(cls):
    after_a_round(cls)
