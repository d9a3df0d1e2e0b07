"""What it costs to exchange k values among n workers: closed forms, and programs whose messages are counted after compilation.

An exchange is a value such as ``RingAllReduce(8)``. Its ``cost(k)`` is a closed form, and its ``program()`` is a compiled JAX
program, one worker per device, that computes the mean of the workers' vectors (`Gossip`: the mixed vectors) by point-to-point
messages. `moved` counts the messages of any compiled program in the text of its HLO. That count equals the closed form:

>>> import jax, numpy as np
>>> exchange = RingAllReduce(workers=8)
>>> vectors = np.arange(128, dtype=np.float32).reshape(8, 16)
>>> program = exchange.program()
>>> np.array_equal(program(vectors), np.tile(vectors.mean(axis=0), (8, 1)))
True
>>> moved(program.lower(vectors).compile().as_text()) == exchange.cost(16)
True

The table is in units of one message of k values, with n a power of two, and s servers that are no workers. What a worker, or
the busiest node, sends is not what all send in total.

====================  ==================  ===================  =====================  ==============  ===================
exchange              a worker sends      busiest node: sends  total                  rounds          on the longest path
                                          and receives
====================  ==================  ===================  =====================  ==============  ===================
`AllToAll`            n - 1               2 (n - 1)            n (n - 1)              n - 1           n - 1
`ParameterServer`     1                   2 n / s, a server    2 n                    2 n             2 n / s
`RingAllReduce`       2 (n - 1) / n       4 (n - 1) / n        2 (n - 1)              2 (n - 1)       2 (n - 1) / n
`RecursiveHalving`    2 (n - 1) / n       4 (n - 1) / n        2 (n - 1)              2 log2 n        2 (n - 1) / n
`BinomialTree`        up to log2 n        2 log2 n             2 (n - 1)              2 log2 n        2 log2 n
`BinaryTree`          up to 3             6                    2 (n - 1)              4 log2 n - 2    4 log2 n - 2
`Gossip`              out-degree          in- and out-degree   edges                  largest degree  largest degree
====================  ==================  ===================  =====================  ==============  ===================

The α–β model: a node sends at most one message and receives at most one at a time, and a message of b bytes takes α + β b
seconds, so an exchange takes α times the rounds and β times the bytes on the longest path (`Cost.seconds`). Arithmetic takes no
time.

- R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", International Journal
  of High Performance Computing Applications 19(1), 2005: the model (section 3), binomial trees, the ring, and Rabenseifner's
  recursive halving and doubling (section 4).
- M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014: several servers, each with a part
  of the values.
"""

from fedsim.decentralized.costs._compiled import moved as moved
from fedsim.decentralized.costs._epochs import EpochSeconds as EpochSeconds
from fedsim.decentralized.costs._epochs import epoch_seconds as epoch_seconds
from fedsim.decentralized.costs._exchange import Cost as Cost
from fedsim.decentralized.costs._exchange import Exchange as Exchange
from fedsim.decentralized.costs._exchange import message_bytes as message_bytes
from fedsim.decentralized.costs._gossip import Gossip as Gossip
from fedsim.decentralized.costs._means import AllToAll as AllToAll
from fedsim.decentralized.costs._means import ParameterServer as ParameterServer
from fedsim.decentralized.costs._means import RecursiveHalving as RecursiveHalving
from fedsim.decentralized.costs._means import RingAllReduce as RingAllReduce
from fedsim.decentralized.costs._trees import BinaryTree as BinaryTree
from fedsim.decentralized.costs._trees import BinomialTree as BinomialTree
