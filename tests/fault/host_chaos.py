"""Many faults at random moments of one training on several hosts, and the same bits at its end.

    python -m tests.fault.host_chaos [--faults 40] [--hosts 3] [--seed N]

Workers are killed, and hosts are lost with all their processes or cut off and mended, wherever they
are. Hosts that were lost are started again. One host that holds the state is always left alone, and
the first keeps its supervisor, which serves the store. The seed is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from parti.doctor.check import check
from parti.doctor.run import read_run

from .chaos import undisturbed
from .fleet import DEADLINE_S, Fleet
from .hosts import hosts, until

SHARE_OF_KILLS = 0.5
SHARE_OF_CUTS = 0.25
SHORT_S, LONG_S = 0.8, 9.0
"""Of cuts: nobody notices a short one; after a long one the host has been lost."""
PAUSE_S = 2.0


def processes_of(index: int) -> int:
    return 1 + index % 2


class Chaos:
    def __init__(self, fleet: Fleet, draw: random.Random) -> None:
        self._fleet = fleet
        self._draw = draw
        self._struck: set[int] = set()

    def _holders(self) -> dict[int, set[int]]:
        """Members with the state that were not struck, by their hosts."""
        settled = self._fleet.world(0) - self._struck
        crews = {i: settled & set(self._fleet.workers(i)) for i in range(len(self._fleet.hosts))}
        return {index: crew for index, crew in crews.items() if crew}

    def strike(self) -> str:
        until(
            lambda: len(self._holders()) >= 2,
            DEADLINE_S,
            lambda: f"no second host came: {self._holders()}\n{self._fleet.hosts[0].said}",
        )
        holders = self._holders()
        lot = self._draw.random()
        if lot < SHARE_OF_KILLS:
            index = self._draw.choice(sorted(holders))
            return self._kill(index, self._draw.choice(sorted(holders[index])))
        index = self._draw.choice(sorted(set(holders) - {0}))
        self._struck |= holders[index]
        if lot < SHARE_OF_KILLS + SHARE_OF_CUTS:
            return self._cut(index, holders[index])
        self._fleet.hosts[index].lose()
        self._fleet.join(index, processes_of(index))
        return f"lose host {index}"

    def _kill(self, index: int, member: int) -> str:
        self._struck.add(member)
        with suppress(ProcessLookupError):
            os.kill(self._fleet.workers(index)[member], signal.SIGKILL)
        return f"kill {member}"

    def _cut(self, index: int, crew: set[int]) -> str:
        host, cut_s = self._fleet.hosts[index], self._draw.choice((SHORT_S, LONG_S))
        host.cut()
        time.sleep(cut_s)
        host.mend()
        if cut_s == SHORT_S:
            self._struck -= crew
        return f"cut host {index} for {cut_s:.1f} s"


def run(num_hosts: int, faults: int, seed: int, directory: Path) -> set[str]:
    """What the processes that are there at the end have found. Raises where the job did not
    survive all faults."""
    draw = random.Random(seed)
    stop = directory / "stop"
    with hosts(num_hosts, directory) as made:
        fleet = Fleet(
            made, directory, nodes=f"1:{num_hosts}", epochs=10**6, rest_s=0.01,
            STOP_FILE=str(stop),
        )  # fmt: skip
        fleet.begin(0, processes_of(0))
        for index in range(1, num_hosts):
            fleet.join(index, processes_of(index))
        chaos = Chaos(fleet, draw)
        for number in range(faults):
            print(f"{number}: {chaos.strike()}", flush=True)
            time.sleep(draw.uniform(0.0, PAUSE_S))
        stop.touch()
        assert made[0].wait(DEADLINE_S) == 0, made[0].said
        assert check(read_run(fleet.gathered())) == [], "the history of commits is wrong"
    return set(fleet.found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    given = parser.parse_args()
    print(f"chaos: {given.faults} faults on {given.hosts} hosts, --seed {given.seed}")
    with tempfile.TemporaryDirectory(prefix="parti-chaos-") as name:
        directory = Path(name)
        found = run(given.hosts, given.faults, given.seed, directory)
        same = found == {undisturbed(sorted(found)[0], directory / "alone")}
    print(f"weights, optimizer state, metrics and history: {'EQUAL' if same else 'DIFFERENT'}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
