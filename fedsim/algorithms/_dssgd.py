"""Distributed selective SGD.

R. Shokri, V. Shmatikov, "Privacy-preserving deep learning", CCS 2015: https://doi.org/10.1145/2810103.2813687. The paper's θ_u,
θ_d, γ, τ, ε and β are ``theta_u``, ``theta_d``, ``clip``, ``threshold``, ``epsilon`` and ``decay``. A paper's epoch is a round.

Deviations from the paper:

- The paper's participants meet its parameter server one after another (round robin or in random order), or asynchronously. Here
  the participants of a cohort download together and upload together. With one participant a round this is the paper's random
  order (a `ShuffledSampler` of ``clients=1``) or round robin (a `ScheduleSampler`).
- Uploads are added and not averaged, as in the paper. A large cohort therefore needs a smaller learning rate.
- The counters of updates decay once a round. Ties between them are broken at random.
- Participants start from the same initial parameters, which they compute from a seed that the server sends.
- The noise is the paper's: Laplace noise by the sparse vector technique, which tests each coordinate at most once a
  round. Its budget is that of one participant for one round, by the paper's analysis.
- Bits up are those of the paper's messages: 32 for a value and ceil(log2 d) for its index (none if all are sent). Bits down
  are 32 for a value, a mask of d bits, 32 for the round, and 64 for the seed where participants keep parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import checks, rng, tree
from fedsim.aggregators import Aggregator, Sum, WithAux
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._local_training import Local
from fedsim.algorithms._sparse_vector import above_noisy_threshold
from fedsim.compressors._selection import draw_from, indices_of, largest
from fedsim.model import Params
from fedsim.rounds import Client, ClientUpdate, RoundInfo


class DSSGDState(NamedTuple):
    """The state of DSSGD's server.

    Attributes:
      params, opt_state, round: see `ServerState`.
      updates: how often each parameter was updated, ``float32 [size]``. Empty if all are downloaded.
      seed: of the initial parameters.
    """

    params: Params
    opt_state: Any
    round: jax.Array
    updates: Any
    seed: jax.Array


class Download(NamedTuple):
    """What participants receive.

    Attributes:
      values: the parameters that were updated most often, ``[count]``.
      which: a bit for each parameter, packed in bytes, ``uint8 [ceil(size / 8)]``: whether ``values`` holds it. Empty if all
        are sent.
      round: the server's round.
      seed: of the initial parameters. Empty if all parameters are sent.
    """

    values: jax.Array
    which: jax.Array
    round: jax.Array
    seed: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DSSGD(FedAvg):
    """Distributed selective SGD: clients (participants) exchange only a fraction of the parameters with the server.

    A participant downloads the fraction ``theta_d`` of parameters that were updated most often, trains, and uploads the
    fraction ``theta_u`` of its changes. The server adds these up. If it does not download all parameters, a participant keeps
    its own for its next round.

    Attributes:
      theta_u: largest fraction of changes to upload, in (0, 1].
      theta_d: fraction of parameters to download, in (0, 1].
      selection: ``"largest"`` uploads the largest changes, ``"random"`` random ones among those of at least ``threshold``.
      threshold: smallest change to upload with ``selection="random"``, at least 0.
      clip: changes are clipped to [-clip, clip]. None does not clip.
      epsilon: privacy budget of a participant's upload, for Laplace noise on the threshold and the changes. None adds no noise.
        It needs ``selection="random"`` and ``clip``.
      decay: factor of the counts of updates in each round, in (0, 1].
      model, batches, client_optimizer, server_optimizer: see `FedAvg`. The paper's optimizers are SGD.

    Raises:
      ValueError: a fraction or ``decay`` is not in (0, 1], ``clip`` or ``epsilon`` is not positive, or ``epsilon`` is given
        without ``clip`` or with another selection.

    >>> import optax, fedsim
    >>> DSSGD(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20),
    ...     theta_u=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected 0 < theta_u <= 1, got theta_u=0.0.
    """

    capabilities = Capabilities(
        quadratic={"theta_u": 1.0},
        aggregators=False,
        scalable=False,
        microbatches=True,
        model_parts=True,
        refused_parts={
            "statistics": "its participants select, clip and perturb what they send, and running statistics would be sent "
            "whole; use statistics='client' or a model with GroupNorm"
        },
    )

    aggregator: Aggregator = dataclasses.field(default_factory=Sum)
    weighting: Literal["examples", "uniform"] = dataclasses.field(init=False, default="uniform")
    theta_u: float = 0.1
    theta_d: float = 1.0
    selection: Literal["largest", "random"] = "largest"
    threshold: float = 0.0
    clip: float | None = None
    epsilon: float | None = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(above=0, most=1, theta_u=self.theta_u, theta_d=self.theta_d, decay=self.decay)
        checks.one_of("largest", "random", selection=self.selection)
        checks.number(least=0, threshold=self.threshold)
        checks.positive(or_none=True, clip=self.clip, epsilon=self.epsilon)
        if self.epsilon is not None and (self.clip is None or self.selection != "random"):
            raise ValueError(f"Noise with epsilon={self.epsilon} needs clip, which bounds the changes, and selection='random'.")

    @property
    def not_differentiable(self) -> str:
        sends_all = self.theta_u == 1 and (self.selection == "largest" or self.threshold == 0)
        return "" if sends_all and self.theta_d == 1 and self.epsilon is None else "selects coordinates"

    def _check_aggregator(self, own: Aggregator) -> None:
        if type(self.aggregator) is not type(own):
            raise ValueError(
                f"DSSGD itself selects, clips and perturbs what participants send, got aggregator={self.aggregator}: leave it "
                "out, and set clip and epsilon."
            )

    def init(self, key: jax.Array) -> DSSGDState:
        state = super().init(key)
        updates = () if self.theta_d == 1 else jnp.zeros(tree.flat(state.params).shape, jnp.float32)
        return DSSGDState(**state._asdict(), updates=updates, seed=rng.words(key))

    def broadcast(self, state: DSSGDState) -> Download:
        values = tree.flat(state.params)
        if self.theta_d == 1:
            return Download(values, jnp.zeros(0, jnp.uint8), state.round, state.seed[:0])
        count = _count(self.theta_d, values.size)
        key = rng.stream(jax.random.fold_in(rng.typed(state.seed), state.round), "ties")
        which = largest(jnp.maximum(state.updates, 0.0), count, key)
        return Download(values[indices_of(which, count)], jnp.packbits(which), state.round, state.seed)

    def client_memory(self, shared: Download) -> Params:
        return () if self.theta_d == 1 else self.model.init(rng.typed(shared.seed))

    def downloaded(self, shared: Download, client: Client) -> Params:
        """Returns a participant's parameters after the download."""
        like = jax.eval_shape(self.model.init, jax.random.key(0))
        if self.theta_d == 1:
            vector = shared.values
        else:
            own = tree.flat(client.memory)
            which = jnp.unpackbits(shared.which, count=own.size).astype(bool)
            vector = own.at[indices_of(which, shared.values.size)].set(shared.values, unique_indices=True)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), tree.unflat(vector, like), like)

    def train(self, shared: Download, client: Client) -> Local:
        return self.local_training(shared, client).run(client, self.downloaded(shared, client))

    def client_update(self, shared: Download, client: Client) -> ClientUpdate:
        local = self.train(shared, client)
        moved = tree.flat(tree.subtract(self.downloaded(shared, client), local.params))
        change, sent = self.selected(moved, rng.stream(client.key, "select"))
        # If training diverged, the update must stay NaN after clipping and selection, so that it is dropped.
        change = jnp.where(jnp.isfinite(tree.squared_norm(moved)), jnp.where(sent, change, 0.0), jnp.nan)
        bits_of_each = 32 + (0 if self.theta_u == 1 else _index_bits(change.size))
        dtype = tree.bits_dtype(bits_of_each * change.size)
        number = jnp.where(client.num_steps > 0, jnp.sum(sent, dtype=jnp.int32), 0)
        bits = number.astype(dtype) * jnp.asarray(bits_of_each, dtype)
        info = {"loss": local.loss.result(), "bits_up": bits, "entropy_bits_up": bits.astype(jnp.float32)}
        aux, memory = ((), ()) if self.theta_d == 1 else (sent.astype(jnp.float32), local.params)
        return ClientUpdate(WithAux(change, aux), jnp.float32(1), info, memory, local.parts)

    def selected(self, change: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the changes ``[size]``, clipped and with noise, and which of them are uploaded, ``bool [size]``."""
        count = _count(self.theta_u, change.size)
        if self.clip is not None:
            change = jnp.clip(change, -self.clip, self.clip)
            if self.epsilon is not None:
                return above_noisy_threshold(change, self.clip, self.threshold, count, self.epsilon, key)
        if self.selection == "largest":
            return change, largest(change, count)
        return change, draw_from(jnp.abs(change) >= self.threshold, count, key)

    def server_update(self, state: DSSGDState, update: WithAux, info: RoundInfo) -> DSSGDState:
        moved = super().server_update(state, tree.unflat(update.update, state.params), info)
        return moved._replace(updates=jax.tree.map(lambda old, new: self.decay * old + new, state.updates, update.aux))


def _count(theta: float, size: int) -> int:
    """Returns ``theta`` times ``size``, rounded down, and at least 1.

    >>> _count(0.3, 10), _count(0.01, 10)
    (3, 1)
    """
    return max(1, int(np.floor(theta * size + 1e-6)))


def _index_bits(size: int) -> int:
    """Returns the bits of an index below ``size``: ceil(log2 size)."""
    return (size - 1).bit_length()
