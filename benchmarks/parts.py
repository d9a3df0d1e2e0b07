"""Time of a local step with batch and with group normalization, and of a model whose first layers are frozen.

    python -m benchmarks.parts [--cifar FILE]

Normalizations are those of a small convolutional network; of a dense network of ten equal layers, nine are frozen. The data
are random numbers. With ``--cifar``, an archive with the arrays x_train, y_train, x_test and y_test of CIFAR-100, a ResNet-18
with each normalization trains for a few rounds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedsim
from benchmarks.clock import by_turns, timed
from benchmarks.hardware import stamp

RESULT = Path(__file__).parent / "results" / "cpu-parts.json"
WIDTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path)
    cifar = parser.parse_args().cifar
    record: dict[str, Any] = stamp("cpu")
    normalizations = {norm: photographs(norm) for norm in ("group", "batch", "none")}
    record["us_per_step"] = measured(normalizations, {"x": (32, 32, 3), "y": ()})
    layers = dense_layers()
    frozen = [f"layer_{number}/*" for number in range(9)]
    record["us_per_step"] |= measured(
        {"all": layers, "nine of ten frozen": layers.with_parts(frozen=frozen)}, {"x": (WIDTH,), "y": ()}
    )
    print(record["us_per_step"], flush=True)
    if cifar is not None:
        record["resnet18 on CIFAR-100"] = {norm: trained(cifar, norm) for norm in ("group", "batch")}
        print(record["resnet18 on CIFAR-100"])
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


def photographs(norm: str) -> fedsim.Model:
    def normalized(x: jax.Array, training: bool) -> jax.Array:
        if norm == "group":
            return fedsim.models.GroupNorm(8)(x)
        return fedsim.models.BatchNorm()(x, training) if norm == "batch" else x

    def network(examples: Any, training: bool) -> jax.Array:
        x = examples["x"]
        for width in (32, 64):
            x = jax.nn.relu(normalized(fedsim.models.Conv2D(width, 3, stride=2)(x), training))
        return hk.Linear(10)(jnp.mean(x, axis=(1, 2)))

    features = {"x": jax.ShapeDtypeStruct((32, 32, 3), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
    return fedsim.Model.from_haiku(
        hk.transform_with_state(network) if norm == "batch" else hk.transform(network),
        features=features,
        train_kwargs={"training": True},
        eval_kwargs={"training": False},
    )


def dense_layers() -> fedsim.Model:
    def network(examples: Any) -> jax.Array:
        x = examples["x"]
        for number in range(10):
            x = jax.nn.relu(hk.Linear(WIDTH, name=f"layer_{number}")(x))
        return x

    features = {"x": jax.ShapeDtypeStruct((WIDTH,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
    return fedsim.Model.from_haiku(hk.transform(network), features=features)


def measured(models: dict[str, fedsim.Model], shapes: dict[str, tuple[int, ...]]) -> dict[str, float]:
    """Returns the microseconds of a local step on batches of 32 examples."""
    draw = np.random.default_rng(0)
    columns = {"x": draw.normal(size=(1600, *shapes["x"])).astype(np.float32), "y": draw.integers(0, 10, 1600).astype(np.int32)}
    data = fedsim.FederatedData.from_arrays(columns, sizes=[160] * 10)
    sampler = fedsim.UniformSampler(data, clients=10, seed=0)
    runs = {
        name: timed(
            fedsim.algorithms.FedAvg(
                model=model, client_optimizer=optax.sgd(0.01), batches=fedsim.Batches(size=32), execution=fedsim.Jit()
            ),
            sampler,
            3,
        )
        for name, model in models.items()
    }
    return {name: min(times) * 1e6 for name, times in by_turns(runs, 5).items()}


def trained(path: Path, norm: str) -> list[dict[str, float]]:
    """Returns the training loss, and loss and accuracy on held-out examples, of a few rounds."""
    with np.load(path) as arrays:
        columns = {name: arrays[f"{name}_train"] for name in "xy"}
        held_out = {name: arrays[f"{name}_test"][:200] for name in "xy"}
    parts = np.array_split(np.random.default_rng(0).permutation(len(columns["y"]))[:400], 5)
    data = fedsim.FederatedData.from_partition({"x": columns["x"], "y": columns["y"].astype(np.int32)}, parts)
    test = fedsim.FederatedData.from_arrays({"x": held_out["x"], "y": held_out["y"].astype(np.int32)}, sizes=[200])
    model = fedsim.models.resnet18(num_classes=100, norm=norm)
    algorithm = fedsim.algorithms.FedAvg(
        model=model, client_optimizer=optax.sgd(0.05, momentum=0.9), batches=fedsim.Batches(size=20), execution=fedsim.Jit()
    )
    state, rows = algorithm.init(jax.random.key(0)), []
    for cohort in fedsim.UniformSampler(data, clients=5, seed=0).rounds(4):
        state, info = algorithm.apply(state, cohort)
        found = fedsim.evaluate(model, state.params, test).overall
        rows.append({"training loss": float(np.mean(info.clients["loss"])), **{name: float(found[name]) for name in found}})
    return rows


if __name__ == "__main__":
    main()
