"""DP-SGD in the local steps of a client: differential privacy of its single examples, such as the patients of a hospital.

M. Abadi et al., "Deep learning with differential privacy", CCS 2016, algorithm 1: https://arxiv.org/abs/1607.00133. ``clip`` is
C, ``noise_multiplier`` is σ and the batch size is L. Deviation: batches are those of a shuffled pass over the examples, and not
drawn by Poisson sampling, so sampling adds no privacy; see `with_private_examples` for the accountant.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedsim import checks, rng, tree
from fedsim.aggregators import accumulation_dtype, widened
from fedsim.algorithms._descent import needs_loss
from fedsim.algorithms._local_training import LocalTraining, divided
from fedsim.data import Batch
from fedsim.model import Params, current_scope


def with_private_examples(training: LocalTraining, *, clip: float, noise_multiplier: float) -> LocalTraining:
    """Returns training whose steps take clipped gradients of single examples, summed and with noise (DP-SGD).

    A step's gradient is the sum over the batch of g * min(1, clip / ‖g‖), with noise of the deviation noise_multiplier * clip,
    divided by ``batches.size``, also if a batch is partial. The gradients of a batch, or of ``batches.microbatch`` examples of
    it, are computed side by side. The noise is drawn from the key of the client, the round and the step. Terms that do not
    depend on examples, such as FedProx's, are added without noise.

    In a round, an example is in one batch. So for the neighbouring data sets of which one has zeros in place of an example's
    gradient, k rounds of its client have the ε of ``privacy.epsilon(noise_multiplier, EveryRound(), rounds=k, delta=δ)``;
    `fedsim.privacy.actual` counts the rounds of each client. The number of a client's examples and the reported losses have no
    noise.

    This holds for algorithms whose clients send only what results from these steps, such as FedAvg, FedProx, SCAFFOLD with
    ``control_variate="II"`` and Ditto. Algorithms that use examples in other ways raise ``ValueError`` in the first round. Some
    make a pass over all examples: MimeLite, q-FedAvg, adaptive FedProx, agnostic FedAvg, FedALA, FedEM, FedProto, FedDistill,
    HypCluster and IFCA. pFedMe computes several gradients of a batch, which would all have the same noise. The losses of
    FixMatch and FedMatch are no means over the examples of a batch.

    Args:
      training: with one epoch of batches in a round.
      clip: C, the largest norm of an example's gradient, positive.
      noise_multiplier: σ, at least 0.

    Raises:
      ValueError: an argument is out of its range; the batches have several epochs or a number of steps, by which an example
        would be several times in a batch; or ``training`` has a gradient of its own. In the first round: the model has running
        statistics, or the optimizer needs the loss.

    >>> import fedsim, optax
    >>> class PrivateFedAvg(fedsim.algorithms.FedAvg):
    ...     def local_training(self, shared, client):
    ...         training = super().local_training(shared, client)
    ...         return with_private_examples(training, clip=1.0, noise_multiplier=2.0)
    >>> algorithm = PrivateFedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    >>> data = fedsim.datasets.load("digits(clients=5)").train
    >>> cohort = fedsim.UniformSampler(data, clients=2, seed=0).cohort(0)
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), cohort)
    >>> int(info.num_aggregated)
    2
    """
    checks.positive(clip=clip, remedy="give the norm that gradients of examples are clipped to")
    checks.number(least=0, noise_multiplier=noise_multiplier)
    batches = training.batches
    if batches.epochs != 1 or batches.steps is not None:
        raise ValueError(
            f"Expected batches of one epoch, got epochs={batches.epochs} and steps={batches.steps}: an example could be "
            "several times in a batch, and change its gradient by more than the norm. Take more rounds instead."
        )
    if training.gradient is not None:
        raise ValueError(
            "Expected training without a gradient of its own, got one: it could depend on examples in other ways. Use an "
            "algorithm whose steps minimize the loss of a batch, such as FedAvg."
        )
    single = dataclasses.replace(training, batches=dataclasses.replace(batches, microbatch=None))

    def clipped_sum(params: Params, part: Batch) -> tuple[jax.Array, Params]:
        """Returns the sums of the losses and of the clipped gradients of a batch."""

        def one(example: Batch) -> tuple[jax.Array, Params]:
            with current_scope().inner():
                loss, gradient = single.loss_and_gradient(params, example)
            wide = widened(gradient)
            counts = example.mask[0] & jnp.isfinite(tree.squared_norm(wide))
            kept = jax.tree.map(lambda g: jnp.where(counts, g, 0), wide)
            return jnp.where(example.mask[0], loss, 0), tree.clip(kept, clip)

        losses, gradients = jax.vmap(one)(divided(part, len(part.mask)))
        return jnp.sum(losses), jax.tree.map(lambda g: jnp.sum(g, axis=0), gradients)

    def gradient(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        if needs_loss(training.optimizer, params):
            raise ValueError(
                "Expected an optimizer that needs gradients alone, got one that needs the loss, which is computed from "
                "examples without noise: use another, such as optax.sgd."
            )
        parts = current_scope().parts
        if parts.statistics != () or parts.own_statistics != ():
            raise ValueError(
                "Expected a model without running statistics, got one with them: they are computed from examples without "
                "noise. Use GroupNorm."
            )
        microbatches = divided(batch, batches.num_microbatches(len(batch.mask)))
        zero = jnp.float32(0), jax.tree.map(lambda p: jnp.zeros(p.shape, accumulation_dtype(p.dtype)), params)

        def add(sums: tuple[jax.Array, Params], part: Batch) -> tuple[tuple[jax.Array, Params], None]:
            return tree.add(sums, clipped_sum(params, part)), None

        (loss, total), _ = jax.lax.scan(add, zero, microbatches)
        noise = rng.normal_like(rng.stream(batch.key, "private examples"), total)
        noised = tree.scale(tree.add(total, tree.scale(noise, noise_multiplier * clip)), 1 / batches.size)
        mean = loss / jnp.maximum(jnp.sum(batch.mask, dtype=jnp.float32), 1)
        return mean, jax.tree.map(lambda g, p: g.astype(p.dtype), noised, params)

    return dataclasses.replace(training, gradient=gradient, is_private=True)
