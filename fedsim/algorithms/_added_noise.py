"""A check for algorithms whose clients send more than an aggregator with noise makes private."""

from __future__ import annotations

from fedsim.aggregators import Aggregator, DistributedMechanism, GaussianMechanism, LocallyNoised
from fedsim.algorithm import Algorithm


def check_adds_no_noise(algorithm: Algorithm, reason: str) -> None:
    """Raises ``ValueError`` if the aggregator adds noise for privacy, which would not make the algorithm private.

    >>> import fedsim, optax
    >>> fedavg = fedsim.algorithms.FedAvg(
    ...     model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=20))
    >>> check_adds_no_noise(fedavg, "there is a reason")
    """
    aggregator: Aggregator | None = algorithm.aggregator
    while aggregator is not None:
        if isinstance(aggregator, (DistributedMechanism, GaussianMechanism, LocallyNoised)):
            raise ValueError(
                f"Expected an aggregator without noise with {type(algorithm).__name__}, got {type(aggregator).__name__}: "
                f"{reason}. Use FedAvg."
            )
        aggregator = getattr(aggregator, "inner", None)
