"""Time of `fedsim.models.Conv2D` and `DepthwiseConv2D` relative to the layers of Haiku with the same results.

    python -m benchmarks.convolution

Each layer is computed inside of a compiled loop, as local steps and the batches of an evaluation are: its outputs alone, and
its outputs with the gradients of its weights and, unless it is the first layer of a network, of its input. The layers of both
libraries run by turns, many times, and the least time of each counts.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

import fedsim
from benchmarks.clock import by_turns
from benchmarks.hardware import stamp

RESULT = Path(__file__).parent / "results" / "cpu-convolution.json"
BATCHES = (1, 8, 64)
MOST_PRODUCTS = 1.6e8  # of a batch; with more, the gradients of Haiku's layers take seconds
SECONDS_OF_TURN, SECONDS_OF_ROW, MOST_TURNS = 0.01, 0.7, 25


class Layer(NamedTuple):
    """A convolution: images of ``size`` by ``size`` pixels with ``channels``, and a kernel with ``outputs`` channels; 0 for a
    depthwise one."""

    size: int
    channels: int
    outputs: int
    kernel: int
    stride: int = 1


LAYERS = {
    "EMNIST CNN, first": Layer(28, 1, 32, 3),
    "EMNIST CNN, second": Layer(26, 32, 64, 3),
    "5x5, first": Layer(28, 1, 32, 5),
    "5x5, second": Layer(14, 32, 64, 5),
    "ResNet-8, 16 channels": Layer(32, 16, 16, 3),
    "ResNet-8, 32 channels, strided": Layer(32, 16, 32, 3, 2),
    "ResNet-18, first": Layer(32, 3, 64, 3),
    "ResNet-18, 64 channels": Layer(32, 64, 64, 3),
    "ResNet-18, 128 channels, strided": Layer(32, 64, 128, 3, 2),
    "ResNet-18, 128 channels": Layer(16, 128, 128, 3),
    "ResNet-18, 256 channels": Layer(8, 256, 256, 3),
    "ResNet-18, 512 channels": Layer(4, 512, 512, 3),
    "ResNet-18, 1x1, strided": Layer(16, 128, 256, 1, 2),
    "MobileNetV2, first": Layer(32, 3, 32, 3),
    "MobileNetV2, 1x1, wider": Layer(16, 24, 144, 1),
    "MobileNetV2, 1x1, narrower": Layer(8, 192, 32, 1),
    "MobileNetV2, 1x1, last": Layer(4, 320, 1280, 1),
    "MobileNetV2, depthwise": Layer(16, 144, 0, 3),
    "MobileNetV2, depthwise, strided": Layer(16, 144, 0, 3, 2),
}


def main() -> None:
    record: dict[str, Any] = {**stamp("cpu"), "us_per_step": {}}
    for name, layer in LAYERS.items():
        for batch in BATCHES:
            pixels = batch * math.ceil(layer.size / layer.stride) ** 2
            # The gradient of Haiku's depthwise layer takes about as long as that of 16 outputs for each channel.
            if pixels * layer.kernel**2 * layer.channels * (layer.outputs or 16) > MOST_PRODUCTS:
                continue
            for with_gradients in (False, True):
                row = f"{name}, {batch} images, {'gradients' if with_gradients else 'outputs'}"
                found = measured(layer, batch, with_gradients)
                record["us_per_step"][row] = found
                print(f"{found['fedsim'] / found['haiku']:5.2f}  {row}", flush=True)
    ratios = [found["fedsim"] / found["haiku"] for found in record["us_per_step"].values()]
    record["fedsim relative to haiku"] = {"most": max(ratios), "median": float(np.median(ratios)), "least": min(ratios)}
    print(record["fedsim relative to haiku"])
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


def measured(layer: Layer, batch: int, with_gradients: bool) -> dict[str, float]:
    """Returns the least microseconds of a step with the layer of each library."""
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(batch, layer.size, layer.size, layer.channels)), jnp.float32)
    loops: dict[str, Callable[[Any, int], Any]] = {}
    params: Any = None
    for name, library in {"fedsim": fedsim.models, "haiku": hk}.items():
        net = hk.without_apply_rng(hk.transform(functools.partial(convolved, layer, library)))
        params = params or net.init(jax.random.key(0), x)
        loops[name] = looped(net.apply, with_gradients, first=layer.channels <= 3)
    ours, theirs = (loop((params, x), 1) for loop in loops.values())
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3), ours, theirs)
    runs = {name: timed(loop, (params, x)) for name, loop in loops.items()}
    start = time.perf_counter()
    first = by_turns(runs, 1)
    turns = round(SECONDS_OF_ROW / (time.perf_counter() - start))
    rest = by_turns(runs, min(MOST_TURNS, max(2, turns)))
    return {name: 1e6 * min(first[name] + rest[name]) for name in runs}


def convolved(layer: Layer, library: Any, x: jax.Array) -> jax.Array:
    if not layer.outputs:
        depth = {} if library is fedsim.models else {"channel_multiplier": 1}
        return library.DepthwiseConv2D(kernel_shape=layer.kernel, stride=layer.stride, **depth)(x)
    return library.Conv2D(layer.outputs, layer.kernel, layer.stride)(x)


def looped(apply: Callable[..., jax.Array], with_gradients: bool, *, first: bool) -> Callable[[Any, int], Any]:
    """Returns a compiled loop of steps, each of which changes what the next one computes with."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        outputs = apply(params, x)
        return jnp.mean(outputs**2) if with_gradients else jnp.mean(outputs)

    def step(_: Any, state: Any) -> Any:
        params, x = state
        if not with_gradients:
            return params, x + 1e-6 * loss(params, x)
        if first:
            gradient = jax.grad(loss)(params, x)
            return jax.tree.map(lambda a, b: a - 1e-3 * b, params, gradient), x
        return jax.tree.map(lambda a, b: a - 1e-3 * b, state, jax.grad(loss, (0, 1))(params, x))

    return jax.jit(lambda state, steps: jax.lax.fori_loop(0, steps, step, state))


def timed(loop: Callable[[Any, int], Any], state: Any) -> Callable[[], float]:
    """Returns a function that runs the loop for about ``SECONDS`` and returns the seconds per step."""

    def run(steps: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(state, steps))
        return (time.perf_counter() - start) / steps

    steps = max(1, round(SECONDS_OF_TURN / min(run(1) for _ in range(3))))
    return lambda: run(steps)


if __name__ == "__main__":
    main()
