"""What goes wrong with files."""


class FormatError(ValueError):
    """A file is not what it should be: truncated, damaged, of another format, or holding no population.

    The message names the file, and the client and the feature where they are known, and says what to do about it. Readers
    raise it for all that is wrong with a file's content; a missing or unreadable file stays the `OSError` that it is.
    """
