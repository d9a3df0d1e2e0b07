"""The derivative of a loss after several rounds of FedAvg with respect to the clients' learning rate.

With ``fedsim.Jit(differentiable=True)``, `jax.grad` goes through whole rounds: the clients' training, the aggregation and the
server's steps. Here the derivative is compared with a finite difference and then used to improve the learning rate.

Run it with ``python examples/differentiate.py``.
"""

import jax
import jax.numpy as jnp
import optax

import fedsim

data = fedsim.datasets.load("digits")
model = fedsim.models.digits_logistic()
sampler = fedsim.UniformSampler(data.train, clients=5, seed=0)
examples = {name: jnp.asarray(column) for name, column in data.test.columns.items()}


def loss_after(learning_rate, rounds: int = 3) -> jax.Array:
    """Returns the loss on the test data after some rounds."""
    algorithm = fedsim.algorithms.FedAvg(
        model=model,
        client_optimizer=optax.sgd(learning_rate),
        batches=fedsim.Batches(size=10),
        execution=fedsim.Jit(differentiable=True),
    )
    state = algorithm.init(jax.random.key(0))
    state, _ = algorithm.apply_rounds(state, [sampler.cohort(round) for round in range(rounds)])
    return jnp.mean(model.loss(examples, model.apply_for_eval(state.params, examples)))


def main(steps: int = 5) -> tuple[float, float]:
    """Prints and returns the derivative and the finite difference, and takes some gradient steps on the learning rate."""
    value_and_grad = jax.jit(jax.value_and_grad(loss_after))
    learning_rate, change = 0.05, 0.002
    _, derivative = value_and_grad(learning_rate)
    above, _ = value_and_grad(learning_rate + change)
    below, _ = value_and_grad(learning_rate - change)
    difference = (above - below) / (2 * change)
    print(f"derivative {derivative:.4f}, finite difference {difference:.4f}")
    for _ in range(steps):
        loss, slope = value_and_grad(learning_rate)
        print(f"learning rate {learning_rate:.3f}: loss {loss:.4f} after 3 rounds")
        learning_rate -= 0.5 * slope
    return float(derivative), float(difference)


if __name__ == "__main__":
    main()
