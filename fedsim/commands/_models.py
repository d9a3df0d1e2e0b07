"""``fedsim models``: lists the models that need no arguments."""

from __future__ import annotations

from fedsim import models
from fedsim.commands._listing import print_listing
from fedsim.configuration import models_without_arguments


def main(arguments: list[str]) -> int:
    """Runs ``fedsim models`` and returns the exit status."""
    print_listing({name: models.MODELS[name] for name in models_without_arguments()})
    return 0
