"""Ready models, and the layers that make them fast inside compiled loops."""

from fedsim.models._convolution import Conv2D as Conv2D
from fedsim.models._convolution import conv2d as conv2d
from fedsim.models._dense import dense as dense
from fedsim.models._dense import logistic as logistic
from fedsim.models._digits import digits_dense as digits_dense
from fedsim.models._digits import digits_logistic as digits_logistic
from fedsim.models._dropout import dropout as dropout
from fedsim.models._emnist import emnist_cnn as emnist_cnn
from fedsim.models._emnist import emnist_dense as emnist_dense
from fedsim.models._emnist import emnist_logistic as emnist_logistic
from fedsim.models._pooling import max_pool as max_pool
from fedsim.models._recurrent import LSTM as LSTM
from fedsim.models._registry import MODELS as MODELS
from fedsim.models._registry import get as get
from fedsim.models._shakespeare import shakespeare_lstm as shakespeare_lstm
from fedsim.models._stackoverflow import stackoverflow_logistic as stackoverflow_logistic
from fedsim.models._stackoverflow import stackoverflow_lstm as stackoverflow_lstm
from fedsim.models._stackoverflow import stackoverflow_transformer as stackoverflow_transformer
