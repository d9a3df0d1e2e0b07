"""Starts a contender's process, sends it commands, and ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import environments, workload

ROOT = Path(__file__).parent.parent
SLOW = 10.0  # seconds; a contender whose round takes longer has only one turn


class ContenderError(Exception):
    """A contender could not be installed, started or run. The table reports it and continues without it."""


class Worker:
    """A contender's process. Between commands it stays alive and idle."""

    def __init__(self, name: str, task: workload.Task) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cuda" if task.device == "gpu" else "cpu",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several contenders share one GPU
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        if task.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        try:
            python = environments.python(name, task.device)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ContenderError(f"pip could not install the packages of {name}: see its output above") from error
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the process
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.contender", name, json.dumps(vars(task))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        try:
            self.about = self._reply()
        except ContenderError:
            self.close()
            raise

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Runs one command; returns its result, its seconds and the process's peak memory."""
        assert self.process.stdin
        try:
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        except BrokenPipeError as error:
            raise ContenderError(self._last_line_of_log()) from error
        return self._reply()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process by ending its input."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        reply = json.loads(line) if line else {"error": self._last_line_of_log()}
        if "error" in reply:
            raise ContenderError(reply["error"])
        return reply

    def _last_line_of_log(self) -> str:
        self.log.seek(0)
        return (self.log.read().strip().splitlines() or ["ended without an error message"])[-1]


class Entrant:
    """A contender in a rotation. It starts and compiles on its first turn, and has no further turns after a failure.

    Attributes:
      times: one entry per turn.
      failure: the error that ended its turns, or None.
      restarts: whether it starts and ends with each turn, so that its background processes (Ray's) end; it has two turns.
    """

    def __init__(self, name: str, task: workload.Task, *, restarts: bool = False) -> None:
        self.name, self.task, self.restarts = name, task, restarts
        self.times: list[dict[str, float]] = []
        self.about: dict[str, Any] = {}
        self.failure: str | None = None
        self.worker: Worker | None = None
        self.most_turns = 2 if restarts else 10**9

    def turn(self, seconds: float) -> None:
        """Runs whole rounds for about the given time."""
        if self.failure or len(self.times) >= self.most_turns:
            return
        try:
            worker = self.worker or self._start(seconds)
            reply = worker("run", rounds=self.rounds)
        except ContenderError as failure:
            self.failure = str(failure)
            print(f"  {self.name}: {failure}", file=sys.stderr)
            self.close()
            return
        took, steps = reply["seconds"], reply["result"]
        per_step, per_round = took / steps * 1e6, took / self.rounds * 1e3
        self.times.append(
            {"rounds": self.rounds, "steps": steps, "us_per_step": per_step, "ms_per_round": per_round,
             "peak_mib": reply["peak_mib"]}
        )  # fmt: skip
        if self.restarts:
            self.close()

    def close(self) -> None:
        if self.worker:
            self.worker.close()
            self.worker = None

    def _start(self, seconds: float) -> Worker:
        """Starts the contender, compiles, and determines how many rounds fill the time."""
        self.worker = worker = Worker(self.name, self.task)
        self.about = worker.about
        chunk = self.task.per_dispatch
        took = worker("run", rounds=chunk)["seconds"]
        if took < 3 * SLOW:  # the first run included the compilation
            took = worker("run", rounds=chunk)["seconds"]
        if took / chunk > SLOW:
            self.most_turns = 1
        self.rounds = chunk * max(1, round(seconds / took))
        return worker
