"""The program of a worker that was started for a function (`parti.launch.notebook`).

Run as a script, with the directory that holds the call as its argument.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

CALL = "call.pkl"
PATHS = "sys-path.json"
RESULT = "result-{rank:06d}-{member}.pkl"


def _main() -> None:
    directory = Path(sys.argv[1])
    # Before anything is imported: the caller's modules are found where the caller finds them, and
    # the files beside this one are not taken for modules of their own.
    sys.path[:] = json.loads((directory / PATHS).read_text())
    import cloudpickle

    from parti.launch import worker

    worker.install()
    fn, args = pickle.loads((directory / CALL).read_bytes())
    result = fn(*args)
    # Rank 0's is what the caller gets; another's where rank 0 was lost on the way.
    name = RESULT.format(rank=int(os.environ["PARTI_RANK"]), member=os.environ["PARTI_MEMBER"])
    draft = directory / f".{name}"
    draft.write_bytes(cloudpickle.dumps(result))
    draft.rename(directory / name)


if __name__ == "__main__":
    _main()
