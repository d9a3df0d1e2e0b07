"""Federated algorithms, one per file."""

from fedsim.algorithm import Algorithm
from fedsim.algorithms._adaptive_fedprox import AdaptiveFedProx as AdaptiveFedProx
from fedsim.algorithms._agnostic import AgnosticFedAvg as AgnosticFedAvg
from fedsim.algorithms._apfl import APFL as APFL
from fedsim.algorithms._clusters import Clusters as Clusters
from fedsim.algorithms._diloco import DiLoCo as DiLoCo
from fedsim.algorithms._diloco import Worker as Worker
from fedsim.algorithms._ditto import Ditto as Ditto
from fedsim.algorithms._dssgd import DSSGD as DSSGD
from fedsim.algorithms._fedala import FedALA as FedALA
from fedsim.algorithms._fedavg import FedAvg as FedAvg
from fedsim.algorithms._fedavgm import FedAvgM as FedAvgM
from fedsim.algorithms._fedbabu import FedBABU as FedBABU
from fedsim.algorithms._fedbn import FedBN as FedBN
from fedsim.algorithms._fedcm import FedCM as FedCM
from fedsim.algorithms._feddc import FedDC as FedDC
from fedsim.algorithms._feddf import FedDF as FedDF
from fedsim.algorithms._feddistill import FedDistill as FedDistill
from fedsim.algorithms._feddyn import FedDyn as FedDyn
from fedsim.algorithms._fedem import FedEM as FedEM
from fedsim.algorithms._fedexp import FedExP as FedExP
from fedsim.algorithms._fedmatch import FedMatch as FedMatch
from fedsim.algorithms._fedmgda import FedMGDA as FedMGDA
from fedsim.algorithms._fednova import FedNova as FedNova
from fedsim.algorithms._fedopt import FedAdagrad as FedAdagrad
from fedsim.algorithms._fedopt import FedAdam as FedAdam
from fedsim.algorithms._fedopt import FedYogi as FedYogi
from fedsim.algorithms._fedper import FedPer as FedPer
from fedsim.algorithms._fedproto import FedProto as FedProto
from fedsim.algorithms._fedprox import FedProx as FedProx
from fedsim.algorithms._fedrep import FedRep as FedRep
from fedsim.algorithms._fedsam import FedSAM as FedSAM
from fedsim.algorithms._fedsgd import FedSGD as FedSGD
from fedsim.algorithms._fixmatch import FixMatch as FixMatch
from fedsim.algorithms._gaussian_mixture import GaussianMixture as GaussianMixture
from fedsim.algorithms._heavy_hitters import HeavyHitters as HeavyHitters
from fedsim.algorithms._heterofl import HeteroFL as HeteroFL
from fedsim.algorithms._histogram import Histogram as Histogram
from fedsim.algorithms._hyp_cluster import IFCA as IFCA
from fedsim.algorithms._hyp_cluster import HypCluster as HypCluster
from fedsim.algorithms._kmeans import KMeans as KMeans
from fedsim.algorithms._lgfedavg import LGFedAvg as LGFedAvg
from fedsim.algorithms._local_training import Local as Local
from fedsim.algorithms._local_training import LocalTraining as LocalTraining
from fedsim.algorithms._local_training import check_client_optimizer as check_client_optimizer
from fedsim.algorithms._local_training import optimizer_of_round as optimizer_of_round
from fedsim.algorithms._mime import Mime as Mime
from fedsim.algorithms._mime import MimeLite as MimeLite
from fedsim.algorithms._moon import MOON as MOON
from fedsim.algorithms._pca import PCA as PCA
from fedsim.algorithms._perfedavg import PerFedAvg as PerFedAvg
from fedsim.algorithms._pfedme import PFedMe as PFedMe
from fedsim.algorithms._private_examples import with_private_examples as with_private_examples
from fedsim.algorithms._qffl import QFedAvg as QFedAvg
from fedsim.algorithms._qffl import QFedSGD as QFedSGD
from fedsim.algorithms._quantiles import Quantiles as Quantiles
from fedsim.algorithms._reptile import Reptile as Reptile
from fedsim.algorithms._scaffnew import Scaffnew as Scaffnew
from fedsim.algorithms._scaffold import SCAFFOLD as SCAFFOLD
from fedsim.algorithms._server_step import ServerState as ServerState
from fedsim.algorithms._server_step import Shared as Shared
from fedsim.algorithms._splitfed import SplitFed as SplitFed
from fedsim.algorithms._statistics import Statistics as Statistics
from fedsim.algorithms._streaming_diloco import StreamingDiLoCo as StreamingDiLoCo
from fedsim.names import look_up

FAMILIES: dict[str, tuple[type[Algorithm], ...]] = {
    "Server optimization": (FedSGD, FedAvg, FedAvgM, FedAdam, FedYogi, FedAdagrad, FedNova, FedExP),
    "Few rounds of many local steps": (DiLoCo, StreamingDiLoCo),
    "Drift correction": (
        *(FedProx, AdaptiveFedProx, SCAFFOLD, Scaffnew, Mime, MimeLite),
        *(FedDyn, FedDC, FedCM, FedSAM, MOON),
    ),
    "Fairness": (QFedAvg, QFedSGD, AgnosticFedAvg, FedMGDA),
    "Personalization": (
        *(APFL, Ditto, FedPer, FedRep, LGFedAvg, FedBABU, FedBN, FedALA, FedProto, FedDistill),
        *(HypCluster, IFCA, FedEM, PerFedAvg, PFedMe, Reptile),
    ),
    "Few labels": (FixMatch, FedMatch),
    "Distillation at the server": (FedDF,),
    "Selective sharing": (DSSGD,),
    "Clients of different capacity": (HeteroFL,),
    "Networks divided between device and server": (SplitFed,),
    "Beyond gradients": (KMeans, GaussianMixture, PCA, Histogram, Quantiles, HeavyHitters),
}
ALGORITHMS: dict[str, type[Algorithm]] = {cls.__name__.lower(): cls for family in FAMILIES.values() for cls in family}


def get(name: str) -> type[Algorithm]:
    """Returns the algorithm class with this name, in any letter case.

    Raises:
      ValueError: there is no algorithm with this name. The message lists similar names.

    >>> get("FedProx").__name__
    'FedProx'
    >>> get("fedporx")
    Traceback (most recent call last):
    ...
    ValueError: There is no algorithm 'fedporx'. Did you mean 'fedprox' or 'fedper'?
    """
    return look_up("algorithm", name.lower(), ALGORITHMS)
