"""The message of an error about a file of a run: how to continue the run."""

from __future__ import annotations

from fedsim.durable_files import WriteError, is_full


def explained(error: OSError, saved: int, command: str) -> OSError:
    """An error with a message that names the file, the last saved round, and how to continue.

    Args:
      error: from `writing`, or with a message that names the file.
      saved: the round of the newest checkpoint; 0 if there is none.
      command: what continues the run.

    >>> import errno
    >>> explained(WriteError(errno.ENOSPC, "No space left on device", "r/metrics.jsonl"), 40, "fedsim resume r")
    OSError('Cannot write r/metrics.jsonl: No space left on device. Free disk space, then continue after round 40 with: \
fedsim resume r')
    """
    reason = f"Cannot write {error.filename}: {error.strerror}." if isinstance(error, WriteError) else str(error.strerror)
    remedy = "Free disk space" if is_full(error) else "Make the file writable"
    return OSError(f"{reason} {remedy}, then continue {f'after round {saved}' if saved else 'from the start'} with: {command}")
