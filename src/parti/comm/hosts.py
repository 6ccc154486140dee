"""What every transport between hosts has to know: the ranks of its lanes, and its own address."""

from __future__ import annotations

import socket
from collections.abc import Sequence

Lanes = tuple[tuple[int, ...], ...]


def lay_lanes(groups: Sequence[Sequence[int]]) -> Lanes:
    """The ranks along each lane, one for each host; `groups[h]` are the ranks of host h.

    There are as many lanes as the largest host has ranks. A smaller host's ranks stand in several.
    """
    num_lanes = max(len(group) for group in groups)
    return tuple(
        tuple(group[lane * len(group) // num_lanes] for group in groups)
        for lane in range(num_lanes)
    )


def own_address() -> str:
    """The address other hosts reach this one at: that of the interface with the default route, or
    the first that is not the loopback."""
    import psutil

    found = [
        (name, each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]
    up = psutil.net_if_stats()
    usable = [address for name, address in found if name in up and up[name].isup]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only asks which interface the way out starts at.
            probe.connect(("192.0.2.1", 9))
            address = str(probe.getsockname()[0])
            if address in usable:
                return address
        except OSError:
            pass
    return usable[0] if usable else "127.0.0.1"
