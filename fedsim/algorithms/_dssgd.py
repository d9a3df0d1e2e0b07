"""Distributed selective SGD.

R. Shokri, V. Shmatikov, "Privacy-preserving deep learning", CCS 2015: https://doi.org/10.1145/2810103.2813687. The paper's θ_u,
θ_d, γ, τ, ε and β are ``theta_u``, ``theta_d``, ``clip``, ``threshold``, ``epsilon`` and ``decay``; its epoch is a round.

Deviations: the paper's participants meet its parameter server one after another (round robin, or in random order), or
asynchronously. Here those of one cohort download together and upload together, the extreme of asynchrony; with one
participant a round, by a `ShuffledSampler` of ``clients=1`` or a `ScheduleSampler`, it is the paper's random order or round
robin. Uploads are added, not averaged, so that many together want a smaller rate. The counters of updates decay once a round,
and ties between them are broken at random, by the seed and the round. Participants start from common initial parameters, told
as the seed that makes them. Noise is Laplace noise by the sparse vector technique, as in the paper, where each coordinate is
looked at once a round at most; its budget is a participant's for one round, by the paper's analysis. Random choices give each
parameter the same chance, but not each set of them: some that complete the number are neighbours. Bits are those of the
paper's messages, values of 32 bits and their places of ceil(log2 d) each (none, if all are sent); down a mask of d bits
instead, where that is shorter, and also those of the round and, where participants keep parameters, of the seed: 32 and 64.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedsim import checks, rng, tree
from fedsim.aggregators import Aggregator, Noted, Sum
from fedsim.algorithm import Capabilities
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._gradient_server import ServerState
from fedsim.algorithms._upload import Upload
from fedsim.algorithms._vector_part import Part, bits_of_place, share_of
from fedsim.compressors._selection import chosen, divided, drawn, num_set
from fedsim.execution import Client, ClientUpdate
from fedsim.model import Params


class Selection(NamedTuple):
    """What the server's state has ``more``: how often each parameter was updated, ``float32 [size]``, or () where all are sent
    down, so that nobody asks; and the start's seed."""

    updates: jax.Array | tuple[()]
    seed: jax.Array


class Download(NamedTuple):
    """The parameters that were updated most; and the seed of all, for who has none of its own (nothing, if all are sent)."""

    part: Part
    round: jax.Array
    seed: jax.Array


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DSSGD(FedAvg):
    """Participants train parameters of their own, and exchange a share of them with the server.

    A participant replaces the ``theta_d`` most updated of its parameters by the server's, trains, and uploads ``theta_u`` of
    the changes, which the server adds up. It keeps its parameters for its next round, unless they would be replaced anyway.

    Attributes:
      theta_u: in (0, 1], the share of changes to upload, at most.
      theta_d: in (0, 1], the share of parameters to download.
      selection: ``"largest"``: the largest changes; ``"random"``: random ones among those of at least ``threshold``.
      threshold: at least 0.
      clip: changes are clipped to [-clip, clip]; None: not at all.
      epsilon: privacy budget of a participant's upload, spent on Laplace noise on threshold and changes; None: no noise. Needs
        ``"random"`` and ``clip``.
      decay: in (0, 1], a round's factor of the counts of updates.
      model, batches, client_optimizer, server_optimizer: see `FedAvg`; the paper's are SGD. ``weighting`` has no meaning here.

    >>> import optax, fedsim
    >>> DSSGD(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20),
    ...     theta_u=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected 0 < theta_u <= 1, got theta_u=0.0.
    """

    capabilities = Capabilities(quadratic={"theta_u": 1.0}, aggregators=False)

    aggregator: Aggregator = dataclasses.field(default_factory=Sum)
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
        self.upload()

    def _must_fold_by(self, own: Aggregator) -> None:
        if type(self.aggregator) is not type(own):
            raise ValueError(
                f"DSSGD selects, clips and noises what participants send itself, got aggregator={self.aggregator}: leave it "
                "out, and give clip and epsilon."
            )

    def upload(self) -> Upload:
        """What a participant makes of its changes."""
        return Upload(self.theta_u, self.selection, self.threshold, self.clip, self.epsilon)

    def init(self, key: jax.Array) -> ServerState:
        state = super().init(key)
        updates = () if self.theta_d == 1 else jnp.zeros_like(tree.flat(state.params))
        return state._replace(more=Selection(updates, jax.random.key_data(key)))

    def broadcast(self, state: ServerState) -> Any:
        values, seed = tree.flat(state.params), state.more.seed
        if self.theta_d == 1:
            return Download(Part.of(values), state.round, seed[:0])
        # A user's own server may count fewer updates than none.
        updates, count = jnp.maximum(state.more.updates, 0.0), share_of(self.theta_d, values.size)
        # Between which whole numbers what divides them would be if they were Gaussian: a guess, and good while none decay.
        mean, square = jnp.vdot(updates, jnp.ones_like(updates)) / values.size, jnp.vdot(updates, updates) / values.size
        above = statistics.NormalDist().inv_cdf(1 - (count - 0.5) / values.size)
        guess = jnp.floor(mean + above * jnp.sqrt(jnp.maximum(square - mean**2, 0.0)))
        sure, tied = divided(updates, count, (guess, guess + 1))
        key = jax.random.fold_in(jax.random.wrap_key_data(seed), state.round)
        some = drawn(tied, count - num_set(sure), rng.stream(key, "ties"))
        return Download(Part.of(values, sure | some, count, packed=self.downlink is not None), state.round, seed)

    def client_memory(self, shared: Any) -> Any:
        return () if self.theta_d == 1 else self.model.init(jax.random.wrap_key_data(shared.seed))

    def client_init(self, shared: Any, client: Client) -> Any:
        return self.set_out(shared, self._start(shared, client))

    def client_final(self, shared: Any, state: Any, client: Client) -> ClientUpdate:
        moved = tree.flat(tree.subtract(self._start(shared, client), state.params))
        change, mask = self.upload().of(moved, rng.stream(client.key, "select"))
        sent = chosen(mask, moved.size)
        change = jnp.where(sent, change, 0.0)
        if self.theta_d == 1:  # Neither clipping nor selection may hide that it diverged; who keeps parameters tells by these.
            change = jnp.where(jnp.isfinite(tree.squared_norm(moved)), change, jnp.nan)
        number = jnp.where(client.num_steps > 0, num_set(mask), 0)
        of_each = 32 + (0 if self.theta_u == 1 else bits_of_place(change.size))
        dtype = tree.bits_dtype(of_each * change.size)
        bits = number.astype(dtype) * jnp.asarray(of_each, dtype)
        # Flags in bytes: they are read in every round as often as the changes.
        update = Noted(change, () if self.theta_d == 1 else sent.astype(jnp.uint8))
        info = {"loss": state.loss.result(), "bits_up": bits, "entropy_bits_up": bits.astype(jnp.float32)}
        return ClientUpdate(update, jnp.float32(1), info, () if self.theta_d == 1 else state.params)

    def server_update(self, state: ServerState, update: Noted) -> ServerState:
        updates = jax.tree.map(lambda known, new: self.decay * known + new, state.more.updates, update.notes)
        moved = super().server_update(state, tree.unflat(update.update, state.params))
        return moved._replace(more=state.more._replace(updates=updates))

    def _start(self, shared: Download, client: Client) -> Params:
        """The participant's parameters, after the download."""
        like = jax.eval_shape(self.model.init, jax.random.key(0))
        own = client.memory if self.theta_d < 1 else jax.tree.map(jnp.zeros_like, like)
        return shared.part.put_into(own)
