"""One line at the bottom of a terminal that is drawn over and over, while others print above it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO, cast

from parti.monitor.text import fit_encoding

_CLEAR = "\r\x1b[K"


class LiveLine:
    """The line, and the two standard streams, which make room for what is printed meanwhile."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._encoding = stream.encoding or "ascii"
        self._is_shown = False
        self.is_mid_line = False
        self._guards: dict[str, _Guard] = {}

    def open(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and not isinstance(stream, _Guard) and stream.isatty():
                self._guards[name] = _Guard(stream, self)
                setattr(sys, name, self._guards[name])

    def show(self, text: str) -> None:
        # Half a line printed by somebody else is theirs; wait until they end it.
        if self.is_mid_line:
            return
        # One write, and the rest of the line is erased last: nothing is ever seen empty.
        self._stream.write(f"\r{fit_encoding(text, self._encoding)}\x1b[K")
        self._stream.flush()
        self._is_shown = True

    def clear(self) -> None:
        if self._is_shown:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._is_shown = False

    def say(self, text: str) -> None:
        """Print above the line."""
        text = fit_encoding(text, self._encoding)
        self._stream.write((_CLEAR if self._is_shown else "") + text)
        self._stream.flush()
        self._is_shown = False

    def close(self) -> None:
        """Give the streams back; a line still shown is left behind as the last word."""
        for name, guard in self._guards.items():
            if getattr(sys, name) is guard:
                setattr(sys, name, guard.stream)
        self._guards.clear()
        if self._is_shown:
            self._stream.write("\n")
            self._stream.flush()
            self._is_shown = False

    def width(self) -> int:
        try:
            return max(os.get_terminal_size(self._stream.fileno()).columns, 20)
        except (OSError, ValueError):
            return 80


class _Guard:
    """A standard stream that takes the live line away before it writes."""

    def __init__(self, stream: TextIO, live_line: LiveLine) -> None:
        self.stream = stream
        self._live_line = live_line

    def write(self, text: str) -> int:
        if text:
            self._live_line.clear()
            self._live_line.is_mid_line = not text.endswith("\n")
        return self.stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for text in lines:
            self.write(text)

    def __getattr__(self, name: str) -> object:
        return cast(object, getattr(self.stream, name))
