"""Signals to the supervisor, as items it reads when it is ready for them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_HANDLED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
    signal.SIGTSTP,
    signal.SIGWINCH,
)


class SignalInbox:
    """Collects signal numbers; `fileno()` becomes readable when one arrives."""

    def __init__(self) -> None:
        self._arrived: list[int] = []
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self.write_end, False)

    def fileno(self) -> int:
        return self._read_end

    def receive(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)

    def take(self) -> list[int]:
        """What has arrived since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, 4096)
        taken, self._arrived = self._arrived, []
        return taken

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)


@contextlib.contextmanager
def signal_inbox(*, is_wanted: bool) -> Iterator[SignalInbox]:
    """Divert the signals of this process to an inbox, and give them back afterwards.

    Where they are not wanted, or cannot be had (Python gives signals to the main thread only), the
    inbox stays empty and a Ctrl-C is a KeyboardInterrupt as ever. A signal that this process was
    started to ignore (nohup, a background job) is still ignored.
    """
    inbox = SignalInbox()
    if not is_wanted or threading.current_thread() is not threading.main_thread():
        try:
            yield inbox
        finally:
            inbox.close()
        return
    before = {}
    for number in _HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, inbox.receive)
    wakeup_before = signal.set_wakeup_fd(inbox.write_end, warn_on_full_buffer=False)
    try:
        yield inbox
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        inbox.close()
