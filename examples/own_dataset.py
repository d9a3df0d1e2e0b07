"""A custom dataset: 569 tumours from scikit-learn, divided among hospitals with different proportions of malignant ones.

In a shell: fedsim run --dataset "examples/own_dataset.py:tumours(hospitals=30)" --rounds 40 --client-learning-rate 0.1
"""

import numpy as np
import optax
from sklearn.datasets import load_breast_cancer

import fedsim


@fedsim.datasets.register(
    "tumours",
    task="classify tumours as benign or malignant from 30 measurements",
    num_classes=2,
    default_model="logistic(shape=[30], num_classes=2, scale=1)",
    options={"hospitals": "number of clients", "alpha": "small values: proportions of malignant tumours differ much"},
    download_bytes=0,
)
def tumours(data, cache, *, hospitals=20, alpha=0.5):
    x, y = load_breast_cancer(return_X_y=True)
    columns = {"x": ((x - x.mean(0)) / x.std(0)).astype(np.float32), "y": y.astype(np.int32)}
    partition = fedsim.partitioners.dirichlet(y, clients=hospitals, alpha=alpha, seed=0, min_size=5)
    parts = {"train": [np.delete(rows, np.s_[::5]) for rows in partition], "test": [rows[::5] for rows in partition]}
    return {split: fedsim.FederatedData.from_partition(columns, part) for split, part in parts.items()}


def main(rounds: int = 40) -> float:
    data = fedsim.datasets.load("tumours", hospitals=30)
    model = fedsim.models.get(data.description.default_model)
    algorithm = fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(0.1), batches=fedsim.Batches(size=10))
    sampler = fedsim.UniformSampler(data.train, clients=10, seed=0)
    result = fedsim.experiment.run(algorithm, sampler, rounds=rounds, test_data=data.test, progress=False)
    print(f"tumours, {rounds} rounds: test accuracy {result.evaluation.overall['accuracy']:.3f}")
    return result.evaluation.overall["accuracy"]


if __name__ == "__main__":
    main()
