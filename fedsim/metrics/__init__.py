"""Metrics: statistics of examples that are summed over clients and devices.

A metric is a function ``(examples, outputs) -> statistic``. ``examples`` is a batch, ``outputs`` are the model's outputs for
it, and the statistic has one entry per example. The metrics of this module without options are functions, the others are frozen
dataclasses that are called like functions. A metric of your own may return

- an array ``[n]`` with one number per example, whose mean is reported;
- a `Mean`, for weighted means such as means over tokens;
- a `Sum`, whose total is reported;
- any other pytree with a method ``result()`` and an attribute ``weight``, as `Statistic` describes.

`fedsim.evaluate` adds up the entries of each client, and adds the clients' sums for the overall value. So the overall F1 score,
say, is that of all examples together and not a mean over clients. Integer and boolean entries are counted exactly: in ``int32``
on the device (so at most 2**31 - 1 per client and call) and in ``int64`` on the host. Floats are added in ``float32`` on the
device, with what rounding loses in a second ``float32``, and over clients in ``float64`` on the host; so the error does not
grow with the number of examples. Without examples, a mean is NaN.

A metric says whether higher or lower values are better: `accuracy` does, and so does ``per_example(values, better="lower")``.
So does a metric that is the model's loss, whatever its name.
Of a metric that says nothing, no worst clients and no best checkpoint are determined, see `better_of`.

To give a model other metrics, replace its dict of metrics:

>>> import dataclasses
>>> import fedsim
>>> model = fedsim.models.digits_dense()
>>> extended = dataclasses.replace(model, metrics={**model.metrics, "macro_f1": fedsim.metrics.F1()})
>>> list(extended.metrics)
['loss', 'accuracy', 'macro_f1']
"""

from fedsim.metrics._auc import AUC as AUC
from fedsim.metrics._auc import ScoreHistogram as ScoreHistogram
from fedsim.metrics._confusion import F1 as F1
from fedsim.metrics._confusion import ClassCounts as ClassCounts
from fedsim.metrics._confusion import ConfusionMatrix as ConfusionMatrix
from fedsim.metrics._confusion import Precision as Precision
from fedsim.metrics._confusion import Recall as Recall
from fedsim.metrics._domains import PerDomain as PerDomain
from fedsim.metrics._examples import RecallAtK as RecallAtK
from fedsim.metrics._examples import TopKAccuracy as TopKAccuracy
from fedsim.metrics._examples import accuracy as accuracy
from fedsim.metrics._examples import cross_entropy as cross_entropy
from fedsim.metrics._examples import squared_error as squared_error
from fedsim.metrics._statistics import Better as Better
from fedsim.metrics._statistics import Examples as Examples
from fedsim.metrics._statistics import Mean as Mean
from fedsim.metrics._statistics import MeanLoss as MeanLoss
from fedsim.metrics._statistics import Metric as Metric
from fedsim.metrics._statistics import Score as Score
from fedsim.metrics._statistics import Sparse as Sparse
from fedsim.metrics._statistics import Statistic as Statistic
from fedsim.metrics._statistics import Sum as Sum
from fedsim.metrics._statistics import better_of as better_of
from fedsim.metrics._statistics import divide as divide
from fedsim.metrics._statistics import is_sparse as is_sparse
from fedsim.metrics._statistics import masked_mean as masked_mean
from fedsim.metrics._statistics import per_example as per_example
from fedsim.metrics._tokens import OOVRate as OOVRate
from fedsim.metrics._tokens import Perplexity as Perplexity
from fedsim.metrics._tokens import SequenceCount as SequenceCount
from fedsim.metrics._tokens import SequenceCrossEntropy as SequenceCrossEntropy
from fedsim.metrics._tokens import SequenceLength as SequenceLength
from fedsim.metrics._tokens import TokenAccuracy as TokenAccuracy
from fedsim.metrics._tokens import TokenCount as TokenCount
from fedsim.metrics._tokens import TokenCrossEntropy as TokenCrossEntropy
from fedsim.metrics._tokens import TokenTopKAccuracy as TokenTopKAccuracy
from fedsim.metrics._tokens import TruncationRate as TruncationRate
from fedsim.metrics._tokens import token_losses as token_losses
