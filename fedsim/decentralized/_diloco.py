"""DiLoCo without a server: each worker has an outer optimizer of its own, and mixes its model with those of its neighbours.

The inner and outer steps are those of A. Douillard et al., "DiLoCo: Distributed low-communication training of language
models", 2023: https://arxiv.org/abs/2311.08105. NoLoCo (J. Kolehmainen et al., "NoLoCo: No-all-reduce low communication
training method for large models", 2025, https://arxiv.org/abs/2506.10911) replaces its all-reduce by exchanges in random pairs.
Deviations from NoLoCo: mixing is that of a topology, and the outer step has no term that pulls a model to that of its partner.
In round t, worker i::

    θ_i = x_i;  H times:  θ_i = InnerOpt(θ_i, g_i(θ_i))
    m_i = β m_i + (x_i - θ_i)
    x_i = Σ_j W_ij (x_j - η (β m_j + (x_j - θ_j)))

If every worker is the neighbour of every other one with equal weights, the mean of the models is that of
`fedsim.algorithms.DiLoCo`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fedsim import checks, tree
from fedsim.algorithms import Local, Shared, Worker
from fedsim.decentralized._algorithm import DecentralizedAlgorithm, NodesState
from fedsim.decentralized._mixer import Neighbours
from fedsim.model import Params
from fedsim.rounds import Client


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DecentralizedDiLoCo(DecentralizedAlgorithm):
    """DiLoCo without a server: nodes keep the state of their optimizer and their own Nesterov momentum, and mix their models.

    ``state.memory`` is m, and ``state.training`` has the states of the inner optimizers. With ``Batches(steps=H)`` a node
    continues to read its examples where it has stopped.

    Attributes:
      client_optimizer: the inner optimizer, see `fedsim.algorithms.DiLoCo`.
      server_learning_rate, momentum: η above 0 and β in [0, 1) of the outer optimizer; the defaults are DiLoCo's.
      topology, weights: see `DecentralizedAlgorithm`.

    Raises:
      ValueError: an attribute is out of its range.

    >>> import fedsim, optax
    >>> data = fedsim.datasets.load("digits", clients=4).train
    >>> algorithm = DecentralizedDiLoCo(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1, 0.9),
    ...     batches=fedsim.Batches(size=20, steps=10), topology=fedsim.decentralized.ring(4))
    >>> state = algorithm.init(jax.random.key(0))
    >>> for cohort in fedsim.UniformSampler(data, clients=4, seed=0).rounds(5):
    ...     state, info = algorithm.apply(state, cohort)
    >>> float(info["loss"]) < 0.5, float(info["consensus_distance"]) > 0
    (True, True)
    """

    capabilities = dataclasses.replace(DecentralizedAlgorithm.capabilities, reads_on=True)

    server_learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(server_learning_rate=self.server_learning_rate)
        checks.number(least=0, below=1, momentum=self.momentum)

    def node_memory(self, models: Params) -> Params:
        return jax.tree.map(jnp.zeros_like, models)

    def training_memory(self, models: Params) -> Any:
        return jax.vmap(lambda model: Worker.new(self, Shared(model, jnp.int32(0)), model))(models)

    def train_node(self, shared: Shared, client: Client, kept: Any) -> tuple[Local, Any]:
        return kept.run(self.local_training(shared, client), client, shared.params)

    def exchange(self, state: NodesState, movement: Params, neighbours: Neighbours) -> NodesState:
        momentum = tree.add(tree.scale(state.memory, self.momentum), movement)
        step = tree.add(tree.scale(momentum, self.momentum), movement)
        models = neighbours.mix(tree.subtract(state.models, tree.scale(step, self.server_learning_rate)))
        return state._replace(models=models, memory=momentum)
