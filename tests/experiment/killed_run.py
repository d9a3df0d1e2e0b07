"""The program that test_kill.py kills: ``python killed_run.py FOLDER PAUSE ALGORITHM``; small rounds, many checkpoints, seconds
long."""

import sys
import time
from pathlib import Path

import numpy as np
import optax

import fedsim
from fedsim import experiment
from fedsim.data import _row_store

sys.path.insert(0, str(Path(__file__).parents[1]))
from remembering import Drifting, bits

ROUNDS = 400

if __name__ == "__main__":
    folder, pause, name = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    draw = np.random.default_rng(0)
    columns = {"x": draw.integers(0, 17, (400, 8, 8, 1)).astype(np.uint8), "y": draw.integers(0, 10, 400).astype(np.int32)}
    data = fedsim.FederatedData.from_arrays(columns, sizes=[10, 30] * 10)
    common = dict(model=fedsim.models.digits_logistic(), batches=fedsim.Batches(size=8))
    if name == "remembering":
        # Rows of clients are used again as soon as nobody refers to them.
        _row_store._CHUNK_BYTES = 1
        algorithm: fedsim.Algorithm = Drifting(**common, execution=fedsim.Jit(memory="stream"))
    else:
        optimizers = dict(client_optimizer=optax.sgd(0.1), server_optimizer=optax.sgd(0.5, momentum=0.9))
        algorithm = fedsim.algorithms.FedAvg(**common, **optimizers, execution=fedsim.Jit())
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
    for leaf in bits(result.state):
        print(leaf.hex())
