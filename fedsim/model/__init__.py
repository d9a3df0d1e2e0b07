"""`Model`: the functions of a neural network that algorithms call, made from a network of one of several libraries."""

from fedsim.model._haiku import check_transformed as check_transformed
from fedsim.model._mixture_model import MixtureModel as MixtureModel
from fedsim.model._model import Model as Model
from fedsim.model._model import default_metrics as default_metrics
from fedsim.model._network import Examples as Examples
from fedsim.model._network import Feature as Feature
from fedsim.model._network import Params as Params
from fedsim.model._parts import PARTS_IN_WORDS as PARTS_IN_WORDS
from fedsim.model._parts import ModelParts as ModelParts
from fedsim.model._parts import current_scope as current_scope
from fedsim.model._parts import keeps_parts as keeps_parts
from fedsim.model._parts import named as named
from fedsim.model._parts import scope_of as scope_of
from fedsim.model._precision import as_output as as_output
from fedsim.model._shardings import WHOLE as WHOLE
from fedsim.model._shardings import Division as Division
from fedsim.model._split_model import SplitModel as SplitModel
