"""Tests readers with damaged files: a reader must succeed or raise `FormatError`. The tests of all formats use it."""

import faulthandler
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

_SECONDS = 20  # per damaged copy
_SPARE_BYTES = 4 << 30  # that a reader may allocate in addition to what the process has


def mutations(original: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Yields ``count`` copies with truncations, flipped bits, overwritten (also extreme) values, removed or repeated bytes."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        damaged = bytearray(original)
        for _ in range(1 if number % 2 else int(draw.integers(1, 5))):
            # Half of the damage is in the first 4 kB, where most formats describe how to read the rest.
            limit = min(len(damaged), 4096) if draw.random() < 0.5 else len(damaged)
            at = int(draw.integers(limit)) if limit else 0
            length = int(draw.integers(1, 17))
            match int(draw.integers(7)):
                case 0:
                    damaged[at:] = b""
                case 1 if at < len(damaged):
                    damaged[at] ^= 1 << int(draw.integers(8))
                case 2:
                    damaged[at : at + length] = draw.bytes(min(length, len(damaged) - at))
                case 3:
                    value = draw.choice(np.array([0, 1, -1, 2**7, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63)], np.int64))
                    width = int(draw.choice([1, 2, 4, 8]))
                    damaged[at : at + width] = value.tobytes()[: min(width, len(damaged) - at)]
                case 4:
                    damaged[at : at + length] = b""
                case 5:
                    damaged[at:at] = damaged[at : at + length]
                case 6:
                    damaged[at : at + 64 * length] = bytes(min(64 * length, len(damaged) - at))
        yield bytes(damaged)


def assert_only_format_errors(reader: Callable, original: bytes, suffix: str, count: int, seed: int = 0) -> None:
    """Reads all clients of ``count`` damaged copies of a file; each reading must succeed or raise `FormatError`.

    A child process reads the copies, so that a native crash, a hang or an allocation of petabytes fails the test.

    Args:
      reader: function from a path to a `ClientStream` or `FederatedData`; it must be picklable.
      original: content of an undamaged file.
      suffix: suffix of the names of the files.
      count: number of damaged copies.
      seed: seed of the damage.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "original").write_bytes(original)
        child = subprocess.run(
            [sys.executable, "-c", "import fuzz; fuzz.read_damaged()", folder, suffix, str(count), str(seed)],
            input=pickle.dumps(reader),
            capture_output=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
            timeout=_SECONDS + count,
        )
        where = child.stdout.decode().splitlines()[-1:] or ["before the first"]
        assert child.returncode == 0, f"mutation {where[0]} of seed {seed}: {child.stderr.decode()[-3000:] or child.returncode}"


def read_damaged() -> None:
    """Runs in the child process. It prints the number of each damaged copy before it reads the copy."""
    folder, suffix, count, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    reader = pickle.load(sys.stdin.buffer)
    original = (folder / "original").read_bytes()
    path = folder / f"damaged{suffix}"
    path.write_bytes(original)
    read_all(reader, path)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    resource.setrlimit(resource.RLIMIT_AS, (taken + _SPARE_BYTES, resource.RLIM_INFINITY))
    from fedsim.data import FormatError

    for number, damaged in enumerate(mutations(original, seed, count)):
        print(number, flush=True)
        path.unlink()  # Creates a new file, because the previous one may still be mapped.
        path.write_bytes(damaged)
        faulthandler.dump_traceback_later(_SECONDS, exit=True)
        try:
            read_all(reader, path)
        except FormatError as error:
            if path.name not in str(error):
                sys.exit(f"The message does not name the file: {error}")
        except Exception:
            sys.exit(traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()


def read_all(reader: Callable, path: Path) -> int:
    """Reads every example of every client and returns their size in bytes."""
    return sum(np.asarray(array).nbytes for client in reader(path) for array in client.examples.values())
