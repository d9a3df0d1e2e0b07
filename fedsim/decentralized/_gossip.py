"""Gossip averaging: nodes mix values until they agree on their mean, without training.

L. Xiao, S. Boyd, "Fast linear iterations for distributed averaging", Systems & Control Letters 53, 2004.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedsim import checks
from fedsim.decentralized._mixer import Mixer
from fedsim.decentralized._mixing import Weights
from fedsim.decentralized._topology import Topology


def gossip(values: Any, topology: Topology, rounds: int, weights: str | Weights = "auto") -> Any:
    """Returns the values of all nodes after some rounds of mixing.

    Args:
      values: a pytree of floats, leaves ``[nodes, ...]``.
      topology: who sends to whom.
      rounds: the number of rounds.
      weights: see `Topology.matrices`.

    Raises:
      ValueError: a leaf does not have one entry per node, or is not of floats.

    >>> from fedsim.decentralized import base_graph
    >>> topology = base_graph(5)
    >>> gossip(jnp.array([1.0, 2.0, 3.0, 4.0, 10.0]), topology, rounds=topology.period).round(5).tolist()
    [4.0, 4.0, 4.0, 4.0, 4.0]
    """
    checks.whole(0, rounds=rounds)
    checks.instance(Topology, "fedsim.decentralized.ring(16)", topology=topology)
    for leaf in jax.tree.leaves(values):
        if jnp.ndim(leaf) < 1 or len(leaf) != topology.nodes:
            raise ValueError(f"Expected values [{topology.nodes}, ...], one per node, got {list(jnp.shape(leaf))}.")
    mixer = Mixer.of(topology.matrices(weights))
    return jax.jit(lambda values: jax.lax.fori_loop(0, rounds, lambda round, x: mixer(x, round), values))(values)
