"""The bookkeeping: annotations read as data, and what follows from them."""

from ..axes import Axis as Axis
from ..axes import Shape as Shape
from ..axes import evaluate as evaluate
from ..axes import parse as parse
from ..axes import shape_of as shape_of
from ..axes import shapes_of as shapes_of
from .ledger import Ledger as Ledger
from .ledger import Line as Line
from .ledger import ledger as ledger
from .ledger import ledger_of as ledger_of
from .proof import Link as Link
from .proof import Proof as Proof
from .proof import prove as prove
