"""Data-parallel SGD with a parameter server, synchronous and asynchronous, on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedsim import checks
from fedsim.compressors import Compressor
from fedsim.data import FederatedData
from fedsim.decentralized.costs._exchange import message_bytes
from fedsim.samplers import UniformSampler
from fedsim.systems import Asynchronous, Devices, Synchronous, schedule


class EpochSeconds(NamedTuple):
    """The simulated seconds of an epoch of data-parallel SGD.

    Attributes:
      workers: n.
      synchronous: the seconds if all workers wait for each other in every step.
      asynchronous: the seconds if the server takes a step with every gradient that arrives.
      staleness: the mean number of server steps between the model of a gradient and the one to which it is applied, if
        asynchronous.

    >>> from fedsim.systems import Devices
    >>> epoch_seconds([4], batches=100, devices=Devices(seconds_per_step=2.0))[0].synchronous
    50.0
    """

    workers: int
    synchronous: float
    asynchronous: float
    staleness: float


def epoch_seconds(
    workers: Sequence[int],
    batches: int,
    devices: Devices,
    *,
    values: int = 1,
    compressor: Compressor | None = None,
    seed: int = 0,
) -> list[EpochSeconds]:
    """Returns a table: how long an epoch of data-parallel SGD takes, by the number of workers.

    A worker receives the model, computes the gradient of a batch and sends it. Messages to different workers do not slow each
    other down; for a server with one link see `ParameterServer`.

    Args:
      workers: the numbers of workers, a row each. The workers of a row are among those of a longer one.
      batches: in an epoch, all workers together. Synchronous steps that are not whole count as whole.
      devices: the workers' speeds (a batch is one step), rates and latencies.
      values: k, the size of the model and of the gradient.
      compressor: of both messages, see `message_bytes`.
      seed: of the speeds.

    Raises:
      ValueError: a number is not a positive whole number.

    >>> from fedsim.systems import Devices, LogNormal
    >>> for row in epoch_seconds([1, 4, 16], batches=1600, devices=Devices(variation=LogNormal(sigma=0.5))):
    ...     print("{:2} {:7.1f} {:7.1f} {:5.1f}".format(*row))
     1  1816.5  1816.5   0.0
     4   724.2   454.1   3.0
    16   249.9   113.7  14.9
    """
    checks.whole(1, batches=batches, values=values)
    size, table = message_bytes(values, compressor), []
    for n in workers:
        checks.whole(1, workers=n)
        data = FederatedData.from_arrays({"x": np.zeros(n, np.float32)}, sizes=[1] * n)
        run = {
            model: schedule(
                UniformSampler(data, clients=n, seed=seed),
                steps,
                steps=np.ones(n, np.int64),
                synchronization=model,
                devices=devices,
                bytes_down=size,
                bytes_up=size,
            )
            for model, steps in ((Synchronous(), -(-batches // n)), (Asynchronous(concurrency=n), batches))
        }
        synchronous, asynchronous = run.values()
        table.append(EpochSeconds(n, synchronous.seconds, asynchronous.seconds, float(asynchronous.updates.staleness.mean())))
    return table
