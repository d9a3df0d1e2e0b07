"""What algorithms share whose server has examples of its own: a seed in the state, and steps on these examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedsim import rng
from fedsim.algorithms._local_training import LocalTraining
from fedsim.data import Batch
from fedsim.model import Params
from fedsim.primitives import bounded_loop
from fedsim.rounds import streams

Examples = Mapping[str, np.ndarray]


class SeededState(NamedTuple):
    """`ServerState`, and the seed of the server's own steps, ``uint32 []``."""

    params: Params
    opt_state: Any
    round: jax.Array
    server_seed: jax.Array


def server_seed(key: jax.Array) -> jax.Array:
    """Returns the seed of the server's own steps, ``uint32 []``."""
    return jax.random.bits(rng.stream(key, "server"), dtype=jnp.uint32)


def after_server_steps(
    training: LocalTraining, params: Params, examples: Mapping[str, Any] | None, seed: jax.Array, round_number: jax.Array
) -> Params:
    """Returns the parameters after the server's steps on its own examples, which are those of a client with these examples."""
    if examples is None:
        return params
    columns = {name: jnp.asarray(column) for name, column in examples.items()}
    size = len(next(iter(columns.values())))
    words, step_key = streams(jax.random.fold_in(jax.random.key(seed, impl=rng.IMPLEMENTATION), round_number))

    def step(t: jax.Array, local: Any) -> Any:
        index, mask = training.batches.indices(words, size, t)
        drawn = {name: column[index] for name, column in columns.items()}
        return training.step(local, Batch(drawn, mask, jax.random.fold_in(step_key, t), t))

    steps = training.batches.num_steps(size)
    return bounded_loop(steps, step, training.start(params), most_steps=max(1, steps)).params
