"""What the environment says about the terminal. Pure; imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping


def wants_colors(environ: Mapping[str, str] | None = None) -> bool:
    """Whether text on a terminal may be coloured (https://no-color.org, and TERM=dumb)."""
    environ = os.environ if environ is None else environ
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"
