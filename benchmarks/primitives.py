"""FedAvg written with `fedsim.primitives`, beside DrJAX and beside the algorithm `FedAvg`, and its derivative.

    pip install --no-deps drjax==0.2.1
    python -m benchmarks.primitives [--devices 8]

All programs are the same: rounds of FedAvg with batches of 20 of EMNIST's shape, on one set of clients, in one process, with
the shortest of several interleaved times. DrJAX has clients of equal shape only, so where clients have different sizes it gets
masked batches, as many as the largest client has.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedsim
from benchmarks.hardware import stamp
from fedsim import primitives as fed

RATE, BATCH, REPEATS = 0.05, 20, 7
BATCHES = fedsim.Batches(size=BATCH, shuffle=False)
RESULT = Path(__file__).parent / "results" / "cpu-primitives.json"


def population(sizes: np.ndarray) -> fedsim.FederatedData:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(sizes.sum(), 28, 28, 1)).astype(np.float32), draw.integers(0, 62, sizes.sum()).astype(np.int32)
    return fedsim.FederatedData.from_arrays({"x": x, "y": y}, sizes=sizes)


def gradient(model: fedsim.Model, params: Any, examples: Any, mask: Any, key: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        losses = model.loss(examples, model.apply_for_train(params, examples, key))
        return jnp.sum(jnp.where(mask, losses, 0)) / jnp.maximum(jnp.sum(mask), 1)

    return jax.grad(loss)(params)


def with_primitives(model: fedsim.Model, rate: Any, params: Any, clients: Any) -> Any:
    def train(params: Any, client: fedsim.Client) -> tuple[Any, jax.Array]:
        def step(own: Any, batch: fedsim.Batch) -> Any:
            gradients = gradient(model, own, batch.examples, batch.mask, batch.key)
            return jax.tree.map(lambda p, g: p - rate * g, own, gradients)

        return client.for_each_batch(BATCHES, step, params), client.num_examples.astype(jnp.float32)

    done = fed.map(train, fed.broadcast(params, clients.placement), clients).stacked
    return fed.weighted_mean(*[fed.Placed(part, clients.placement) for part in done])


def with_drjax(model: fedsim.Model, params: Any, batches: Any, masks: Any, weights: Any) -> Any:
    import drjax  # type: ignore[import-not-found]

    @drjax.program(placements={"clients": len(weights)})
    def program(params: Any, batches: Any, masks: Any, weights: Any) -> Any:
        def train(params: Any, batches: Any, masks: Any) -> Any:
            def step(own: Any, batch: Any) -> tuple[Any, None]:
                examples, mask = batch
                gradients = gradient(model, own, examples, mask, jax.random.key(0))
                return jax.tree.map(lambda p, g: p - RATE * g, own, gradients), None

            return jax.lax.scan(step, params, (batches, masks))[0]

        trained = drjax.map_fn(train, (drjax.broadcast(params), batches, masks))
        # reduce_weighted_mean takes a single array only.
        weighted = drjax.map_fn(lambda model, weight: jax.tree.map(lambda p: p * weight, model), (trained, weights))
        return jax.tree.map(lambda p: p / drjax.reduce_sum(weights), drjax.reduce_sum(weighted))

    return program(params, batches, masks, weights)


def padded(data: fedsim.FederatedData) -> tuple[Any, jax.Array]:
    steps = -(-int(data.sizes.max()) // BATCH)
    columns = {n: np.zeros((data.num_clients, steps * BATCH, *c.shape[1:]), c.dtype) for n, c in data.columns.items()}
    masks = np.zeros((data.num_clients, steps * BATCH), bool)
    for client, (start, size) in enumerate(zip(data.offsets, data.sizes, strict=False)):
        masks[client, :size] = True
        for name, column in data.columns.items():
            columns[name][client, :size] = column[start : start + size]
    cut = {name: jnp.asarray(c.reshape(data.num_clients, steps, BATCH, *c.shape[2:])) for name, c in columns.items()}
    return cut, jnp.asarray(masks.reshape(data.num_clients, steps, BATCH))


def times(calls: dict[str, Any]) -> dict[str, float]:
    """Returns the shortest of several interleaved times in milliseconds, after a first call of each that compiles."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(REPEATS):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            found[name].append(1000 * (time.perf_counter() - start))
    return {name: round(min(values), 2) for name, values in found.items()}


def compare(model_name: str, sizes: np.ndarray, devices: int) -> dict[str, float]:
    model = {"logistic": fedsim.models.emnist_logistic, "dense": fedsim.models.emnist_dense}[model_name]()
    data = population(sizes)
    cohort = fedsim.Cohort.of(data, data.client_ids)
    clients = fedsim.place_clients(cohort, BATCHES, devices=jax.devices() if devices > 1 else None)
    algorithm = fedsim.algorithms.FedAvg(
        model=model, client_optimizer=optax.sgd(RATE), batches=BATCHES, execution=fedsim.Pmap(devices=devices)
    )
    state = algorithm.init(jax.random.key(0))
    batches, masks = padded(data)
    ours = jax.jit(fed.program(lambda params, clients: with_primitives(model, RATE, params, clients)))
    sharding = jax.sharding.NamedSharding(jax.make_mesh((devices,), ("clients",)), jax.P("clients"))
    batches, masks, weights = jax.device_put((batches, masks, jnp.asarray(data.sizes, jnp.float32)), sharding)
    theirs = jax.jit(lambda params, *rest: with_drjax(model, params, *rest))

    def drjax() -> Any:
        with jax.set_mesh(sharding.mesh):
            return theirs(state.params, batches, masks, weights)

    results = ours(state.params, clients), drjax(), algorithm.apply(state, cohort)[0].params
    for other in results[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), results[0], jax.device_get(other))
    return times(
        {"primitives": lambda: ours(state.params, clients), "DrJAX": drjax, "FedAvg": lambda: algorithm.apply(state, cohort)}
    )


def derivative(rounds: int = 10) -> dict[str, float]:
    """Returns the times of ten rounds of FedAvg (dense, 10 clients), and with the derivative by the learning rate."""
    data = population(np.full(10, 400))
    cohorts = [fedsim.Cohort.of(data, data.client_ids, round=r) for r in range(rounds)]
    model = fedsim.models.emnist_dense()
    start = model.init(jax.random.key(0))

    def objective(rate: Any) -> jax.Array:
        algorithm = fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(rate), batches=BATCHES)
        algorithm = fedsim.differentiable(algorithm)
        state = algorithm.init(jax.random.key(0))._replace(params=start)
        return fedsim.tree.squared_norm(algorithm.apply_rounds(state, cohorts)[0].params)

    forward, backward = jax.jit(objective), jax.jit(jax.value_and_grad(objective))
    rate = jnp.float32(RATE)
    memory = {}
    for name, function in (("forward", forward), ("backward", backward)):
        analysis = function.lower(rate).compile().memory_analysis()
        memory[f"{name} MB"] = round((analysis.temp_size_in_bytes + analysis.output_size_in_bytes) / 1e6, 1)
    return times({"forward": lambda: forward(rate), "backward": lambda: backward(rate)}) | memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.devices > 1:
        fedsim.use_all_cores(arguments.devices)
    measured = stamp("cpu")
    draw = np.random.default_rng(1)
    ragged = np.maximum(10, draw.lognormal(4.5, 0.9, 16)).astype(int)
    rows: list[dict[str, Any]] = []
    for model in ("logistic", "dense"):
        for kind, sizes in (("equal", np.full(16, 200)), ("ragged", ragged)):
            row = {"model": model, "clients": kind, "devices": arguments.devices, **compare(model, sizes, arguments.devices)}
            rows.append(row)
            print(row, flush=True)
    if arguments.devices == 1:
        row = {"model": "dense", "derivative": "10 rounds, 10 clients, 20 steps", **derivative()}
        rows.append(row)
        print(row, "peak of the process:", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "MB")
    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    rows = [row for row in known if row.get("devices", 1) != arguments.devices] + [row | {"stamp": measured} for row in rows]
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
