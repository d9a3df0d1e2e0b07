"""Hierarchical federated learning, written with `fedsim.primitives`: silos have clients, and the server has silos.

Each silo runs some rounds of federated averaging with its own clients. The server then averages the models of the silos. Silos
and clients count by their numbers of examples. The program is one JAX function, so it is compiled as a whole, and `jax.grad`
can differentiate it. It trains a logistic regression on the handwritten digits.

Run it with ``python examples/hierarchical.py``.
"""

import jax
import jax.numpy as jnp
import numpy as np

import fedsim
from fedsim import primitives as fed
from fedsim import tree

SILOS, CLIENTS = fed.Placement("silos", 4), fed.Placement("clients", 5)
MODEL = fedsim.models.digits_logistic()


def stacked(data):
    """Returns the examples of all silos' clients, ``[silos, clients, examples, ...]``, with 0 for the weights of padding."""
    shape, longest = (SILOS.size, CLIENTS.size), data.sizes.max()
    weights = (np.arange(longest) < data.sizes[:, None]).astype(np.float32)
    columns = {name: np.zeros((data.num_clients, longest, *x.shape[1:]), x.dtype) for name, x in data.columns.items()}
    for index, client in enumerate(data):
        for name, column in columns.items():
            column[index, : len(client)] = client[name]
    return jax.tree.map(lambda x: jnp.asarray(x.reshape(*shape, *x.shape[1:])), {**columns, "weights": weights})


def client_loss(params, examples):
    losses = MODEL.losses(examples, MODEL.apply_for_eval(params, examples))
    return jnp.sum(losses * examples["weights"]) / jnp.sum(examples["weights"])


def train_client(params, examples, rate, steps=5):
    def step(t, params):
        return tree.subtract(params, tree.scale(jax.grad(client_loss)(params, examples), rate))

    return fed.bounded_loop(steps, step, params, most_steps=steps)


def train_silo(params, examples, rate, rounds):
    own = fed.place(examples, CLIENTS)
    sizes = fed.map(lambda examples: jnp.sum(examples["weights"]), own)
    for _ in range(rounds):
        models = fed.map(lambda params, own: train_client(params, own, rate), fed.broadcast(params, CLIENTS), own)
        params = fed.weighted_mean(models, sizes)
    return params


def train(params, examples, rate, rounds=5, silo_rounds=2):
    """Returns the server's parameters after some rounds, in each of which every silo runs ``silo_rounds`` rounds of its own."""
    silos = fed.place(examples, SILOS)
    sizes = fed.map(lambda examples: jnp.sum(examples["weights"]), silos)

    def round(_, params):
        models = fed.map(lambda params, own: train_silo(params, own, rate, silo_rounds), fed.broadcast(params, SILOS), silos)
        return fed.weighted_mean(models, sizes)

    return fed.bounded_loop(rounds, round, params, most_steps=rounds)


def main(rate=0.2, rounds=5):
    """Prints and returns the test accuracy with one round and with four rounds per silo between two averages of the server."""
    data = fedsim.datasets.load("digits", clients=SILOS.size * CLIENTS.size)
    start, examples = MODEL.init(jax.random.key(0)), stacked(data.train)
    accuracies = []
    for silo_rounds in (1, 4):
        params = jax.jit(train, static_argnames=["rounds", "silo_rounds"])(start, examples, rate, rounds, silo_rounds)
        accuracies.append(float(fedsim.evaluate(MODEL, params, data.test).overall["accuracy"]))
        print(f"{rounds} rounds of {SILOS.size} silos, {silo_rounds} round(s) in each silo: test accuracy {accuracies[-1]:.3f}")
    return accuracies


if __name__ == "__main__":
    main()
