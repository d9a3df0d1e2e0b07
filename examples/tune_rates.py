"""The two learning rates of FedAdam, tuned by the derivative of the validation loss through whole runs.

A grid tries pairs of rates. `fedsim.tune` follows the derivative of the loss after all rounds, so it needs fewer runs. Each of
them takes longer, because it also computes the derivative. Both choose by the loss on a fifth of each client's training
examples, which is left out of training, and never see the test examples. With ``--worst 0.1``, the objective is the mean loss
over the tenth of the clients with the largest losses. The path is drawn to ``tuning.png``.

Run it with ``python examples/tune_rates.py``, or on Federated EMNIST with ``python examples/tune_rates.py --data DIR``.
"""

import argparse
import itertools
import time

import jax
import optax

import fedsim


def main(data=None, worst=None, rounds=20, steps=8, grid=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0), picture="tuning.png"):
    """Prints the path and the best pair of a grid; returns the objectives of both."""
    if data is None:
        train, model, size = fedsim.datasets.load("digits").train, fedsim.models.digits_dense(), 10
    else:
        train, model, size = fedsim.datasets.load("emnist62", data=data).train, fedsim.models.emnist_logistic(), 20
    split = fedsim.partitioners.split_within_clients(train, {"train": 0.8, "validation": 0.2}, seed=0)
    sampler = fedsim.UniformSampler(split["train"], clients=10, seed=0)
    objective = fedsim.differentiation.validation_loss(model, split["validation"], worst=worst)

    def make(client_rate, server_rate):
        return fedsim.algorithms.FedAdam(
            model=model,
            client_optimizer=optax.sgd(client_rate),
            server_learning_rate=server_rate,
            batches=fedsim.Batches(size=size),
        )

    begin = time.perf_counter()
    start = {"client_rate": 0.1, "server_rate": 0.01}
    tuned = fedsim.tune(
        make, start, sampler=sampler, rounds=rounds, objective=objective, steps=steps, optimizer=optax.adam(0.5, b1=0.5)
    )
    for number, run in enumerate(tuned.path, start=1):
        rates = "  ".join(f"{name} {rate:.4f}" for name, rate in run.numbers.items())
        print(f"run {number:2}: {rates}  loss {run.objective:.4f}")
    rates = ", ".join(f"{name} {rate:.3g}" for name, rate in tuned.numbers.items())
    print(f"tuned: loss {tuned.objective:.4f} at {rates}; {steps} runs with derivatives, {time.perf_counter() - begin:.0f} s")
    if picture:
        tuned.plot().savefig(picture)

    begin, losses = time.perf_counter(), {}
    cohorts = [sampler.cohort(round) for round in range(rounds)]
    for pair in itertools.product(grid, grid):
        algorithm = make(*pair)
        losses[pair] = float(objective(algorithm.apply_rounds(algorithm.init(jax.random.key(0)), cohorts)[0]))
    best = min(losses, key=losses.get)
    better = sum(loss < tuned.objective for loss in losses.values())
    print(f"grid: loss {losses[best]:.4f} at {best}; {len(losses)} runs, {time.perf_counter() - begin:.0f} s")
    print(f"{better} of the {len(losses)} pairs of the grid have a smaller loss than the tuned pair")
    return tuned.objective, losses[best]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="a folder with Federated EMNIST, see `fedsim datasets describe emnist62`")
    parser.add_argument("--worst", type=float, help="the fraction of the clients with the largest losses, such as 0.1")
    main(**vars(parser.parse_args()))
