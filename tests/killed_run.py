"""The run that test_kill.py kills: short rounds and many checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import numpy as np
import optax
from drifting import Drifting, bits

import fedsim
from fedsim import experiment
from fedsim.data import _row_store


def run(name: str, rounds: int, folder: Path, cache: Path, pause: float) -> None:
    """Trains, and writes the bits of the last state to ``folder`` with the suffix ``.bits``."""
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    draw = np.random.default_rng(0)
    columns = {"x": draw.integers(0, 17, (400, 8, 8, 1)).astype(np.uint8), "y": draw.integers(0, 10, 400).astype(np.int32)}
    data = fedsim.FederatedData.from_arrays(columns, sizes=[10, 30] * 10)
    common = dict(model=fedsim.models.digits_logistic(), batches=fedsim.Batches(size=8))
    if name == "drifting":
        # The store reuses rows of clients as soon as no state refers to them.
        _row_store._CHUNK_BYTES = 1
        algorithm: fedsim.Algorithm = Drifting(**common, execution=fedsim.Jit(memory="stream"))
    else:
        optimizers = dict(client_optimizer=optax.sgd(0.1), server_optimizer=optax.sgd(0.5, momentum=0.9))
        algorithm = fedsim.algorithms.FedAvg(**common, **optimizers, execution=fedsim.Jit())
    result = experiment.run(
        algorithm,
        fedsim.UniformSampler(data, clients=3, seed=3),
        rounds=rounds,
        folder=folder,
        test_data=data,
        evaluate_every=10,
        checkpoint_every=3,
        progress=False,
        # The pause makes it possible that the process is killed between checkpoints, too.
        callbacks=[lambda line, state: time.sleep(pause)],
    )
    folder.with_suffix(".bits").write_text("\n".join(leaf.hex() for leaf in bits(result.state)))
