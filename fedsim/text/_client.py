"""Error messages that name the client of an unreadable text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fedsim.data import FormatError


@contextlib.contextmanager
def errors_naming(client_id: str, feature: str | None = None) -> Iterator[None]:
    """Adds the client, and the feature if it is given, to the message of a `FormatError` in the ``with`` block.

    >>> with errors_naming("ann", "tokens"):
    ...     raise FormatError("not text")
    Traceback (most recent call last):
    ...
    fedsim.data._errors.FormatError: Client 'ann', feature 'tokens': not text
    """
    try:
        yield
    except FormatError as error:
        where = f"Client {client_id!r}" + (f", feature {feature!r}" if feature else "")
        raise FormatError(f"{where}: {error}") from None
