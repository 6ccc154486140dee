"""One task under Slurm: writes down its place, and meets the others where it says.

task.py DIRECTORY [--meet]
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from parti.cluster import Level, Place, resolve
from parti.errors import ConfigError

DEADLINE_S = 30.0


def report() -> dict[str, object]:
    """The place in a form for JSON, and the environment it was read from."""
    prefixes = ("SLURM", "PMI", "PMIX", "OMPI", "HYD")
    facts: dict[str, object] = {
        "procid": os.environ.get("SLURM_PROCID", "0"),
        "pid": os.getpid(),
        "hostname": socket.gethostname(),
        "environ": {key: value for key, value in os.environ.items() if key.startswith(prefixes)},
    }
    try:
        place = resolve()
    except ConfigError as error:
        return facts | {"level": None, "error": str(error)}
    names = ("why", "node_rank", "num_nodes", "rank", "world_size", "local_rank", "job")
    facts |= {name: getattr(place, name) for name in (*names, "local_world_size", "rendezvous")}
    facts |= {"origin": place.origin.value, "level": place.level.value}
    if "--meet" in sys.argv:
        facts["met"] = meet(place)
    return facts


def meet(place: Place) -> int:
    """How many gathered at the rendezvous: number 0 listens there, the others call."""
    ranks = place.level is Level.RANK
    number = place.rank if ranks else place.node_rank
    count = place.world_size if ranks else place.num_nodes
    assert place.rendezvous is not None, place
    assert number is not None, place
    assert count is not None, place
    host, port = place.rendezvous.removeprefix("tcp://").rsplit(":", 1)
    if number == 0:
        return host_meeting(int(port), count)
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
                connection.sendall(bytes([number]))
                return connection.recv(1)[0]
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def host_meeting(port: int, count: int) -> int:
    """Wait for everybody, then tell everybody how many came."""
    callers = []
    with socket.create_server(("", port)) as server:
        server.settimeout(DEADLINE_S)
        while len(callers) < count - 1:
            callers.append(server.accept()[0])
    numbers = {0, *(caller.recv(1)[0] for caller in callers)}
    for caller in callers:
        caller.sendall(bytes([len(numbers)]))
        caller.close()
    return len(numbers)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    name = f"{socket.gethostname()}-{os.getpid()}"
    scratch = directory / f"{name}.part"
    scratch.write_text(json.dumps(report()))
    scratch.rename(directory / f"{name}.json")
