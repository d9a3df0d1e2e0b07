"""Runs one contender in its own environment: ``python -m benchmarks.contender NAME TASK_JSON``.

Commands arrive as JSON lines on stdin and each is answered by one on stdout, timed here, so that every contender is
timed by the same lines of code. Between commands the process waits on a read and takes no processor time, so that all
contenders can stay compiled and take turns.

A contender is a class ``Contender(task)`` in ``benchmarks/peers/NAME.py`` with some of the methods below. Its ``run``
returns only when the last result is there. A module that has to own the main thread defines ``host(task, serve)``.

    run(rounds) -> int            whole rounds; returns the number of client steps
    save(path)                    the parameters, as the list of leaves of `workload.initial_leaves`
    evaluate() -> dict            accuracy over the evaluation population, computed per client
    reset(seed)                   back to fresh parameters of another seed, keeping what is compiled

Contenders that hold many algorithms at once (``..._catalogue``) are told which: ``run(name, rounds)``, ``save(name, path)``.
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
    """Answers commands until stdin ends."""

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
    # Libraries print what they like: their lines go to stderr, and stdout is left to the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(f"benchmarks.peers.{name}")
    if hasattr(module, "host"):
        module.host(task, lambda contender: serve(contender, replies))
    else:
        serve(module.Contender(task), replies)


if __name__ == "__main__":
    main()
