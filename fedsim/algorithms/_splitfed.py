"""SplitFed: federated averaging of a network that is divided between each device and the server.

C. Thapa, M. A. P. Chamikara, S. Camtepe, L. Sun, "SplitFed: when federated learning meets split learning", AAAI 2022, SFLV1
(Algorithms 1 and 2): https://arxiv.org/abs/2004.12088. All clients of a round work in parallel, the server has a copy of its
part for each of them, and both parts are averaged at the end of the round. The version without label sharing, whose last layers
are on the device again, is the U-shaped configuration of P. Vepakomma et al., "Split learning for health", 2018:
https://arxiv.org/abs/1812.00564. Deviations: a compressor; a client takes as many local steps as ``batches`` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, metrics, rng, tree
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local, LocalTraining, parts_of
from fedsim.compressors import Compressor, Identity
from fedsim.data import Batch
from fedsim.model import Params, SplitModel, current_scope
from fedsim.rounds import Client, ClientUpdate


class Traffic(NamedTuple):
    """The bits that cross the cuts from the device to the server and back, ``float32 []``."""

    up: jax.Array
    down: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SplitFed(FedAvg):
    """FedAvg of a network whose first part is on the device and whose second part is on the server.

    In every local step the device sends its activations and the labels up, and the server sends the gradient with respect to
    the activations down. With a model that has a ``head``, the device computes the last layers and the loss itself, so the
    labels stay there: the server sends its activations down, and the device their gradient up. Uncompressed, this is `FedAvg`
    of the whole model. A model without parts is on the device as a whole.

    The info of a round has for each client ``step_bits_up`` and ``step_bits_down``, what crosses the cuts per local step, and
    ``device_bits_up`` and ``device_bits_down``, all that the device sends and receives in the round: this and its parts of the
    model, uncompressed, ``float32``. (``bits_up`` and ``bits_down`` are those of all parameters, also of the server's copies,
    as an aggregator or a downlink compresses them.)

    Attributes:
      model: a `fedsim.SplitModel`.
      cut_compressor: compresses what crosses the cuts, without memory: each example's activations are a message of their own,
        and so are the gradients with respect to them. The server's gradient is that at the activations that arrived.
      client_optimizer, server_optimizer, weighting: see `FedAvg`. The first takes the steps of all parts.

    Raises:
      ValueError: a model without parts, which sends nothing across a cut, has a ``cut_compressor``; or a class overrides
        ``client_loss`` for a model in parts, whose loss is that of the model.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits", clients=4).train
    >>> algorithm = SplitFed(
    ...     model=fedsim.models.digits_split(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=16))
    >>> state, info = algorithm.apply(algorithm.init(jax.random.key(0)), fedsim.Cohort.of(data, data.client_ids[:2]))
    >>> sorted(state.params), info.clients["step_bits_down"].max().item() == 16 * 128 * 32  # 16 images, 128 floats
    (['device', 'server'], True)
    """

    # A model in parts for the digits, whose default model has none.
    capabilities = Capabilities(scalable=True, model_parts=True)
    default_models: ClassVar[Mapping[str, str]] = {"digits": "digits_split"}

    cut_compressor: Compressor = dataclasses.field(default_factory=Identity)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, SplitModel):
            self._check_client_loss(" with a fedsim.SplitModel")
        checks.instance(Compressor, "UniformQuantizer(levels=16)", cut_compressor=self.cut_compressor)
        if not isinstance(self.model, SplitModel) and type(self.cut_compressor) is not Identity:
            raise ValueError(
                f"Expected a fedsim.SplitModel with a cut_compressor, got model={type(self.model).__name__} and "
                f"cut_compressor={self.cut_compressor}: make one with fedsim.SplitModel.from_parts, or leave this out."
            )

    @property
    def not_differentiable(self) -> str:
        return self.cut_compressor.not_differentiable

    def client_update(self, shared: Any, client: Client) -> ClientUpdate:
        training = self.local_training(shared, client)
        training.check_not_private(type(self).__name__, "what it sends at the cuts has no noise")

        def step(state: tuple[Local, Traffic], batch: Batch) -> tuple[Local, Traffic]:
            local, traffic = state
            sent: list[Traffic] = []

            def gradient(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
                loss, gradient, of_step = self.gradient_through_cuts(training, params, batch)
                sent.append(of_step)
                return loss, gradient

            local = dataclasses.replace(training, gradient=gradient).step(local, batch)  # calls it once
            return local, tree.add(traffic, sent[0])

        start = training.start(shared.params, client.parts), Traffic(jnp.float32(0), jnp.float32(0))
        local, traffic = client.for_each_batch(self.batches, step, start)
        steps = client.num_steps.astype(jnp.float32)
        parts = self.model.parts if isinstance(self.model, SplitModel) else {}
        own = {part: shared.params[part] for part in parts if part != "server"} or shared.params
        model_bits = jnp.where(steps > 0, jnp.float32(tree.num_bits((own, parts_of(client).statistics))), 0.0)
        info = {f"step_bits_{way}": bits / jnp.maximum(steps, 1) for way, bits in traffic._asdict().items()}
        info |= {f"device_bits_{way}": bits + model_bits for way, bits in traffic._asdict().items()}
        movement = tree.subtract(shared.params, local.params)
        return ClientUpdate(movement, self.weight(client), {"loss": local.loss.result(), **info}, parts=local.parts)

    def local_training(self, shared: Any, client: Client) -> LocalTraining:
        training = super().local_training(shared, client)

        def gradient(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
            return self.gradient_through_cuts(training, params, batch)[:2]

        return dataclasses.replace(training, gradient=gradient)

    def gradient_through_cuts(self, training: LocalTraining, params: Params, batch: Batch) -> tuple[jax.Array, Params, Traffic]:
        """Returns the loss of a batch, the gradient of each part as its place computes it, and what was sent for this."""
        model = self.model
        if not isinstance(model, SplitModel):
            return *training.loss_and_gradient(params, batch), Traffic(jnp.float32(0), jnp.float32(0))
        first, *others = model.parts
        sent: list[list[jax.Array]] = [[], []]  # up and down
        frozen = current_scope().parts.frozen

        def part_of(name: str) -> Callable[..., Any]:
            """Returns the part as a function of those of its parameters that are trained."""
            return lambda own, value: model.parts[name](own if frozen == () else tree.merge(own, frozen[name]), value)

        # Forward: the first part is on the device, and every message goes to the other side.
        value, pull = jax.vjp(lambda own: part_of(first)(own, batch.examples), params[first])
        pulls = [pull]
        for cut, name in enumerate(others):
            value, bits = self._send(value, batch, f"to {name}")
            sent[cut % 2].append(bits)
            value, pull = jax.vjp(part_of(name), params[name], value)
            pulls.append(pull)

        def mean_loss(outputs: Any) -> jax.Array:
            return metrics.masked_mean(model.losses(batch.examples, outputs), batch.mask)

        loss, slope = jax.value_and_grad(mean_loss)(value)
        if len(others) == 1 and "y" in batch.examples:  # The server computes the loss, so it needs the labels.
            labels = batch.examples["y"]
            sent[0].append(_of_examples(tree.num_bits(labels) // len(labels), batch))

        # Backward: gradients return through the same cuts.
        gradient = {}
        for cut, name in reversed(list(enumerate(others))):
            gradient[name], slope = pulls[cut + 1](slope)
            slope, bits = self._send(slope, batch, f"back from {name}")
            sent[1 - cut % 2].append(bits)
        (gradient[first],) = pulls[0](slope)
        return loss, gradient, Traffic(*(sum(each, jnp.float32(0)) for each in sent))

    def _send(self, value: Any, batch: Batch, name: str) -> tuple[Any, jax.Array]:
        """Returns what arrives of one message per example, and the bits of those that are not padding, ``float32 []``."""
        # By position and not by `jax.random.split`, so that a key does not depend on the number of padding rows.
        rows = jnp.arange(len(batch.mask), dtype=jnp.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(rng.stream(batch.key, name), rows)
        arrived = jax.vmap(self.cut_compressor.transmit)(value, keys)
        return arrived.value, _of_examples(arrived.bits, batch)


def _of_examples(bits: jax.Array | int, batch: Batch) -> jax.Array:
    """Returns the sum of the bits of every row, ``[n]`` or one number for each, without those of padding, ``float32 []``."""
    return jnp.sum(jnp.where(batch.mask, jnp.asarray(bits, jnp.float32), 0.0))
