"""CHOCO-SGD: nodes send compressed differences to what their neighbours already know of them.

A. Koloskova, S. Stich, M. Jaggi, "Decentralized stochastic optimization and gossip algorithms with compressed communication",
ICML 2019, Algorithm 2: https://arxiv.org/abs/1902.00340.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.compressors import Compressor, ErrorFeedback, TopK
from fedsim.decentralized._algorithm import DecentralizedAlgorithm, NodesState
from fedsim.decentralized._mixer import Neighbours
from fedsim.model import Params


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ChocoSGD(DecentralizedAlgorithm):
    """CHOCO-SGD: x_i trains, sends q_i = C(x_i - h_i) with h_i += q_i, and x_i += gamma sum_j W_ij (h_j - h_i).

    h_i is the copy of x_i that node i and its neighbours keep. The paper's h_i start with 0; here they start with the
    common first model, which all nodes know.

    Attributes:
      compressor: C, one of `fedsim.compressors`; biased ones are fine, without error feedback, because h_i keeps what was not
        sent. Nodes keep no memory of a compressor, so `fedsim.compressors.PowerSGD` starts with the same Q in every round.
      message_loss, link_failures: must be 0. A receiver that misses q_i would have a wrong h_i for ever; the algorithm needs
        links that send again.
      gamma: the consensus step size, in (0, 1]; smaller for stronger compression.
      topology, weights: see `DecentralizedAlgorithm`. The graph must be the same in every round, because a new neighbour would
        have no h_i.

    Raises:
      ValueError: ``compressor`` is not a `Compressor` or has error feedback, ``gamma`` is not in ``(0, 1]``, or the topology
        has several graphs.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits", clients=4).train
    >>> algorithm = ChocoSGD(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.5),
    ...     batches=fedsim.Batches(size=20, steps=1), topology=fedsim.decentralized.ring(4),
    ...     compressor=fedsim.compressors.TopK(fraction=0.1))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for cohort in fedsim.UniformSampler(data, clients=4, seed=0).rounds(5):
    ...     state, info = algorithm.apply(state, cohort)
    >>> round(float(info["bits_up"]) / (8 * 32 * 650), 3)  # without compression: 8 messages of 650 floats
    0.131
    """

    attackable: ClassVar[bool] = False  # What changes is a difference, which would stay in the copies.
    needs_all_messages: ClassVar[bool] = True  # A receiver that misses a difference would have a wrong copy.

    compressor: Compressor = dataclasses.field(default_factory=lambda: TopK(fraction=0.1))
    gamma: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.instance(Compressor, "TopK(fraction=0.1)", compressor=self.compressor)
        checks.number(above=0, most=1, gamma=self.gamma)
        if _has_feedback(self.compressor):
            raise ValueError(
                f"Expected compressor without error feedback for ChocoSGD, got {self.compressor}: leave ErrorFeedback out, "
                "because nodes send the difference to what others know of them, which has all that was not sent before."
            )

    def check_matrices(self) -> None:
        super().check_matrices()
        if self.topology.period > 1:
            raise ValueError(
                f"ChocoSGD needs the same graph in every round, and {self.topology.name!r} has {self.topology.period}: use "
                "ring, for example, or DPSGD. A new neighbour would have no copy of a node's model."
            )

    def node_memory(self, models: Params) -> Params:
        return models

    def exchange(self, state: NodesState, movement: Params, neighbours: Neighbours) -> NodesState:
        trained, known = tree.subtract(state.models, movement), state.memory
        keys = jax.vmap(jax.random.fold_in, (None, 0))(neighbours.key, jnp.arange(self.topology.nodes))
        sent = jax.vmap(self.compressor.transmit)(tree.subtract(trained, known), keys)
        known = tree.add(known, sent.value)
        step = neighbours.mix(known, bits=sent.bits, difference=True)
        return state._replace(models=tree.add(trained, tree.scale(step, self.gamma)), memory=known)


def _has_feedback(compressor: Compressor) -> bool:
    """Returns whether a compressor is an `ErrorFeedback`, or has one inside."""
    inner = (value for value in vars(compressor).values() if isinstance(value, Compressor))
    return isinstance(compressor, ErrorFeedback) or any(map(_has_feedback, inner))
