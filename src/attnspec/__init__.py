"""Multi-head attention, written down once: typed, shape-checked steps on NumPy and PyTorch."""

from importlib.metadata import version as _version

from .bookkeeping.ledger import ledger as ledger
from .errors import AttnspecError as AttnspecError
from .errors import BackendError as BackendError
from .errors import ConfigError as ConfigError
from .errors import DtypeError as DtypeError
from .errors import ShapeError as ShapeError
from .spec.attend import blend as blend
from .spec.attend import mask as mask
from .spec.attend import scale as scale
from .spec.attend import score as score
from .spec.attend import softmax as softmax
from .spec.fan_in import concatenate as concatenate
from .spec.fan_in import mix as mix
from .spec.fan_out import project_keys as project_keys
from .spec.fan_out import project_queries as project_queries
from .spec.fan_out import project_values as project_values
from .spec.fan_out import share_keys as share_keys
from .spec.fan_out import share_values as share_values
from .spec.masks import keep_both as keep_both
from .spec.masks import keep_causal as keep_causal
from .spec.multi_head import attend as attend
from .spec.multi_head import multi_head_attention as multi_head_attention
from .spec.parameters import Heads as Heads
from .spec.parameters import Parameters as Parameters
from .step import substitute as substitute
from .step import trace as trace

__version__ = _version("attnspec")
