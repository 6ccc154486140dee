"""Reading environment variables: typed values, and one form for every complaint about them.

A complaint names the variable, its value, what was expected, and the remedy. A variable that is
set to nothing, or to blanks, counts as not set: manifests and shell scripts leave such behind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from parti.errors import ConfigError

# int() would take '+1', '1_000' and digits of other scripts too; no launcher writes those.
_INTEGER = re.compile(r"[0-9]{1,9}")
_HOST = re.compile(r"[A-Za-z0-9_.:%\-]+")


def text_of(environ: Mapping[str, str], *names: str) -> str | None:
    """The value of the first of `names` that is set."""
    for name in names:
        value = environ.get(name, "").strip()
        if value:
            return value
    return None


def found(environ: Mapping[str, str], *names: str) -> tuple[str, ...]:
    """Those of `names` that are set."""
    return tuple(name for name in names if environ.get(name, "").strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Variables:
    """The variables of one environment, read with its own words for what goes wrong."""

    environ: Mapping[str, str]
    sign: str
    """The variable by which this environment was recognised."""
    remedy: str
    """What helps with anything that is wrong here: one sentence or two."""

    def text(self, *names: str) -> str | None:
        """The value of the first of `names` that is set: later names are older spellings."""
        return text_of(self.environ, *names)

    def need(self, *names: str) -> str:
        """As `text`, and an error where none is set."""
        value = self.text(*names)
        if value is None:
            raise self.missing(names[0])
        return value

    def integer(self, *names: str, minimum: int = 0) -> int | None:
        """The integer in the first of `names` that is set."""
        for name in found(self.environ, *names):
            value = self.environ[name].strip()
            if not _INTEGER.fullmatch(value) or int(value) < minimum:
                raise self.wrong(name, f"an integer of at least {minimum}")
            return int(value)
        return None

    def need_integer(self, *names: str, minimum: int = 0) -> int:
        """As `integer`, and an error where none is set."""
        value = self.integer(*names, minimum=minimum)
        if value is None:
            raise self.missing(names[0])
        return value

    def port(self, name: str) -> int | None:
        """The TCP port in `name`."""
        value = self.text(name)
        if value is None:
            return None
        if not _INTEGER.fullmatch(value) or not 1 <= int(value) <= 65535:
            raise self.wrong(name, "a TCP port from 1 to 65535")
        return int(value)

    def host(self, name: str) -> str | None:
        """The host name or IP address in `name`."""
        value = self.text(name)
        if value is None:
            return None
        # One colon is host:port; an IPv6 address has two or more.
        if not _HOST.fullmatch(value) or value.count(":") == 1:
            raise self.wrong(name, "a host name or an IP address, without a port")
        return value

    def check_below(self, name: str, value: int, limit_name: str, limit: int) -> None:
        """An index must be less than the number of things it counts."""
        if value >= limit:
            raise self.wrong(name, f"less than {limit_name}={limit}")

    def wrong(self, name: str, expected: str) -> ConfigError:
        """The error for a variable whose value cannot be."""
        value = self.environ.get(name, "")
        shown = value if len(value) <= 200 else f"{value[:200]}…"
        return ConfigError(f"{name}={shown!r}: expected {expected}. {self.remedy}")

    def missing(self, name: str) -> ConfigError:
        """The error for a variable that should stand beside the one that was found."""
        return ConfigError(
            f"{name} is not set, although {self.sign} is: expected both. {self.remedy}"
        )
