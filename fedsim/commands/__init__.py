"""The command line, which calls the public API: ``fedsim run``, ``fedsim resume``, ``fedsim datasets``, ...

Each command is a module with a function ``main(arguments)``. It is imported where it is called, so that ``fedsim --help`` does
not wait for JAX.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

import fedsim
from fedsim.commands._interrupts import LostInterruptsRepeated
from fedsim.names import did_you_mean

_HELP = """\
usage: fedsim COMMAND ...

  run [OPTIONS]      train and evaluate, and write the results to a run folder; `fedsim run --help` lists the options;
                     --client-learning-rate 0.01,0.1 --seeds 3 runs every combination
  deploy [OPTIONS]   train in the same way on nodes, processes that talk over Flower's network and keep their data
  plan [OPTIONS]     print what a round of such a run costs (messages, computation, memory, time), without running one
  privacy FOLDER     print how much a run, or a run with options, reveals of a client: ε of differential privacy
  resume FOLDER      continue a run or a sweep that was stopped; with --rounds N until round N, also if it was finished
  replay FOLDER --round R --client C
                     run one client's round of a run again, alone and in plain Python, for prints and a debugger
  bisect RUN [RUN]   find where two runs that should agree differ first, or the client that made a run diverge
  evaluate FOLDER    evaluate the model of a run, on its test data or on its training data
  runs [FOLDER]      list runs with their settings and last metrics
  compare RUN ...    compare algorithms or settings over seeds: intervals, tests, costs; tables and figures
  report RUN ...     write a page of runs to an HTML file: curves, clients, costs, and what differs
  export FOLDER FILE write the parameters of a run to a file, .safetensors or .npz
  datasets           list the datasets; `fedsim datasets describe NAME` describes one, `... convert IN OUT` converts files
  models             list the models
  algorithms         list the algorithms
  reproduce NAME     repeat a published experiment; without a name, list the experiments

A first example, which takes a minute and needs no network: fedsim run
"""

COMMANDS = (
    "run",
    "deploy",
    "plan",
    "privacy",
    "resume",
    "replay",
    "bisect",
    "evaluate",
    "runs",
    "compare",
    "report",
    "export",
    "datasets",
    "models",
    "algorithms",
    "reproduce",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    The status is 0 after success, 2 for wrong input, 1 for other errors, and 128 plus the number of a signal.

    Args:
      arguments: the command and its options; default: ``sys.argv[1:]``.

    >>> main(["--version"]) == 0  # doctest: +ELLIPSIS
    fedsim ...
    True
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--traceback" in arguments or bool(os.environ.get("FEDSIM_TRACEBACK"))
    arguments = [argument for argument in arguments if argument != "--traceback"]
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    show_warning, warnings.showwarning = warnings.showwarning, _warning_printer()
    try:
        if command in ("--help", "-h", "help"):
            print(_HELP, end="")
            return 0
        if command == "--version":
            print(f"fedsim {fedsim.__version__}")
            return 0
        if command not in COMMANDS:
            raise ValueError(f"There is no command {command!r}.{did_you_mean(command, COMMANDS)} See fedsim --help.")
        with LostInterruptsRepeated():
            return _main_of(command)(rest)
    except KeyboardInterrupt:
        print("fedsim: aborted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fedsim datasets | head`; Python would report the error again when it flushes at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except RuntimeError as error:  # one of JAX is derived from it
        if show_traceback or "ut of memory" not in str(error):
            raise
        print("fedsim: error: Out of memory. Use a smaller --batch-size, --lanes or --clients.", file=sys.stderr)
        return 1
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        if show_traceback:
            traceback.print_exc()
        print(f"fedsim: error: {_where(error)}{error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError | FileNotFoundError) else 1
    finally:
        warnings.showwarning = show_warning


def _main_of(command: str) -> Callable[[list[str]], int]:
    """Imports a command and returns its function."""
    try:
        module = importlib.import_module(f"fedsim.commands._{command}")
    except ModuleNotFoundError as error:
        if error.name not in ("tyro", "docstring_parser"):
            raise
        raise ImportError("The command line needs tyro: pip install 'fedsim-jax[run]'.") from error
    if "jax" in sys.modules:  # Commands that read files alone do not load it.
        _keep_compiled_programs()
    return module.main


def _keep_compiled_programs() -> None:
    """Makes JAX store compiled programs in fedsim's cache folder, unless the user has chosen another folder."""
    import jax

    from fedsim.datasets import cache_folder

    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _warning_printer() -> Callable[..., None]:
    """Prints each warning once, in one line and without the place in the source code."""
    printed: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        text = f"{'' if issubclass(category, UserWarning) else f'{category.__name__}: '}{message}"
        if text not in printed:
            printed.add(text)
            print(f"fedsim: warning: {text}", file=sys.stderr)

    return show


def _where(error: BaseException) -> str:
    """Returns the file and line of an error in a user's own file; empty for other errors."""
    own = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith("fedsim_user_")}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {type(error).__name__}: " if frames else ""
