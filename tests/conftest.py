"""Settings for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline for a single example: machines that run tests are busy. In CI the examples are fixed.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
