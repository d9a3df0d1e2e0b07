"""The error that readers of files raise."""


class FormatError(ValueError):
    """The content of a file is wrong: truncated, damaged, in another format, or without clients.

    The message names the file, the client and the feature if they are known, and a remedy. A file that is missing or cannot be
    read raises an `OSError` instead.
    """
