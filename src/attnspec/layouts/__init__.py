"""How other projects store the parameters, and the way there and back."""

from .convert import read as read
from .convert import write as write
from .table import LAYOUTS as LAYOUTS
from .table import Layout as Layout
