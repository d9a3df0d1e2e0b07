"""Whose text it was that could not be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fedsim.data import FormatError


@contextlib.contextmanager
def errors_name(client_id: str, feature: str | None = None) -> Iterator[None]:
    """A `FormatError` from inside says the client, and the feature.

    >>> with errors_name("ann", "tokens"):
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
