"""What an annotation looks like, for pages that explain how to read one."""

import attnspec
from attnspec.axes import shapes_of

from .blocks import block


@block
def annotation(name: str, label: str) -> str:
    """The annotation of one array of a function, or of its result (`return`): `[[annotation multi_head_attention x]]`."""
    shape = shapes_of(getattr(attnspec, name))[label][0]
    return f'`{shape.kind}[A, "{shape}"]`'
