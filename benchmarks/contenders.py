"""Who takes part: one table, from which each benchmark picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness import PEERS, Contender

TF_MODELS = ("mnist_cnn",)


def all_contenders(peers: Path = PEERS, processes: int = 2) -> dict[str, Contender]:
    """Every contender by name, the peers' environments found under `peers`."""
    torch = peers / "torch" / "bin" / "python"
    tensorflow = peers / "tensorflow" / "bin" / "python"

    def tf(name: str, title: str, *, single: bool) -> Contender:
        return Contender(
            name=name, title=title, script="peers/tf_strategies.py", python=tensorflow,
            requires="tensorflow", single=single, models=TF_MODELS,
        )  # fmt: skip

    contenders = (
        Contender(name="twin", title="twin, no communication", script="peers/twin.py"),
        Contender(
            name="lockstep", title="twin that waits at every step", script="peers/twin.py",
            arguments=("--lockstep",),
        ),
        Contender(
            name="parti", title="Parti", script="peers/with_parti.py",
            launcher=("-m", "parti", "run", "-n", str(processes)),
        ),
        Contender(name="raw_ddp", title="DDP, expert settings", script="peers/raw_ddp.py"),
        Contender(name="default_ddp", title="DDP, defaults", script="peers/default_ddp.py"),
        Contender(
            name="accelerate", title="Accelerate", script="peers/accelerate_ddp.py",
            python=torch, requires="accelerate",
        ),
        Contender(
            name="fabric", title="Lightning Fabric", script="peers/fabric_ddp.py",
            python=torch, requires="lightning_fabric",
        ),
        Contender(
            name="eager", title="one eager process", script="peers/twin.py", single=True
        ),
        Contender(name="gloo_reduce", title="gloo", script="peers/gloo_reduce.py"),
        Contender(
            name="shared_reduce", title="shared memory", script="peers/shared_reduce.py",
            launcher=("-m", "parti", "run", "-n", str(processes)),
        ),
        tf("tf_mirrored", "TF MirroredStrategy, a device a core", single=True),
        tf("tf_mirrored_whole", "TF MirroredStrategy, one device", single=True),
        tf("tf_multi_worker", "TF MultiWorkerMirroredStrategy", single=False),
        tf("tf_one_device", "TF OneDeviceStrategy", single=True),
    )  # fmt: skip
    return {contender.name: contender for contender in contenders}


def variant(contender: Contender, name: str, title: str, *arguments: str) -> Contender:
    """The same program with other arguments, under another name."""
    return replace(contender, name=name, title=title, arguments=(*contender.arguments, *arguments))


def pick(table: dict[str, Contender], names: Sequence[str]) -> list[Contender]:
    """The named ones in order; an unknown name lists the known."""
    unknown = [name for name in names if name not in table]
    if unknown:
        raise SystemExit(f"unknown contender {unknown[0]!r}; known: {', '.join(table)}")
    return [table[name] for name in names]
