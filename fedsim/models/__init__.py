"""Ready models, and the layers that make them fast inside compiled loops."""

from fedsim.models._augmentation import center_crop as center_crop
from fedsim.models._augmentation import random_crop_and_flip as random_crop_and_flip
from fedsim.models._augmentation import standardize as standardize
from fedsim.models._autoencoder import emnist_autoencoder as emnist_autoencoder
from fedsim.models._cifar import cifar10_cnn as cifar10_cnn
from fedsim.models._cifar import cifar100_logistic as cifar100_logistic
from fedsim.models._cifar import cifar100_resnet18 as cifar100_resnet18
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
from fedsim.models._generated import synthetic_logistic as synthetic_logistic
from fedsim.models._generated import toy_regression as toy_regression
from fedsim.models._group_norm import GroupNorm as GroupNorm
from fedsim.models._mnist import mnist_2nn as mnist_2nn
from fedsim.models._mnist import mnist_cnn as mnist_cnn
from fedsim.models._pooling import max_pool as max_pool
from fedsim.models._registry import MODELS as MODELS
from fedsim.models._registry import get as get
