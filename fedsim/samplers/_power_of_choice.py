"""Power-of-choice client selection, by the clients' last losses.

Y. J. Cho, J. Wang, G. Joshi, "Client selection in federated learning: convergence analysis and power-of-choice selection
strategies", 2020: https://arxiv.org/abs/2010.01243, section 4. In each round d candidates are drawn without replacement,
client k with a probability proportional to its share p_k of the examples, and the m of them with the largest losses take part
(ties are broken at random). This is the variant rpow-d of the paper: the loss of a client is the mean over its local steps
that it reported when it last took part, and infinite before that, so nothing is computed or sent in addition. The variants
pow-d and cpow-d evaluate the current model at the candidates, on all or on some of their examples; they are not here. The
paper's server takes the plain mean of the models, so give the algorithm ``weighting="uniform"``.
"""

from __future__ import annotations

import jax
import numpy as np

from fedsim import checks
from fedsim.data import FederatedData
from fedsim.samplers._observation import Observation
from fedsim.samplers._steered import SteeredSampler
from fedsim.samplers._weighted import WeightedSampler


class PowerOfChoice(SteeredSampler):
    """Of some candidates, drawn by size, selects those with the largest last losses (rpow-d of Cho, Wang and Joshi 2020).

    More candidates favour clients with large losses more, which converges sooner and to a larger bias. A client whose last
    update was dropped keeps its loss from before.

    Args:
      data: the population.
      clients: m, the cohort size.
      candidates: d, the number of candidates, at least ``clients``; equally many make it a `WeightedSampler`.
      seed: the run's seed, or its root key.

    Attributes:
      observes: ``("loss",)``.

    Guarantees:
      - A cohort has exactly ``clients`` distinct clients with examples.
      - Cost: O(population) per round.

    Raises:
      ValueError: ``candidates`` is below ``clients``, or more than the clients that have examples; see `SteeredSampler`.

    >>> data = FederatedData.from_arrays({"x": np.zeros(4)}, sizes=[1, 1, 1, 1])
    >>> sampler = PowerOfChoice(data, clients=1, candidates=4, seed=0)
    >>> for client, loss in enumerate([0.5, 0.9, 0.2, 0.4]):
    ...     sampler = sampler.observe(Observation(np.array([client]), {"loss": np.array([loss])}))
    >>> sampler.cohort(4).client_ids
    ['1']
    """

    observes = ("loss",)

    def __init__(self, data: FederatedData, *, clients: int, candidates: int, seed: int | jax.Array) -> None:
        super().__init__(data, clients=clients, seed=seed)
        checks.whole(clients, candidates=candidates, remedy=f"the cohort's clients={clients} are chosen from the candidates")
        with_examples = int(np.count_nonzero(data.sizes))
        if candidates > with_examples:
            raise ValueError(
                f"Expected candidates <= {with_examples}, the clients with examples, got candidates={candidates}: give fewer."
            )
        self.candidates = int(candidates)
        self._by_size = WeightedSampler(data, clients=candidates, seed=self.key)

    def begin(self) -> np.ndarray:
        """Returns the last loss of each client, infinity."""
        return np.full(self.data.num_clients, np.inf)

    def learn(self, memory: np.ndarray, round: int, observation: Observation) -> np.ndarray:
        """Replaces the losses of a round's clients."""
        memory[observation.clients] = known_or(observation.values["loss"], memory[observation.clients])
        return memory

    def choose(self, round: int, memory: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """Returns the candidates with the largest losses."""
        drawn = self._by_size.cohort(round).clients
        return drawn[np.lexsort((draw.random(len(drawn)), -memory[drawn]))][: self.clients]


def known_or(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns values, and others in place of those that are NaN."""
    return np.where(np.isnan(values), others, values)
