"""An own algorithm without a server, EXTRA, and an own topology: clusters whose first nodes form a ring.

W. Shi, Q. Ling, G. Wu, W. Yin, "EXTRA: an exact first-order algorithm for decentralized consensus optimization", SIAM Journal
on Optimization 25, 2015. In a round, x_i becomes sum_j W_ij x_j - g_i + c_i, and c_i becomes c_i + (sum_j W_ij x_j - x_i) / 2.
The sum of all earlier differences to the neighbours, c_i, removes the bias of D-PSGD on nodes with different data.
"""

import jax
import networkx as nx
import optax

import fedsim
from fedsim import tree
from fedsim.decentralized import DPSGD, DecentralizedAlgorithm, Topology


class EXTRA(DecentralizedAlgorithm):
    # c_i is a sum over all rounds, which a lost message, a robust mean or an attacker would change for ever.
    attackable, needs_all_messages, keeps_sums = False, True, True

    def node_memory(self, models):
        return tree.scale(models, 0.0)

    def exchange(self, state, movement, neighbours):
        pull = neighbours.mix(state.models, difference=True)  # sum_j W_ij x_j - x_i
        models = tree.add(tree.subtract(tree.add(state.models, pull), movement), state.memory)
        return state._replace(models=models, memory=tree.add(state.memory, tree.scale(pull, 0.5)))


def clusters(nodes: int, size: int = 5) -> Topology:
    groups = [range(start, min(start + size, nodes)) for start in range(0, nodes, size)]
    graph = nx.compose_all(nx.complete_graph(group) for group in groups)
    nx.add_cycle(graph, [group[0] for group in groups])
    return Topology([graph], f"clusters of {size}")


def main(rounds: int = 300) -> None:
    data = fedsim.datasets.load("digits", clients=20, partition="dirichlet", alpha=0.1)
    options = dict(model=fedsim.models.digits_logistic(), client_optimizer=optax.sgd(0.2), topology=clusters(20))
    for cls in (DPSGD, EXTRA):
        algorithm = cls(**options, batches=fedsim.Batches(size=100, steps=1))
        state = algorithm.init(jax.random.key(0))
        for cohort in fedsim.UniformSampler(data.train, clients=20, seed=0).rounds(rounds):
            state, info = algorithm.apply(state, cohort)
        accuracy = fedsim.evaluate(algorithm.model, state.params, data.test).overall["accuracy"]
        print(f"{cls.__name__}: consensus distance {info['consensus_distance']:.2f}, accuracy of the mean {accuracy:.2f}")


if __name__ == "__main__":
    main()
