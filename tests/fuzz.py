"""Damaged files: whatever byte is wrong, a reader succeeds or raises `FormatError`. Shared by the tests of all formats."""

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

_SECONDS = 20  # for one mutation
_SPARE_BYTES = 4 << 30  # what a reader may allocate beyond what the process has already


def mutations(original: bytes, seed: int, count: int) -> Iterator[bytes]:
    """``count`` damaged copies: cut, bits flipped, bytes overwritten (with values at the borders too), removed, repeated."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        damaged = bytearray(original)
        for _ in range(1 if number % 2 else int(draw.integers(1, 5))):
            # Half of all damage strikes the first few kilobytes, where most formats say how the rest is to be read.
            reach = min(len(damaged), 4096) if draw.random() < 0.5 else len(damaged)
            at = int(draw.integers(reach)) if reach else 0
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
    """Reads ``count`` damaged copies of a file, all clients of each: every one must end in success or `FormatError`.

    In a process of its own, so that a native crash, a hang or a request for petabytes is seen as the failure that it is.

    Args:
      reader: ``path -> ClientStream or FederatedData``; a function of a module, or a `functools.partial` of one.
      original: a whole file's content, which the reader must read.
      suffix: how the files' names are to end.
      count: how many.
      seed: which.
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
    """The child process: prints each mutation's number before it reads it."""
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
        path.unlink()  # A new file, for the one before it may still be mapped.
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
    """Every example of every client; how many bytes they are."""
    return sum(np.asarray(array).nbytes for client in reader(path) for array in client.examples.values())
