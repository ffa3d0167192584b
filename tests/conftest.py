"""Settings that all tests share."""

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("arrays", "reference")

settings.register_profile(
    "attnspec",
    max_examples=50,
    deadline=None,  # the first sight of a shape is judged, later ones are waved through: times differ a lot
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("attnspec")
