"""Where a strategy, which is only a value, meets the process it runs in.

Owns what a process has once: its place in the job and its connection to the other ranks.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from parti.cluster import Level, Origin, Place, resolve
from parti.comm.faults import carry_out_for_real, with_faults
from parti.comm.rendezvous import (
    Directory,
    KeyValue,
    Shelf,
    TorchStore,
    meeting_in,
    split_address,
)
from parti.comm.world import World, connect
from parti.data.seeds import derive
from parti.engine.commit_log import CommitLog, NoCommitLog
from parti.engine.replica import Replica
from parti.engine.transforms.precision import forward_context
from parti.engine.tuning import apply
from parti.errors import ConfigError
from parti.launch.devices import num_cores
from parti.launch.worker import install, line, stand_by
from parti.monitor.commits import CommitFile, open_commits

if TYPE_CHECKING:
    from parti.strategy.data_parallel import DataParallel

_STORE_S = 5.0
_SCOPE = 1 << 33
"""Stands where the number of a step stands, for the random state inside `scope()`."""


def enter(strategy: DataParallel) -> None:
    """Make this process one of the job's ranks, or its launcher, which does not come back."""
    place = resolve()
    strategy.check(place)
    _check_names(strategy.device_names())
    if place.level is Level.HOST:
        count = strategy.num_local_processes()
        if count > 1 or place.num_nodes > 1:
            # Here, as workers and single processes are quicker to start without the supervisor.
            from parti.launch.environment import ProcessTuning
            from parti.launch.rerun import ensure

            ensure(
                count,
                threads=strategy.threads,
                tuning=ProcessTuning(allocator=strategy.tuning.allocator),
            )
        torch.set_num_threads(strategy.threads or num_cores())
    else:
        install()
        stand_by(_warm_up)
        torch.set_num_threads(strategy.threads or _share_of_cores(place))
    device = _device(strategy, place)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what the script calls "cuda" is this rank's


def _warm_up() -> None:
    """What a process needs on its way to the first step, and can have before: for a spare."""
    from parti.elastic import member as member

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # the first imports a lot


def seed_everything(seed: int) -> None:
    """The same state of every generator on every process, before models are made."""
    value = derive(seed, _SCOPE)
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value % (1 << 32))


def bind(
    strategy: DataParallel, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> Replica:
    enter(strategy)
    place = resolve()
    device = _device(strategy, place)
    _move(models, optimizers, device)
    world = _world(place, device, strategy.patience_s, strategy.recovery)
    world = world.succession.current(world)  # it may have changed since another bind
    return Replica(
        strategy=strategy,
        world=world,
        device=device,
        models=models,
        optimizers=optimizers,
        seed=strategy.seed,
        exact=strategy.exact,
        applied=apply(
            strategy.tuning,
            models,
            optimizers,
            device=device,
            precision=strategy.precision,
            compile=strategy.compile,
        ),
        precision=forward_context(strategy.precision, device),
        commits=_commits(place),
    )


_num_replicas = itertools.count()


def _commits(place: Place) -> CommitLog:
    """Where the replica that is bound next writes down what it commits."""
    number = next(_num_replicas)
    file = _commit_file(place)
    return NoCommitLog() if file is None else file.log(number)


@functools.lru_cache(maxsize=1)
def _commit_file(place: Place) -> CommitFile | None:
    """Opened once in the life of a process; None where no supervisor has made a directory."""
    inherited = line()
    if inherited is None or place.run_directory is None or place.rank is None:
        return None
    # Elsewhere every supervisor counts its own processes, and none is replaced.
    is_unique = place.num_nodes == 1 or inherited.has_hosts
    member = inherited.member if is_unique else place.rank
    return open_commits(Path(place.run_directory), job=place.job or "", member=member)


@functools.lru_cache(maxsize=1)
def _world(place: Place, device: torch.device, patience_s: float, recovery: bool) -> World:
    """Connected once in the life of a process."""
    if place.level is Level.HOST or place.world_size == 1:
        return _connect(place, device, patience_s, 0, 1)
    assert place.rank is not None and place.world_size is not None
    inherited = line()
    can_recover = recovery and inherited is not None and device.type == "cpu"
    if inherited is not None and inherited.has_hosts and not can_recover:
        raise ConfigError(
            "hosts that come and go (`--nodes MIN:MAX`) need recovery=True and processes on CPUs; "
            f"this strategy has recovery={recovery} and trains on {device.type}. Give --nodes one "
            "number."
        )
    if not can_recover or inherited is None or (place.num_nodes > 1 and not inherited.has_hosts):
        return _connect(place, device, patience_s, place.rank, place.world_size)
    assert place.host_directory is not None
    from parti.elastic.member import Member

    member = Member(
        inherited.end,
        number=inherited.member,
        meeting_place=_meeting_place(place, has_hosts=inherited.has_hosts),
        failures=Path(place.host_directory, "failures"),
        device=device,
        patience_s=patience_s,
        num_cores=num_cores(),
        has_hosts=inherited.has_hosts,
    )
    # The longest in the job is rank 0, so one that comes later never is.
    world = member.provisional(max(place.rank, 1)) if inherited.joins else member.first()
    return with_faults(world, inherited.faults, carry_out_for_real)


def _meeting_place(place: Place, *, has_hosts: bool) -> Callable[[int], KeyValue]:
    """Where the members of each world meet, by its generation."""
    assert place.host_directory is not None and place.rendezvous is not None
    directory, address = Path(place.host_directory), place.rendezvous

    def on_this_host(generation: int) -> KeyValue:
        path = directory / f"world-{generation}"
        path.mkdir(exist_ok=True)
        return Directory(path)

    opened: list[Agreement] = []

    def on_any_host(generation: int) -> KeyValue:
        # A connection for each world: one that was cut does not come back.
        while opened:
            opened.pop().abandon()
        opened.append(connect_store(address, timeout_s=_STORE_S, patience_s=_STORE_S))
        return Shelf(opened[0], f"world/{generation}/")

    if not has_hosts:
        return on_this_host
    from parti.launch.agreement import Agreement
    from parti.launch.agreement import connect as connect_store

    return on_any_host


def _connect(place: Place, device: torch.device, patience_s: float, rank: int, size: int) -> World:
    return connect(
        rank=rank,
        size=size,
        meet=meeting_in(_store(place, patience_s), rank, size, patience_s) if size > 1 else _nobody,
        device=device,
        patience_s=patience_s,
        num_cores=num_cores(),
    )


def _nobody(topic: str, mine: bytes) -> tuple[bytes, ...]:
    return (mine,)


def _check_names(names: Sequence[str]) -> None:
    """Refuse, before any process starts, a device that this host does not have."""
    for name in names:
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"device {name!r} is not known: {reason} Expected a name such as 'cpu' or 'cuda:0'."
            ) from None
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device.type == "cuda" and (device.index or 0) >= num_gpus:
            raise ConfigError(
                f"device {name!r} is not there: torch {torch.__version__} sees {num_gpus} GPUs on "
                "this host. Name one that is, or leave the devices out."
            )


def _store(place: Place, patience_s: float) -> KeyValue:
    if place.rendezvous is None:
        raise ConfigError(
            f"there are {place.world_size} processes but no address where they can meet. "
            f"{place.why} Set MASTER_ADDR and MASTER_PORT, or start with `parti run`."
        )
    parts = urlsplit(place.rendezvous)
    if parts.scheme == "file":
        return Directory(Path(parts.path))
    if place.origin is Origin.PARTI:
        from parti.launch.store import connect as connect_store

        return connect_store(place.rendezvous)
    host, port = split_address(place.rendezvous)
    is_host = place.rank == 0 and not place.store_is_served
    return TorchStore(host, port, place.job or "", is_host=is_host, patience_s=patience_s)


def _move(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], device: torch.device
) -> None:
    """Bring everything to this rank's device. Parameters stay the objects they are, so optimizers
    made before keep theirs; their state, if they have any, follows."""
    strange = any(
        tensor.device != device
        for model in models
        for tensor in (*model.parameters(), *model.buffers())
    )
    if not strange:
        return
    for model in models:
        model.to(device)
    for optimizer in optimizers:
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())


def _share_of_cores(place: Place) -> int:
    return max(1, num_cores() // (place.local_world_size or 1))


def _device(strategy: DataParallel, place: Place) -> torch.device:
    named = strategy.device_names()
    mine = place.local_rank or 0
    if named:
        if mine >= len(named):
            raise ConfigError(
                f"{strategy} names {len(named)} devices, but this host has "
                f"{place.local_world_size} processes. Start as many processes as devices."
            )
        device = torch.device(named[mine])
        return torch.device("cuda", 0) if device == torch.device("cuda") else device
    if torch.cuda.is_available():
        return torch.device("cuda", mine % torch.cuda.device_count())
    return torch.device("cpu")
