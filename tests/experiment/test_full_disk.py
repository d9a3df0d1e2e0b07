"""A full disk: the error names the file and how to continue, and the continued run has the bits of an unbroken one."""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import Iterator

import jax
import pytest

from fedsim.commands import main
from fedsim.configuration import RunConfig
from fedsim.durable_files import WriteError, writing
from fedsim.experiment import Settings, build, read_config, read_metrics, restore, run
from fedsim.experiment._disk import explained
from fedsim.experiment._writers import _record

SMALL = [
    "--model",
    "digits_logistic",
    "--rounds",
    "6",
    "--clients",
    "3",
    "--epochs",
    "1",
    "--evaluate-every",
    "2",
    "--execution",
    "jit",
    "--no-progress",
]


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Lets the system refuse to write files beyond ``size`` bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e6)  # otherwise the cache would store truncated programs
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("file", "size", "tensorboard"),
    [
        ("config.json", 100, True),
        ("tensorboard/events.", 2000, True),
        ("metrics.jsonl", 2000, False),
        ("checkpoints/00000001", 1000, False),
        ("learning_curve.png", 20_000, True),
    ],
)
def test_the_error_names_the_file_and_the_run_can_be_continued(file, size, tensorboard, arguments, unbroken, bits, tmp_path):
    folder = tmp_path / "r"
    every = 1 if file.startswith("checkpoints") else 4
    writers = None if tensorboard else "none"
    with contextlib.ExitStack() as stack:
        # The configuration, which is larger than a checkpoint, is written before.
        callbacks = [lambda *_: stack.enter_context(largest_file(size))] if every == 1 else []
        if not callbacks:
            stack.enter_context(largest_file(size))
        with pytest.raises(OSError, match="Cannot write") as caught:
            run(**arguments, folder=folder, checkpoint_every=every, rounds_per_dispatch=1, callbacks=callbacks, writers=writers)
    message = str(caught.value)
    assert message.startswith(f"Cannot write {folder}/{file}") and "File too large. Free disk space" in message
    assert message.endswith(f"with: the same call with folder='{folder}'")
    result = run(**arguments, folder=folder)
    assert bits(result.state) == unbroken
    assert [line["round"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line] == list(range(1, 13))
    assert (folder / "learning_curve.png").stat().st_size > 20_000


@pytest.mark.slow
def test_the_command_line_prints_one_line_and_resume_continues(tmp_path, capsys):
    folders = [tmp_path / "unbroken", tmp_path / "broken"]
    assert main(["run", *SMALL, "--folder", str(folders[0])]) == 0
    capsys.readouterr()
    with largest_file(4000):
        assert main(["run", *SMALL, "--folder", str(folders[1])]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"fedsim: error: Cannot write {folders[1]}/") and error.count("\n") == 1
    assert error.endswith(f"with: fedsim resume {folders[1]}\n")
    assert main(["resume", str(folders[1])]) == 0
    states = []
    for folder in folders:
        stored = read_config(folder)
        algorithm = build(RunConfig.from_json(stored["config"]), Settings(**stored["settings"])).algorithm
        states.append([leaf.tobytes() for leaf in jax.device_get(jax.tree.leaves(restore(folder, algorithm)[0].params))])
    assert states[0] == states[1]


def test_errors_of_other_libraries_are_translated_only_if_they_report_a_full_disk(tmp_path):
    with pytest.raises(WriteError) as caught, writing(tmp_path / "state"):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing file [OS error 28: ENOSPC No space left on device]")
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "state")
    with pytest.raises(ValueError, match="another error"), writing(tmp_path / "state"):
        raise ValueError("another error")
    text = str(explained(OSError(errno.ENOSPC, "What clients keep cannot be written"), 0, "fedsim resume r"))
    assert text == "What clients keep cannot be written Free disk space, then continue from the start with: fedsim resume r"


def test_the_error_for_an_unwritable_file_names_it(arguments, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r/metrics.tmp").mkdir()
    with pytest.raises(
        OSError, match=r"Cannot write .*/r/metrics.jsonl: Is a directory. Make the file writable, then continue"
    ):
        run(**arguments, folder=tmp_path / "r")


def test_tensorboard_files_have_the_bytes_of_tensorboardx(tmp_path):
    record_writer = pytest.importorskip("tensorboardX.record_writer")
    writer = record_writer.RecordWriter(str(tmp_path / "expected"))
    for size in (0, 1, 300):
        writer.write(bytes(range(256)) * 2 if size == 300 else b"a" * size)
    writer.close()
    ours = b"".join(_record(data) for data in (b"", b"a", bytes(range(256)) * 2))
    assert ours == (tmp_path / "expected").read_bytes()
