"""Initial models of clusters: each is trained on a single client, and clients are drawn far from each other as in k-means++.

This follows Mansour et al. 2020, https://arxiv.org/abs/2002.10619, and FedJAX: the distance of a client from the models so far
is the smallest of its losses under these models.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from fedsim import rng
from fedsim.algorithm import map_clients
from fedsim.algorithms._fedavg import FedAvg
from fedsim.data import Cohort, FederatedData
from fedsim.evaluation import evaluate
from fedsim.execution import Jit
from fedsim.model import Params
from fedsim.rounds import Client, server_state


class SpreadModel(NamedTuple):
    """A trained model: its parameters, and the parts that are none, ``()`` or `fedsim.model.ModelParts`."""

    params: Params
    parts: Any


def spread_models(algorithm: FedAvg, data: FederatedData, count: int, key: jax.Array) -> list[SpreadModel]:
    """Returns ``count`` models. Each takes ``algorithm``'s local steps on one client, from the same random parameters.

    The first client is drawn uniformly. Each further client is drawn with a probability proportional to its distance from the
    models so far. No client is drawn twice, because it would train exactly the same model again.

    Raises:
      ValueError: fewer than ``count`` clients have examples.
    """
    if data.num_nonempty < count:
        raise ValueError(
            f"Expected a client with examples for each of num_clusters={count} models to start from, got {data.num_nonempty}. "
            "Use fewer clusters, or initialize them with init."
        )
    draw = np.random.default_rng(np.asarray(rng.words(key)))
    loss_model = dataclasses.replace(algorithm.model, metrics={"loss": algorithm.model.losses})
    start = algorithm.broadcast(server_state(algorithm.init(key)))._replace(params=algorithm.model.init(key))
    init_parts = algorithm.model.init_parts
    parts = () if init_parts is None else init_parts(key)
    execution = algorithm.execution if isinstance(algorithm.execution, Jit) else Jit()

    def train(start: Any, client: Client) -> SpreadModel:
        shared, parts = start
        local = algorithm.local_training(shared, client).run(dataclasses.replace(client, parts=parts), shared.params)
        return SpreadModel(local.params, local.parts)

    models: list[SpreadModel] = []
    left = data.sizes > 0
    least, chances = np.full(data.num_clients, np.inf), left.astype(np.float64)
    for _ in range(count):
        one = draw.choice(data.num_clients, p=chances / chances.sum())
        cohort = Cohort(data, np.array([one]), 0, key)
        trained = map_clients(train, (start, parts), cohort, batches=algorithm.batches, execution=algorithm.execution)
        models.append(jax.tree.map(lambda x: x[0], trained))
        whole = models[-1].params if parts == () else models[-1].parts.join(models[-1].params)
        losses = np.asarray(evaluate(loss_model, whole, data, execution=execution).clients["loss"].result(), np.float64)
        least = np.fmin(least, losses)  # fmin ignores the NaN of a model that diverged.
        left[one] = False
        # If all losses are 0, the remaining clients are equally likely.
        chances = np.where(left, np.nan_to_num(least, posinf=0.0) + 1e-9, 0.0)
    return models
