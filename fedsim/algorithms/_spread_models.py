"""Models to start clusters from: trained on single clients, which are drawn far from one another as k-means++ does.

As in Mansour et al. 2020 (https://arxiv.org/abs/2002.10619) and FedJAX: the distance of a client from the models so far is the
least of its losses under them.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from fedsim import metrics, rng
from fedsim.algorithms._fedavg import FedAvg
from fedsim.data import Cohort, FederatedData
from fedsim.execution import Jit, evaluate
from fedsim.model import Params


def spread_models(alone: FedAvg, data: FederatedData, count: int, key: jax.Array) -> list[Params]:
    """``count`` models, each trained by ``alone`` on one client from the same random parameters.

    The first client is drawn evenly, each further one with a probability proportional to its distance from the models so far.
    None is drawn twice: it would train the same model again, to the bit.
    """
    if data.num_nonempty < count:
        raise ValueError(
            f"Expected a client with examples for each of num_clusters={count} models to start from, got {data.num_nonempty}: "
            "ask for fewer clusters, or start them by init."
        )
    draw = np.random.default_rng(np.asarray(rng.words(key)))
    loss = {"loss": lambda examples, outputs: metrics.per_example(alone.model.loss(examples, outputs))}
    judged, start = dataclasses.replace(alone.model, metrics=loss), alone.init(key)
    execution = alone.execution if isinstance(alone.execution, Jit) else Jit()
    models: list[Params] = []
    left = data.sizes > 0
    least, lots = np.full(data.num_clients, np.inf), left.astype(np.float64)
    for _ in range(count):
        one = draw.choice(data.num_clients, p=lots / lots.sum())
        models.append(alone.apply(start, Cohort(data, np.array([one]), 0, key))[0].params)
        losses = np.asarray(evaluate(judged, models[-1], data, execution=execution).clients["loss"].result(), np.float64)
        least = np.fmin(least, losses)  # A model that has gone astray is far from nobody.
        left[one] = False
        # Where all losses are 0, everybody who is left is as likely.
        lots = np.where(left, np.nan_to_num(least, posinf=0.0) + 1e-9, 0.0)
    return models
