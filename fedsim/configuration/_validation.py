"""Validation data, which are set apart from the training data of a run."""

from __future__ import annotations

import dataclasses

from fedsim import checks, rng
from fedsim.datasets import FederatedSplits
from fedsim.names import parse_call
from fedsim.partitioners import held_out_clients, split_within_clients


def validation_fraction(text: str) -> tuple[float, bool]:
    """Returns the fraction that is set apart, and whether it is one of the clients instead of each client's examples.

    Raises:
      ValueError: the text has another form, or the fraction is not between 0 and 1.

    >>> validation_fraction("0.1"), validation_fraction("clients(fraction=0.2)")
    ((0.1, False), (0.2, True))
    """
    form = "a fraction of each client's examples, such as '0.1', or of the clients, 'clients(fraction=0.1)'"
    try:
        value, of_clients = float(text), False
    except ValueError:
        name, options = parse_call(text)
        if name != "clients" or list(options) != ["fraction"]:
            raise ValueError(f"Expected validation to be {form}, got validation={text!r}.") from None
        value, of_clients = options["fraction"], True
    checks.number(above=0, below=1, validation=value, remedy=f"give {form}")
    return value, of_clients


def with_validation(splits: FederatedSplits, validation: str | None, seed: int) -> FederatedSplits:
    """Returns the splits of a dataset with the validation data of a configuration.

    Args:
      splits: those that the dataset has.
      validation: see `RunConfig`; None keeps the dataset's own validation data, if it has some.
      seed: of the draw.

    Raises:
      ValueError: the dataset has validation data of its own, or none are left with this fraction.

    >>> import fedsim
    >>> splits = with_validation(fedsim.datasets.load("digits", clients=10), "clients(fraction=0.2)", seed=0)
    >>> splits.train.num_clients, splits.validation.num_clients
    (8, 2)
    """
    if validation is None:
        return splits
    if splits.validation is not None:
        raise ValueError(
            f"The dataset has validation data of its own, {splits.validation.num_examples:,} examples, got "
            f"validation={validation!r}: leave it out."
        )
    fraction, of_clients = validation_fraction(validation)
    data = splits.train
    # The test data may have been set apart with this seed. Another key makes the draws independent.
    key = rng.stream(rng.root(seed), "validation")
    if of_clients:
        count = round(fraction * data.num_clients)
        if not 1 <= count < data.num_clients:
            raise ValueError(
                f"validation={validation!r} sets {count} of {data.num_clients} clients apart: give a fraction that leaves at "
                "least one client for validation and one for training."
            )
        train, apart = held_out_clients(data, clients=count, seed=key)
    else:
        # Both parts have the shares of labels of the client, if there is one label per example.
        labels = "y" if "y" in data.columns and data.columns["y"].ndim == 1 and data.columns["y"].dtype.kind in "iub" else None
        parts = split_within_clients(data, {"train": 1 - fraction, "validation": fraction}, seed=key, labels=labels)
        train, apart = parts["train"], parts["validation"]
        if not apart.num_examples:
            raise ValueError(
                f"validation={validation!r} sets no example apart, because clients have "
                f"{data.num_examples / data.num_clients:.1f} on average: give a larger fraction, or set clients apart, "
                "'clients(fraction=0.1)'."
            )
    return dataclasses.replace(splits, train=train, validation=apart)
