"""Reptile.

A. Nichol, J. Achiam, J. Schulman, "On first-order meta-learning algorithms", 2018, Algorithm 2 (the batched version):
https://arxiv.org/abs/1803.02999. The paper's tasks are clients, its k steps are the steps of ``batches``, and ε is
``server_learning_rate``. There are no deviations. The algorithm is FedAvg with uniform weights and a server learning rate of ε.
Only its purpose is different: it learns parameters from which to fine-tune.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import optax

from fedsim import checks
from fedsim.algorithms._fedavg import FedAvg
from fedsim.algorithms._server_step import from_fields


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Reptile(FedAvg):
    """Learns parameters for fine-tuning: x = x + server_learning_rate mean(x_i - x), with x_i client i's trained model.

    To evaluate with fine-tuning: ``fedsim.evaluate_personalized(algorithm, state, train, test, fine_tune=algorithm)``.

    Attributes:
      server_learning_rate: ε.
      decay_rounds: the number of rounds over which ε decreases linearly to 0, as in the paper's experiments. None keeps it
        constant.

    Raises:
      ValueError: ``server_learning_rate`` is not positive, ``decay_rounds`` is below 1, or see `FedAvg`.

    >>> import optax, fedsim
    >>> Reptile(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20),
    ...     server_learning_rate=0.0)
    Traceback (most recent call last):
    ...
    ValueError: Expected server_learning_rate > 0 and finite, got server_learning_rate=0.0.
    """

    server_learning_rate: float = 1.0
    decay_rounds: int | None = None
    weighting: Literal["examples", "uniform"] = dataclasses.field(init=False, default="uniform")
    server_optimizer: ClassVar[Any] = from_fields(lambda self: optax.sgd(self._learning_rate))  # type: ignore[misc]

    def __post_init__(self) -> None:
        checks.positive(server_learning_rate=self.server_learning_rate)
        checks.whole(1, or_none=True, decay_rounds=self.decay_rounds)
        super().__post_init__()  # It makes the server's optimizer from these fields.

    @property
    def _learning_rate(self) -> float | optax.Schedule:
        if self.decay_rounds is None:
            return self.server_learning_rate
        return optax.linear_schedule(self.server_learning_rate, 0.0, self.decay_rounds)
