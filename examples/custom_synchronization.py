"""An own synchronization model: a server step every few seconds, with the updates that have arrived (semi-synchronous)."""

import dataclasses

import optax

import fedsim
from fedsim import systems


@dataclasses.dataclass(frozen=True, kw_only=True)
class Periodic(systems.Synchronization):
    seconds: float
    concurrency: int

    def begin(self, server):
        server.dispatch(self.concurrency)
        server.call_at(self.seconds, "step")

    def received(self, server, update):
        server.dispatch(self.concurrency - server.expected)

    def timer(self, server, name):
        if server.buffer:
            server.aggregate(weights=1 / (1 + server.staleness()))
        server.call_at(server.now + self.seconds, "step")


def main(steps: int = 60) -> None:
    data, model, batches = fedsim.datasets.load("digits"), fedsim.models.digits_logistic(), fedsim.Batches(size=10, epochs=5)
    algorithm = fedsim.algorithms.FedAvg(model=model, client_optimizer=optax.sgd(0.05), batches=batches)
    sampler = fedsim.UniformSampler(data.train, clients=20, seed=0)
    options = dict(devices=systems.Devices(seconds_per_step=systems.LogNormal(sigma=1.0)), test_data=data.test, progress=False)
    for chosen in (systems.Synchronous(), Periodic(seconds=10.0, concurrency=20)):
        result = fedsim.experiment.simulate(algorithm, sampler, rounds=steps, synchronization=chosen, **options)
        print(f"{type(chosen).__name__}: {result.schedule.seconds:.0f} s, accuracy {result.evaluation.overall['accuracy']:.2f}")


if __name__ == "__main__":
    main()
