"""Multi-head attention, written down once: typed, shape-checked steps on NumPy and PyTorch."""

from importlib.metadata import version as _version

from .bookkeeping.ledger import ledger as ledger
from .errors import AttnspecError as AttnspecError
from .errors import BackendError as BackendError
from .errors import ConfigError as ConfigError
from .errors import DtypeError as DtypeError
from .errors import ShapeError as ShapeError
from .spec.attend import Dropout as Dropout
from .spec.attend import bias as bias
from .spec.attend import blend as blend
from .spec.attend import cap as cap
from .spec.attend import draw_survivors as draw_survivors
from .spec.attend import drop as drop
from .spec.attend import extend_bias as extend_bias
from .spec.attend import gate as gate
from .spec.attend import mask as mask
from .spec.attend import scale as scale
from .spec.attend import score as score
from .spec.attend import softmax as softmax
from .spec.cache import Cache as Cache
from .spec.cache import append_to_cache as append_to_cache
from .spec.fan_in import concatenate as concatenate
from .spec.fan_in import mix as mix
from .spec.fan_out import extend_keys as extend_keys
from .spec.fan_out import extend_values as extend_values
from .spec.fan_out import normalise as normalise
from .spec.fan_out import project_keys as project_keys
from .spec.fan_out import project_queries as project_queries
from .spec.fan_out import project_values as project_values
from .spec.fan_out import share_keys as share_keys
from .spec.fan_out import share_values as share_values
from .spec.masks import Mask as Mask
from .spec.masks import keep_both as keep_both
from .spec.masks import keep_causal as keep_causal
from .spec.masks import keep_documents as keep_documents
from .spec.masks import keep_extra as keep_extra
from .spec.masks import keep_lengths as keep_lengths
from .spec.masks import keep_window as keep_window
from .spec.multi_head import attend as attend
from .spec.multi_head import decode as decode
from .spec.multi_head import multi_head_attention as multi_head_attention
from .spec.parameters import Heads as Heads
from .spec.parameters import Parameters as Parameters
from .spec.policy import Policy as Policy
from .spec.policy import Rotation as Rotation
from .spec.positions import Positions as Positions
from .spec.positions import alibi_slopes as alibi_slopes
from .spec.positions import count_positions as count_positions
from .spec.positions import linear_bias as linear_bias
from .spec.positions import relative_bias as relative_bias
from .spec.positions import rotate as rotate
from .step import substitute as substitute
from .step import trace as trace

__version__ = _version("attnspec")
