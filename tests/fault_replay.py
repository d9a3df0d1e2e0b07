"""Writes the faults of a simulation to a file, with the command that repeats it by `fedsim run --faults FILE`.

The command uses the dataset and the algorithm below. Clients take given numbers of steps and send messages of given sizes.
"""

import contextlib
import dataclasses
import shlex
from pathlib import Path

import federation
import jax.numpy as jnp
import numpy as np

import fedsim
from fedsim import rng, systems

FOLDER = Path(__file__).parents[1] / ".pytest_failures"
CLIENTS, COHORT, SEED, ROUNDS, BYTES_DOWN = 40, 5, 3, 12, 10
STEPS = np.arange(CLIENTS) % 7 + 1
_MOST_DISPATCHES = 1000
# `fedsim run` has no options for these.
_WITHOUT_OPTION = {"variation": systems.Constant(1.0), "latency": systems.Constant(0.0), "availability": None}


def population(data, cache):
    """Returns clients that take `STEPS` steps with batches of one example; the dataset of the command."""
    return {name: federation.data_of_zeros(STEPS) for name in ("train", "test")}


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Messages(fedsim.Algorithm):
    """Learns nothing, and sends messages of given sizes.

    Attributes:
      bytes_up: the size of a client's message.
    """

    bytes_up: int = 0

    def init(self, key):
        return jnp.zeros(BYTES_DOWN, jnp.int8)

    def client_update(self, shared, client):
        state = client.for_each_batch(self.batches, lambda state, batch: state, jnp.zeros(self.bytes_up, jnp.int8))
        return fedsim.ClientUpdate(state, jnp.float32(1))

    def server_update(self, state, update, info):
        return state


@contextlib.contextmanager
def written_on_failure(name, settings):
    """Writes the faults to ``FOLDER/name.json`` if an assertion in the block fails, and adds the command to its message.

    Hypothesis runs the smallest example last, so the file then holds this one.
    """
    try:
        yield
    except AssertionError as error:
        FOLDER.mkdir(exist_ok=True)
        file = FOLDER / f"{name}.json"
        settings["faults"].schedule(rng.root(SEED), _MOST_DISPATCHES).write(file)
        devices = settings["devices"]
        missing = [
            f"{field}={getattr(devices, field)}" for field, plain in _WITHOUT_OPTION.items() if getattr(devices, field) != plain
        ]
        note = f"The faults are in {file}. To repeat the simulation: {command(settings, file)}"
        error.add_note(note + (f" (which has no option for {', '.join(missing)})" if missing else ""))
        raise


def command(settings, file):
    """Returns the command that repeats a simulation with the faults in a file."""
    devices, policy = settings["devices"], settings["policy"]
    options = {
        "dataset": f"{__file__}:population",
        "algorithm": f"{__file__}:Messages",
        "bytes-up": settings["bytes_up"],
        "batch-size": 1,
        "clients": COHORT,
        "seed": SEED,
        "rounds": ROUNDS,
        "synchronization": _text(settings["synchronization"], systems.SYNCHRONIZATIONS),
        "step-seconds": _text(devices.seconds_per_step, systems.LAWS),
        "download-rate": _text(devices.download_rate, systems.LAWS),
        "upload-rate": _text(devices.upload_rate, systems.LAWS),
        "retries": policy.retries,
        "late-updates": policy.late,
        "faults": file,
    }
    options |= {} if policy.timeout is None else {"response-timeout": policy.timeout}
    return shlex.join(["fedsim", "run", *(text for name, value in options.items() for text in (f"--{name}", str(value)))])


def _text(value, known):
    if isinstance(value, systems.Constant):
        return str(value.value)
    (name,) = (name for name, cls in known.items() if cls is type(value))
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    simple = [f"{field}={x!r}" for field, x in fields.items() if x is None or isinstance(x, float | int | str)]
    return f"{name}({', '.join(simple)})"
