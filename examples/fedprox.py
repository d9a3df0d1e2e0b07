"""FedProx: FedAvg with one overridden method, the loss of the clients.

T. Li et al., "Federated optimization in heterogeneous networks", MLSys 2020: https://arxiv.org/abs/1812.06127.

Run it with ``python examples/fedprox.py``, or from the command line, where ``mu`` is an option::

    fedsim run --algorithm examples/fedprox.py:FedProx --mu 0.01
"""

import dataclasses

import optax

import fedsim
from fedsim import experiment, tree


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class FedProx(fedsim.algorithms.FedAvg):
    """FedAvg whose clients stay close to the server: loss + mu/2 ||w - x||².

    Attributes:
      mu: weight of the squared distance to the server's parameters; 0 is FedAvg.
    """

    mu: float = 0.1

    def client_loss(self, shared, params, batch):
        distance = tree.squared_norm(tree.subtract(params, shared.params))
        return self.model.train_loss(params, batch) + self.mu / 2 * distance


def main(rounds: int = 60) -> float:
    """Trains on the digits without and with the proximal term; prints the test accuracies and returns the last."""
    data = fedsim.datasets.load("digits")
    for mu in (0.0, 0.1):
        algorithm = FedProx(
            model=fedsim.models.digits_dense(),
            client_optimizer=optax.sgd(0.2),
            batches=fedsim.Batches(size=10, epochs=5),
            mu=mu,
        )
        sampler = fedsim.UniformSampler(data.train, clients=20, seed=0)
        result = experiment.run(algorithm, sampler, rounds=rounds, test_data=data.test, progress=False)
        accuracy = result.evaluation.overall["accuracy"]
        print(f"FedProx, mu={mu}, {rounds} rounds: test accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    fedsim.use_all_cores()
    main()
