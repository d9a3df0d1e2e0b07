"""Runs one contender in its own environment: ``python -m benchmarks.contender NAME TASK_JSON``.

Commands are JSON lines on stdin. Each is answered by a line on stdout. Commands are timed here, so that the same code times
every contender. Between commands the process waits for input and uses no processor time, so all contenders can stay compiled
and take turns.

A contender is a class ``Contender(task)`` in ``benchmarks/peers/NAME.py`` with some of the methods below. Its ``run``
returns only when the last result is available. A module that needs the main thread defines ``host(task, serve)``.

    run(rounds) -> int            runs whole rounds; returns the number of client steps
    save(path)                    saves the parameters as the list of leaves of `workload.initial_leaves`
    evaluate() -> dict            returns the accuracy over the evaluation population, computed per client
    reset(seed)                   sets the parameters to initial ones of another seed; compiled code is kept

Contenders with many algorithms (``..._catalogue``) take the algorithm's name: ``run(name, rounds)``, ``save(name, path)``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

from benchmarks import workload


def serve(contender: Any, replies: IO[str]) -> None:
    """Executes commands until stdin ends."""

    def reply(**message: Any) -> None:
        print(json.dumps(message), file=replies, flush=True)

    reply(digest=contender.data.digest(), versions=versions(contender.packages), **getattr(contender, "about", {}))
    for line in sys.stdin:
        command = json.loads(line)
        method: Callable[..., Any] = getattr(contender, command.pop("do"))
        try:
            start, start_cpu = time.perf_counter(), time.process_time()
            result = method(**command)
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
        except Exception as error:
            traceback.print_exc()
            reply(error=f"{type(error).__name__}: {error}")
            continue
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        reply(result=result, seconds=seconds, cpu_seconds=cpu_seconds, peak_mib=peak)


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def main() -> None:
    name, task = sys.argv[1], workload.Task(**json.loads(sys.argv[2]))
    # Whatever libraries print goes to stderr, so that stdout has only the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(f"benchmarks.peers.{name}")
    if hasattr(module, "host"):
        module.host(task, lambda contender: serve(contender, replies))
    else:
        serve(module.Contender(task), replies)


if __name__ == "__main__":
    main()
