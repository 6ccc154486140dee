"""`Writer`: one process's way to write checkpoints while it trains.

Training stands still while the process's part of the state is copied to memory; everything else
happens in one background thread. Must not know how ranks talk: that all of them begin the same
checkpoints in the same order is the caller's promise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from parti.checkpoint import plain
from parti.checkpoint.attempt import Attempt, Outcome, Share
from parti.checkpoint.disk import Disk, RealDisk
from parti.checkpoint.drafts import Drafts
from parti.checkpoint.layout import PartLayout, TensorSpec, assign, lay_out
from parti.checkpoint.staging import Staging
from parti.checkpoint.tree import dtype_name, split
from parti.checkpoint.value import Checkpoint
from parti.errors import CheckpointError, ConfigError

_STOPPING_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How a state is dealt and laid out; kept for as long as its names and shapes are the same."""

    key: object
    layouts: tuple[PartLayout, ...]


class Writer:
    """Writes this process's part of every checkpoint of a job.

    `token` names the job and its generation: equal on all its processes, and new with every start
    and every change of the world. `note` gets what the user should know, one text each; it is
    called from the background thread, and must not raise.
    """

    def __init__(
        self,
        settings: Checkpoint,
        *,
        token: str,
        note: Callable[[str], None],
        disk: Disk | None = None,
    ) -> None:
        self._settings = settings
        self._disk = disk or RealDisk()
        self._drafts = Drafts(settings.path, token, self._disk)
        self._note = note
        self._staging = Staging()
        self._plan: _Plan | None = None
        self._attempt: Attempt | None = None
        self._thread: threading.Thread | None = None
        self._count = 0
        self._problem: str | None = None
        self._last_step: int | None = None
        self._is_skip_told = False
        self._touching: threading.Thread | None = None
        self._stop_touching = threading.Event()

    @property
    def is_busy(self) -> bool:
        """Whether `begin` would skip, as the checkpoint before is still being written.

        Where ranks can agree, let them skip together: a part alone is written for nothing.
        """
        return self._is_running() and self._attempt is not None and self._attempt.is_busy

    @property
    def is_settled(self) -> bool:
        """Whether it is known of every checkpoint how it ended: `wait` would return at once."""
        return not self._is_running()

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint that this process knows to be on the disk."""
        return self._last_step

    def reserve(self, tree: object, *, part: int, num_parts: int) -> None:
        """Have the memory for such a state ready, so that the first checkpoint is no slower.

        Takes the time of a thread. May be left out; without effect once there is a checkpoint.
        """
        if self._attempt is not None:
            return
        self._end_touching()
        tensors = split(tree).tensors
        num_bytes = self._planned(tensors, num_parts).layouts[part].data_bytes
        devices = {tensor.device for tensor in tensors.values()}
        self._stop_touching = threading.Event()
        self._touching = threading.Thread(
            target=self._touch, args=(num_bytes, devices, self._stop_touching), daemon=True
        )
        self._touching.start()

    def _touch(self, num_bytes: int, devices: set[torch.device], stop: threading.Event) -> None:
        with suppress(OSError):  # `begin` will tell
            self._staging.touch(num_bytes, devices, stop)

    def _end_touching(self) -> None:
        """It ends within a page."""
        self._stop_touching.set()
        if self._touching is not None:
            self._touching.join()
            self._touching = None

    def begin(
        self,
        tree: object,
        *,
        step: int,
        facts: Mapping[str, object],
        part: int,
        num_parts: int,
        deadline_s: float,
    ) -> None:
        """Copy this process's part of the state, and have it written. Called by every process.

        All hand in the same state, and `part` from 0 to `num_parts` - 1. `deadline_s`: how long
        part 0 waits for the others. Without effect while the checkpoint before is being written.
        """
        if not 0 <= part < num_parts:
            raise ConfigError(
                f"part={part} of num_parts={num_parts}; expected 0 to {num_parts - 1}."
            )
        self._raise_problem()
        self._count += 1  # also of what is skipped: every process must count alike
        if self.is_busy:
            self._tell_skip(step)
            return
        self._let_go()
        self._end_touching()
        told = plain.encode(dict(facts))
        found = split(tree)
        plan = self._planned(found.tensors, num_parts)
        try:
            staged = self._staging.copy(plan.layouts[part], found.tensors)
        except (OSError, MemoryError) as error:
            self._fail(step, f"the checkpoint was not written: no memory to copy to ({error}).")
            return
        share = Share(
            step=step,
            count=self._count,
            part=part,
            names=tuple(found.tensors),
            layouts=plan.layouts,
            staged=staged,
            facts=told,
            structure=found.structure if part == 0 else None,
            ties=found.ties,
            deadline_s=deadline_s,
        )
        self._start(Attempt(share, self._drafts, keep=self._settings.keep, disk=self._disk))

    def wait(self, timeout_s: float) -> str | None:
        """Until the checkpoint under way has ended well or badly; what went wrong, if anything."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                assert self._attempt is not None
                self._problem = (
                    f"step {self._attempt.step}: the checkpoint in {self._settings.path} was not "
                    f"finished within {timeout_s:g} s."
                )
        self._raise_problem()
        problem, self._problem = self._problem, None
        return problem

    def abandon(self, *, token: str | None = None) -> None:
        """Forget the checkpoint under way: the world has changed. `token`: the new world's."""
        self._let_go()
        self._problem = None
        if token is not None:
            self._drafts = self._drafts.succeed(token)
            self._count = 0

    def close(self, timeout_s: float = 600.0) -> None:
        """Let what is under way end, and give the memory back. Ask `wait` before how it ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        is_hanging = self._is_running()
        self._let_go()
        self._end_touching()
        if not is_hanging:
            self._drafts.disown()
        self._staging.release()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _let_go(self) -> None:
        """Stop the thread; one that only waits for part 0 needs nothing of ours any more."""
        if self._attempt is not None and self._thread is not None:
            self._attempt.stop()
            if not self._attempt.is_written:
                self._thread.join(_STOPPING_S)
                if self._thread.is_alive():  # a disk that hangs: leave it the memory it reads
                    self._staging.release()
        self._attempt = self._thread = None

    def _planned(self, tensors: Mapping[str, Tensor], num_parts: int) -> _Plan:
        key = (num_parts, [(name, one.dtype, one.shape) for name, one in tensors.items()])
        if self._plan is None or self._plan.key != key:
            specs = {name: _spec(name, tensor) for name, tensor in tensors.items()}
            dealt = assign(((name, spec.num_bytes) for name, spec in specs.items()), num_parts)
            layouts = tuple(lay_out(specs[name] for name in names) for names in dealt)
            self._plan = _Plan(key=key, layouts=layouts)
        return self._plan

    def _start(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._thread = threading.Thread(
            target=self._write, args=(attempt,), name="parti-checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, attempt: Attempt) -> None:
        """The background thread.

        It has the priority of training: a thread of lower priority that is displaced while it holds
        the interpreter's lock keeps the training thread waiting for it.
        """
        try:
            outcome = attempt.run()
        except Exception as error:  # a thread that dies silently would be the worst of reports
            reason = f"{type(error).__name__}: {error}"
            outcome = Outcome(problem=f"the checkpoint was not written: {reason}")
        if outcome.path is not None:
            self._last_step = attempt.step
        if outcome.problem is not None and not attempt.is_stopped:
            self._fail(attempt.step, outcome.problem)

    def _fail(self, step: int, reason: str) -> None:
        self._problem = f"step {step}: {reason}"
        self._note(self._problem)

    def _raise_problem(self) -> None:
        if self._problem is not None and self._settings.on_error == "raise":
            problem, self._problem = self._problem, None
            raise CheckpointError(problem)

    def _tell_skip(self, step: int) -> None:
        if not self._is_skip_told:
            self._is_skip_told = True
            assert self._attempt is not None
            self._note(
                f"step {step}: no checkpoint, as that of step {self._attempt.step} is still being "
                f"written; so will be others (this is said once). Write less often (every=), or to "
                f"a faster disk."
            )


def _spec(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        num_bytes=tensor.numel() * tensor.element_size(),
    )
