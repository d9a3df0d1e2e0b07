"""Decentralized learning: topologies, mixing weights, and algorithms without a server."""

from fedsim.algorithm import Algorithm
from fedsim.decentralized import costs as costs
from fedsim.decentralized._adpsgd import ADPSGD as ADPSGD
from fedsim.decentralized._adpsgd import FinishingNodes as FinishingNodes
from fedsim.decentralized._algorithm import DecentralizedAlgorithm as DecentralizedAlgorithm
from fedsim.decentralized._algorithm import NodesState as NodesState
from fedsim.decentralized._algorithm import consensus_distance as consensus_distance
from fedsim.decentralized._base_graph import base_graph as base_graph
from fedsim.decentralized._choco import ChocoSGD as ChocoSGD
from fedsim.decentralized._d2 import D2 as D2
from fedsim.decentralized._diloco import DecentralizedDiLoCo as DecentralizedDiLoCo
from fedsim.decentralized._dpsgd import DPSGD as DPSGD
from fedsim.decentralized._dpsgd import DFedAvg as DFedAvg
from fedsim.decentralized._gossip import gossip as gossip
from fedsim.decentralized._gradient_tracking import GradientTracking as GradientTracking
from fedsim.decentralized._local_noise import LocalNoise as LocalNoise
from fedsim.decentralized._mixer import Neighbours as Neighbours
from fedsim.decentralized._mixing import WEIGHTS as WEIGHTS
from fedsim.decentralized._mixing import column_stochastic as column_stochastic
from fedsim.decentralized._mixing import consensus_error as consensus_error
from fedsim.decentralized._mixing import edge_weights as edge_weights
from fedsim.decentralized._mixing import is_doubly_stochastic as is_doubly_stochastic
from fedsim.decentralized._mixing import lazy as lazy
from fedsim.decentralized._mixing import metropolis as metropolis
from fedsim.decentralized._mixing import spectral_gap as spectral_gap
from fedsim.decentralized._mixing import uniform as uniform
from fedsim.decentralized._push import StochasticGradientPush as StochasticGradientPush
from fedsim.decentralized._quasi_global import QuasiGlobalMomentum as QuasiGlobalMomentum
from fedsim.decentralized._relay import RelaySGD as RelaySGD
from fedsim.decentralized._robust_mixing import ROBUST_MIXING as ROBUST_MIXING
from fedsim.decentralized._robust_mixing import ClippedMixing as ClippedMixing
from fedsim.decentralized._robust_mixing import RobustMixing as RobustMixing
from fedsim.decentralized._robust_mixing import TrimmedMixing as TrimmedMixing
from fedsim.decentralized._topologies import TOPOLOGIES as TOPOLOGIES
from fedsim.decentralized._topologies import binary_tree as binary_tree
from fedsim.decentralized._topologies import complete as complete
from fedsim.decentralized._topologies import edge_list as edge_list
from fedsim.decentralized._topologies import equi_dynamic as equi_dynamic
from fedsim.decentralized._topologies import equi_static as equi_static
from fedsim.decentralized._topologies import erdos_renyi as erdos_renyi
from fedsim.decentralized._topologies import exponential as exponential
from fedsim.decentralized._topologies import hypercube as hypercube
from fedsim.decentralized._topologies import line as line
from fedsim.decentralized._topologies import one_peer_exponential as one_peer_exponential
from fedsim.decentralized._topologies import random_regular as random_regular
from fedsim.decentralized._topologies import ring as ring
from fedsim.decentralized._topologies import scale_free as scale_free
from fedsim.decentralized._topologies import small_world as small_world
from fedsim.decentralized._topologies import star as star
from fedsim.decentralized._topologies import torus as torus
from fedsim.decentralized._topology import Topology as Topology

# Named as on the command line, ``fedsim run --algorithm dpsgd --topology ring``.
ALGORITHMS: dict[str, type[Algorithm]] = {
    cls.__name__.lower(): cls
    for cls in (
        DPSGD,
        DFedAvg,
        GradientTracking,
        D2,
        StochasticGradientPush,
        QuasiGlobalMomentum,
        DecentralizedDiLoCo,
        ChocoSGD,
        RelaySGD,
        ADPSGD,
    )
}
