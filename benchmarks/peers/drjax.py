"""DrJAX as in its examples: broadcast, map over clients padded to one shape, weighted mean; one jitted function per round."""

from __future__ import annotations

import drjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import workload


def forward(model: str, dropout: bool) -> hk.Transformed:
    """Returns the task's model in plain Haiku."""

    def drop(rate: float, x: jax.Array) -> jax.Array:
        return hk.dropout(hk.next_rng_key(), rate, x) if dropout else x

    def logits(x: jax.Array) -> jax.Array:
        if model != "cnn":
            widths = {"logistic": [62], "dense": [200, 200, 62]}[model]
            return hk.nets.MLP(widths)(x.reshape(len(x), -1))
        x = jax.nn.relu(hk.Conv2D(32, 3, padding="VALID")(x))
        x = jax.nn.relu(hk.Conv2D(64, 3, padding="VALID")(x))
        x = drop(0.25, hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"))
        x = drop(0.5, jax.nn.relu(hk.Linear(128)(x.reshape(len(x), -1))))
        return hk.Linear(62)(x)

    return hk.transform(logits)


class Contender:
    packages = ("drjax", "jax", "dm-haiku", "optax", "numpy")

    def __init__(self, task: workload.Task) -> None:
        self.task, self.data = task, workload.population(task)
        self.about = {"devices": str(jax.devices())}
        self.rng, self.key = np.random.default_rng(task.seed), jax.random.key(task.seed)
        self.max_steps = task.steps(self.data.sizes.max())
        model = forward(task.model, task.dropout)
        adam = optax.adam(task.server_lr, b1=0.9, b2=task.b2, eps=task.eps)
        optimizer = adam if task.server == "adam" else optax.sgd(1.0)
        treedef = jax.tree.structure(jax.eval_shape(model.init, self.key, jnp.zeros((1, 28, 28, 1))))
        self.params = jax.tree.unflatten(treedef, map(jnp.asarray, workload.initial_leaves(task.model, task.seed)))
        self.opt_state = optimizer.init(self.params)

        def loss(params, x, y, mask, key):
            outputs = model.apply(params, key, x.astype(jnp.float32) / 255)
            losses = optax.softmax_cross_entropy_with_integer_labels(outputs, y)
            return jnp.sum(losses * mask) / jnp.maximum(mask.sum(), 1)

        def client_update(start, x, y, mask, key):
            def step(params, batch):
                gradient = jax.grad(loss)(params, *batch)
                return jax.tree.map(lambda p, g: p - task.client_lr * g, params, gradient), None

            params, _ = jax.lax.scan(step, start, (x, y, mask, jax.random.split(key, len(x))))
            return jax.tree.map(jnp.subtract, start, params)  # a padding batch has a gradient of zero

        @jax.jit
        @drjax.program(placements={"clients": task.clients})
        def one_round(params, opt_state, x, y, mask, weights, key):
            keys = jax.random.split(key, task.clients)
            deltas = drjax.map_fn(client_update, (drjax.broadcast(params), x, y, mask, keys))
            mean = drjax.reduce_weighted_mean(deltas, jax.tree.map(lambda _: weights, params))
            updates, opt_state = optimizer.update(mean, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self.one_round = one_round

    def cohort(self) -> tuple[int, tuple[np.ndarray, ...]]:
        """Samples clients, shuffles each, and pads all to the largest client of the population, so that one trace suffices."""
        task = self.task
        x = np.zeros((task.clients, self.max_steps * task.batch, 28, 28, 1), np.uint8)
        y, mask = np.zeros(x.shape[:2], np.int32), np.zeros(x.shape[:2], np.float32)
        chosen = self.rng.choice(len(self.data.sizes), task.clients, replace=False)
        sizes = self.data.sizes[chosen]
        for row, (client, size) in enumerate(zip(chosen, sizes, strict=True)):
            order = self.rng.permutation(size)
            images, labels = self.data.client(client)
            x[row, :size], y[row, :size], mask[row, :size] = images[order], labels[order], 1
        batches = [a.reshape(task.clients, self.max_steps, task.batch, *a.shape[2:]) for a in (x, y, mask)]
        return sum(map(task.steps, sizes)), (*batches, sizes.astype(np.float32))

    def run(self, rounds: int) -> int:
        total = 0
        for _ in range(rounds):
            self.key, key = jax.random.split(self.key)
            steps, arrays = self.cohort()
            self.params, self.opt_state = self.one_round(self.params, self.opt_state, *arrays, key)
            total += steps
        jax.block_until_ready(self.params)
        return total

    def save(self, path: str) -> None:
        np.savez(path, *jax.tree.leaves(self.params))
