"""Privacy of clients: what rounds with `fedsim.aggregators.GaussianMechanism` reveal, audits of it, and secure aggregation.

`epsilon` and `noise_multiplier` need the package dp-accounting, and Toeplitz matrices of noise jax-privacy:
``pip install 'fedsim-jax[privacy]'``.
"""

from fedsim.privacy._accountant import epsilon as epsilon
from fedsim.privacy._accountant import noise_multiplier as noise_multiplier
from fedsim.privacy._actual import Actual as Actual
from fedsim.privacy._actual import actual as actual
from fedsim.privacy._canaries import Canary as Canary
from fedsim.privacy._canaries import canary_audit as canary_audit
from fedsim.privacy._distributed_noise import distributed_epsilon as distributed_epsilon
from fedsim.privacy._distributed_noise import distributed_noise_multiplier as distributed_noise_multiplier
from fedsim.privacy._factorization import banded_toeplitz as banded_toeplitz
from fedsim.privacy._factorization import buffered_toeplitz as buffered_toeplitz
from fedsim.privacy._factorization import deviation_of_sums as deviation_of_sums
from fedsim.privacy._factorization import max_loss as max_loss
from fedsim.privacy._factorization import noise_matrix as noise_matrix
from fedsim.privacy._factorization import sensitivity as sensitivity
from fedsim.privacy._guarantee import DistributedGuarantee as DistributedGuarantee
from fedsim.privacy._guarantee import Guarantee as Guarantee
from fedsim.privacy._guarantee import calibrated as calibrated
from fedsim.privacy._guarantee import check as check
from fedsim.privacy._guarantee import correlated as correlated
from fedsim.privacy._guarantee import with_likely_minimum as with_likely_minimum
from fedsim.privacy._participation import CyclicPoisson as CyclicPoisson
from fedsim.privacy._participation import Epochs as Epochs
from fedsim.privacy._participation import EveryRound as EveryRound
from fedsim.privacy._participation import FixedSize as FixedSize
from fedsim.privacy._participation import Participation as Participation
from fedsim.privacy._participation import Poisson as Poisson
from fedsim.privacy._participation import Relation as Relation
from fedsim.privacy._participation import participation_of as participation_of
from fedsim.privacy._scores import Roc as Roc
from fedsim.privacy._scores import Scores as Scores
from fedsim.privacy._secure_aggregation import Aggregated as Aggregated
from fedsim.privacy._secure_aggregation import SecureAggregation as SecureAggregation
