"""`build_deployed`: builds a run as its server and its nodes need it, without a virtual clock."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedsim.configuration import Experiment, RunConfig, Settings, build, prepared, synchronization_of
from fedsim.rounds import Staleness
from fedsim.samplers import is_steered

# The options of the virtual clock that have a meaning on a network, where time passes by itself.
OF_SERVER = ("synchronization", "response_timeout", "late_updates")


def has_server_steps(config: RunConfig) -> bool:
    """Returns whether a synchronization model decides when a deployed server aggregates. Otherwise it waits for all nodes.

    >>> has_server_steps(RunConfig(synchronization="buffered(size=2, concurrency=4)")), has_server_steps(RunConfig())
    (True, False)
    """
    return any(name in OF_SERVER for name in config.clock_options)


def build_deployed(config: RunConfig, settings: Settings, *arguments: Any, **options: Any) -> Experiment:
    """Builds what `fedsim.configuration.build` builds, with an algorithm whose server steps can be deployed if there are some.

    Raises:
      ValueError: as `build` does, or the synchronization model does not fit the algorithm or the sampler.

    >>> build_deployed(RunConfig(synchronization="buffered(size=2, concurrency=4)"), Settings()).algorithm.staleness
    Staleness(bound=0, mixing=False)
    """
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(RunConfig) if field.name in OF_SERVER}
    built = build(dataclasses.replace(config, **defaults), settings, *arguments, **options)
    if not has_server_steps(config):
        return built
    model = synchronization_of(config)
    if is_steered(built.sampler):
        raise ValueError(
            f"Expected a sampler that no values steer, for server steps of {type(model).__name__} on a network, got "
            f"{type(built.sampler).__name__}: use another sampler, or leave the options of the synchronization out."
        )
    made = prepared(built.algorithm, built.sampler, model)
    stale = dataclasses.replace(made.algorithm, staleness=Staleness(bound=0, mixing=made.mixing))
    return built._replace(algorithm=stale)
