"""The program that test_kill.py kills: ``python killed_run.py FOLDER``; small rounds, many checkpoints, seconds long."""

import sys
import time

import jax
import numpy as np
import optax

import fedsim
from fedsim import experiment

ROUNDS = 400

if __name__ == "__main__":
    folder, pause = sys.argv[1], float(sys.argv[2])
    draw = np.random.default_rng(0)
    columns = {"x": draw.integers(0, 17, (400, 8, 8, 1)).astype(np.uint8), "y": draw.integers(0, 10, 400).astype(np.int32)}
    data = fedsim.FederatedData.from_arrays(columns, sizes=[10, 30] * 10)
    algorithm = fedsim.algorithms.FedAvg(
        model=fedsim.models.digits_logistic(),
        client_optimizer=optax.sgd(0.1),
        server_optimizer=optax.sgd(0.5, momentum=0.9),
        batches=fedsim.Batches(size=8),
        execution=fedsim.Jit(),
    )
    result = experiment.run(
        algorithm,
        fedsim.UniformSampler(data, clients=3, seed=3),
        rounds=ROUNDS,
        folder=folder,
        test_data=data,
        evaluate_every=10,
        checkpoint_every=3,
        progress=False,
        # A short rest gives the test moments to strike at that are not in the middle of a checkpoint.
        callbacks=[lambda line, state: time.sleep(pause)],
    )
    for leaf in jax.tree.leaves(result.state):
        print(jax.device_get(leaf).tobytes().hex())
