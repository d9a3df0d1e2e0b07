"""The floor: SGD steps written by hand on batches that are already on the devices, without anything federated.

Batches are drawn and shuffled before the timing starts. Clients are divided into queues, one per device on a CPU. On a GPU,
where a single client does not use the whole chip, there is one per device and lane. Each queue is one compiled loop of steps.
The model is a function ``loss(params, x, y, mask, key)``: fedsim's if fedsim is installed, else `plain_loss`.

`reference` is what all contenders are compared with. It uses `plain_loss` and NumPy and shares no code with fedsim.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import workload

Loss = Callable[..., jax.Array]


def plain_loss(task: workload.Task, params: list[jax.Array], x: Any, y: Any, mask: Any, key: Any) -> jax.Array:
    """Computes the masked mean cross-entropy of the task's model in plain jnp, on the leaves of `workload.initial_leaves`."""
    if task.model == "lstm":
        return jnp.sum(_sentence_losses(params, x, y) * mask) / jnp.sum(mask)
    layers = list(zip(params[::2], params[1::2], strict=True))
    x = x.astype(jnp.float32) / 255
    if task.model == "cnn":
        keys = jax.random.split(key) if task.dropout else (None, None)
        x = jax.nn.relu(_conv3x3(x, *layers[0]))
        x = jax.nn.relu(_conv3x3(x, *layers[1]))
        x = x.reshape(len(x), 12, 2, 12, 2, 64).max((2, 4))
        x = _dropout(keys[0], 0.25, x).reshape(len(x), -1)
        x = _dropout(keys[1], 0.5, jax.nn.relu(x @ layers[2][1] + layers[2][0]))
        layers = layers[3:]
    x = x.reshape(len(x), -1)
    for bias, weight in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    logits = x @ layers[-1][1] + layers[-1][0]
    losses = jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    return jnp.sum(losses * mask) / jnp.sum(mask)


def _sentence_losses(params: list[jax.Array], x: Any, y: Any) -> jax.Array:
    """Computes the sum over each sentence of the cross-entropy of the next word: FedJAX's model, unrolled."""
    embedding, b_projection, projection, b_output, output, b_lstm, lstm = params
    h = c = jnp.zeros((len(x), len(lstm) - embedding.shape[1]))
    losses = jnp.zeros(len(x))
    for word, label in zip(x.T, y.T, strict=True):
        i, g, f, o = jnp.split(jnp.concatenate([embedding[word], h], axis=1) @ lstm + b_lstm, 4, axis=1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        logits = (jnp.tanh(h) @ projection + b_projection) @ output + b_output
        picked = jnp.take_along_axis(logits, label[:, None], axis=1)[:, 0]
        losses += (jax.nn.logsumexp(logits, axis=1) - picked) * (label != 0)
    return losses


def _conv3x3(x: jax.Array, bias: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes a VALID convolution as three matrix products of patches: XLA's own on a CPU is 16 times slower in a loop."""
    n, height, width, channels = x.shape
    patches = jnp.concatenate([x[:, :, i : i + width - 2] for i in range(3)], axis=-1)
    bands = [
        patches[:, i : i + height - 2].reshape(-1, 3 * channels) for i in range(3)
    ]  # two-dimensional, because batched products are slower
    products = [band @ weight[i].reshape(3 * channels, -1) for i, band in enumerate(bands)]
    return (products[0] + products[1] + products[2]).reshape(n, height - 2, width - 2, -1) + bias


def _dropout(key: jax.Array | None, rate: float, x: jax.Array) -> jax.Array:
    return x if key is None else jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def _fedsim_loss(task: workload.Task) -> tuple[Loss, Any]:
    """fedsim's model as a loss, and the structure of its parameters."""
    from benchmarks.peers.fedsim import MODELS

    model = MODELS[task.model]()

    def loss(params: Any, x: Any, y: Any, mask: Any, key: Any) -> jax.Array:
        examples = {"x": x, "y": y}
        losses = model.loss(examples, model.apply_for_train(params, examples, key))
        return jnp.sum(losses * mask) / jnp.sum(mask)

    return loss, jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))


class Contender:
    packages = ("jax", "numpy")

    def __init__(self, task: workload.Task) -> None:
        if task.device == "cpu":
            jax.config.update("jax_num_cpu_devices", os.cpu_count())
        self.task, self.data = task, workload.population(task)
        self.leaves = [jnp.asarray(leaf) for leaf in workload.initial_leaves(task.model, task.seed)]
        plain = functools.partial(plain_loss, task), jax.tree.structure(self.leaves)
        try:
            (loss, treedef), origin = _fedsim_loss(task), "fedsim"
        except (ImportError, AttributeError):
            (loss, treedef), origin = plain, "plain"
        self.about = {"devices": str(jax.devices()), "model": origin}
        self.params = jax.tree.unflatten(treedef, self.leaves)
        self.train = _training(loss, task, lanes=1 if task.device == "cpu" else task.clients)
        self.queues: Any = None

    def run(self, rounds: int) -> int:
        """Trains along the queues of ``per_dispatch`` cohorts, as often as makes ``rounds``."""
        if self.queues is None:
            self.queues = self._queues()
        for _ in range(rounds // self.task.per_dispatch):
            jax.block_until_ready(self.train(self.params, *self.queues[:3], jax.random.key(0)))
        return self.queues[3] * (rounds // self.task.per_dispatch)

    def reference(self, path: str, rounds: int) -> None:
        """Federated averaging over the whole population: plain steps, one client at a time, and the server in NumPy."""
        task = self.task
        gradient = jax.jit(jax.grad(functools.partial(plain_loss, task)))
        params = [np.asarray(leaf, np.float64) for leaf in self.leaves]
        first, second = [0.0] * len(params), [0.0] * len(params)
        for round_number in range(1, rounds + 1):
            total = [np.zeros_like(p) for p in params]
            for client, size in enumerate(self.data.sizes):
                local = [jnp.asarray(p, jnp.float32) for p in params]
                for x, y, mask in self._batches(client, np.arange(size)):
                    gradients = gradient(local, x, y, mask, jax.random.key(0))
                    local = [p - task.client_lr * g for p, g in zip(local, gradients, strict=True)]
                total = [t + size * (p - np.asarray(q)) for t, p, q in zip(total, params, local, strict=True)]
            mean = [t / self.data.sizes.sum() for t in total]
            if task.server == "average":
                params = [p - m for p, m in zip(params, mean, strict=True)]
                continue
            first = [0.9 * a + 0.1 * m for a, m in zip(first, mean, strict=True)]
            second = [task.b2 * b + (1 - task.b2) * m**2 for b, m in zip(second, mean, strict=True)]
            scale = task.server_lr / (1 - 0.9**round_number), 1 - task.b2**round_number
            params = [
                p - scale[0] * a / (np.sqrt(b / scale[1]) + task.eps) for p, a, b in zip(params, first, second, strict=True)
            ]
        np.savez(path, *params)

    def _batches(self, client: int, order: np.ndarray) -> list[tuple[np.ndarray, ...]]:
        """Returns a client's batches in this order; the last one wraps around and is masked."""
        (x, y), batch = self.data.client(client), self.task.batch
        starts = range(0, len(order), batch)
        rows = [np.arange(start, start + batch) for start in starts]
        return [(x[order[r % len(order)]], y[order[r % len(order)]], (r < len(order)).astype(np.float32)) for r in rows]

    def _queues(self) -> tuple[Any, ...]:
        """Divides cohorts into queues, longest client first onto the shortest queue, and puts them on the devices."""
        task, rng, devices = self.task, np.random.default_rng(self.task.seed), len(jax.devices())
        lanes = 1 if task.device == "cpu" else task.clients
        queues: list[list[tuple[np.ndarray, ...]]] = [[] for _ in range(devices * lanes)]
        for _ in range(task.per_dispatch):
            cohort = rng.choice(len(self.data.sizes), task.clients, replace=False)
            for client in sorted(cohort, key=lambda i: -self.data.sizes[i]):
                min(queues, key=len).extend(self._batches(client, rng.permutation(self.data.sizes[client])))
        counts = np.array([len(queue) for queue in queues], np.int32)
        length = counts.max()
        columns = []
        for feature in range(3):  # x, y, mask: [devices * lanes, length, batch, ...]; a short queue repeats its batches
            columns.append(np.stack([[queue[i % len(queue)][feature] for i in range(length)] for queue in queues]))
        mesh = jax.make_mesh((devices,), ("devices",))
        sharding = jax.NamedSharding(mesh, jax.P("devices"))
        loops = counts if lanes == 1 else counts.reshape(devices, lanes).max(axis=1)
        return *jax.device_put((tuple(columns), loops), sharding), mesh, int(counts.sum())


def _training(loss: Loss, task: workload.Task, lanes: int) -> Callable[..., Any]:
    """Returns the compiled loop: ``(params, (x, y, mask), counts, mesh, key) -> params of every queue``."""

    def step(params: Any, batch: tuple[jax.Array, ...], key: jax.Array) -> Any:
        gradients = jax.grad(loss)(params, *batch, key)
        return jax.tree.map(lambda p, g: p - task.client_lr * g, params, gradients)

    def along_queue(params: Any, columns: Any, counts: jax.Array, key: jax.Array) -> Any:
        if lanes == 1:
            take = lambda i: tuple(column[0, i] for column in columns)  # noqa: E731
            final = jax.lax.fori_loop(0, counts[0], lambda i, p: step(p, take(i), jax.random.fold_in(key, i)), params)
            return jax.tree.map(lambda p: p[None], final)

        def lockstep(params: Any, i: jax.Array) -> tuple[Any, None]:
            batches = tuple(column[:, i] for column in columns)
            return jax.vmap(step)(params, batches, jax.random.split(jax.random.fold_in(key, i), lanes)), None

        start = jax.tree.map(lambda p: jnp.broadcast_to(p, (lanes, *p.shape)), params)
        return jax.lax.scan(lockstep, start, jnp.arange(columns[0].shape[1]))[0]

    @functools.partial(jax.jit, static_argnums=3)
    def train(params: Any, columns: Any, counts: jax.Array, mesh: jax.sharding.Mesh, key: jax.Array) -> Any:
        specs = (jax.P(), jax.P("devices"), jax.P("devices"), jax.P())
        sharded = jax.shard_map(along_queue, mesh=mesh, in_specs=specs, out_specs=jax.P("devices"), check_vma=False)
        return sharded(params, columns, counts, key)

    return train
