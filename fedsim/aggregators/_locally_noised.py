"""Local differential privacy: every client clips its update and adds noise to it, before anything leaves the client.

J. C. Duchi, M. I. Jordan, M. J. Wainwright, "Local privacy and statistical minimax rates", FOCS 2013, for the setting:
https://arxiv.org/abs/1302.3203. The mechanism is that of M. Abadi et al., "Deep learning with differential privacy", CCS 2016,
applied to a client's update instead of an example's gradient: https://arxiv.org/abs/1607.00133.
"""

from __future__ import annotations

import dataclasses

import jax

from fedsim import checks, rng, tree
from fedsim.aggregators._aggregator import Memory, Sent, Update, Wrapper, widened
from fedsim.aggregators._clipped import check_floats


@dataclasses.dataclass(frozen=True, eq=False)
class LocallyNoised(Wrapper):
    """Clips each update to a norm, and adds noise of the deviation noise_multiplier * clip to each of its coordinates.

    Nobody is trusted: the server sees noised updates. The noise is drawn from a key of the client and the round. For two data
    sets of a client, whatever they are, the clipped updates differ by up to two norms, so k rounds of a client have the ε of
    ``privacy.epsilon(noise_multiplier, EveryRound(), rounds=k, delta=δ, relation="replace_one")``, where sampling does not
    help, because the server knows who sent an update. Of a mean of n clients, the noise has the deviation noise_multiplier *
    clip / √n, √n times that of a server that adds noise once.

    A client whose update is not finite sends noise alone. Compression in ``inner`` changes noised updates, and so costs no
    privacy. Weights, losses and numbers of examples have no noise, so clients need equal weights, and algorithms whose clients
    send numbers or running statistics beside their updates are refused, see `AuxMean` and `Grouped`.

    Attributes:
      noise_multiplier: the deviation of the noise in units of ``clip``, at least 0.
      clip: the largest Euclidean norm of an update over all its leaves, positive.
      inner: see `Wrapper`.

    Raises:
      ValueError: an attribute is out of its range. Before the first round: an update has leaves that are not floats, or the
        algorithm weights clients by examples.

    >>> import jax.numpy as jnp
    >>> sent = LocallyNoised(0.5, clip=2.0).send(jnp.zeros(10_000), (), (), jax.random.key(0))
    >>> round(float(sent.update.std()), 1)
    1.0
    >>> from fedsim.privacy import EveryRound, epsilon
    >>> [round(epsilon(20.0, EveryRound(), rounds=k, delta=1e-5, relation="replace_one"), 2) for k in (1, 10)]
    [0.34, 1.2]
    """

    noise_multiplier: float
    _: dataclasses.KW_ONLY
    clip: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number(least=0, noise_multiplier=self.noise_multiplier)
        checks.positive(clip=self.clip, remedy="give the norm that updates are clipped to")

    @property
    def counts_nonfinite(self) -> bool:
        return True

    def check(self, update: Update, slots: int) -> None:
        super().check(update, slots)
        check_floats("LocallyNoised", update)

    def send(self, update: Update, server_memory: Memory, memory: Memory, key: jax.Array) -> Sent:
        wide = widened(update)  # Rounding could make it longer.
        noise = tree.scale(rng.normal_like(rng.stream(key, "local noise"), wide), self.noise_multiplier * self.clip)
        noised = tree.add(tree.clip(wide, self.clip), noise)
        noised = jax.tree.map(lambda x, like: x.astype(like.dtype), noised, update)
        return super().send(noised, server_memory, memory, key)


def check_not_locally_noised(wrapper: Wrapper, reason: str) -> None:
    """Raises ``ValueError`` if there is a `LocallyNoised` inside, for wrappers that send more than what it adds noise to."""
    if wrapper.find(LocallyNoised):
        raise ValueError(
            f"Expected an aggregator without LocallyNoised inside {type(wrapper).__name__}, got {wrapper.inner}: {reason}"
        )
