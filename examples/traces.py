"""Clients that are online, and as fast, as a trace file says: ``python examples/traces.py [FILE.csv]``.

The file has one line per client: its id, the intervals in seconds in which it is online, and the speed of its device.
Without an argument, the example writes such a file to a temporary folder.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import optax

import fedsim
from fedsim import systems

DAY = 86400.0


def write(path, client_ids, seed=0):
    """Writes invented traces: clients are online twice a day, for up to three hours; every fourth one is five times slower."""
    generator, lines = np.random.default_rng(seed), ["client,online,seconds_per_step,download_rate,upload_rate"]
    for number, client in enumerate(client_ids):
        starts = generator.uniform([0, DAY / 2], [DAY / 4, 3 * DAY / 4])
        stops = starts + generator.uniform(600, 3 * 3600, 2)
        intervals = " ".join(f"{start:.0f}-{stop:.0f}" for start, stop in zip(starts, stops, strict=True))
        lines.append(f"{client},{intervals},{10 if number % 4 else 50},1e5,2e4")
    path.write_text("\n".join(lines) + "\n")


def main(file=None, steps: int = 150):
    """Trains on the digits with FedBuff; prints the simulated hours and the accuracy, and returns the result."""
    data = fedsim.datasets.load("digits")
    with tempfile.TemporaryDirectory() as folder:
        if file is None:
            file = Path(folder) / "traces.csv"
            write(file, data.train.client_ids)
            print("\n".join(file.read_text().splitlines()[:4]))
        traces = systems.Traces.read(file, period=DAY)  # without a period, nobody is online after the last interval
    result = fedsim.experiment.simulate(
        fedsim.algorithms.FedAvg(
            model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.05), batches=fedsim.Batches(size=10, epochs=5)
        ),
        fedsim.UniformSampler(data.train, clients=20, seed=0),
        rounds=steps,
        devices=systems.Devices(availability=traces),
        synchronization=systems.Buffered(size=10, concurrency=15),
        test_data=data.test,
        progress=False,
    )
    hours, accuracy = result.schedule.seconds / 3600, result.evaluation.overall["accuracy"]
    print(f"{steps} server steps take {hours:.1f} hours; test accuracy {accuracy:.2f}")
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="a trace file with a line for each client of the digits, 0 to 99")
    main(**vars(parser.parse_args()))
