"""Every error that Parti raises, in one tree.

    PartiError
    ├── ConfigError (ValueError)     found before any process starts; the message names the setting
    │   └── PlanInfeasible           a plan that cannot work on this cluster
    ├── CommError (RuntimeError)     something went wrong between ranks
    │   ├── PeerLost                 a rank is gone
    │   ├── CommTimeout              a rank did not arrive before the deadline
    │   └── RankMismatch             ranks disagree on what they are training
    ├── WorkerFailed (RuntimeError)  a worker ended badly; shows the first failure
    ├── NonFiniteLoss (ArithmeticError)  the loss is no longer a number
    ├── DataError (ValueError)       a data set that cannot be read or dealt as asked
    └── CheckpointError (RuntimeError)

    Preempted (SystemExit)           no error: the process was asked to stop, and its state is saved

A message states the fact with its values, what was expected, and the remedy.
"""

from __future__ import annotations


class PartiError(Exception):
    """The root: catch this to catch everything Parti raises on its own account."""


class ConfigError(PartiError, ValueError):
    """A setting is wrong, missing, or contradicts another."""


class PlanInfeasible(ConfigError):
    """A plan that cannot work on this cluster."""


class CommError(PartiError, RuntimeError):
    """Communication between ranks failed."""

    ranks: tuple[int, ...] = ()
    """Who is to blame, as far as it is known."""


class PeerLost(CommError):
    """A rank that others wait for is gone."""


class CommTimeout(CommError):
    """A wait passed its deadline; the message names who is missing."""


class RankMismatch(CommError):
    """Ranks disagree on layout or configuration; the message names what and who."""


class WorkerFailed(PartiError, RuntimeError):
    """A worker ended badly. The first failure is shown, its consequences are folded under it."""


class NonFiniteLoss(PartiError, ArithmeticError):
    """The loss is NaN or infinite; the message names the step."""


class DataError(PartiError, ValueError):
    """A data set cannot be read, found or dealt as asked."""


class CheckpointError(PartiError, RuntimeError):
    """A saved state cannot be written or trusted."""


class Preempted(SystemExit):
    """The process was asked to stop. All ranks have saved the state after the same step, and the
    same command goes on from there. Uncaught, it ends the process with exit code 75 ("resume me")
    and without a traceback."""

    CODE = 75
    """EX_TEMPFAIL of sysexits.h."""

    def __init__(self, step: int, directory: str, problem: str = "") -> None:
        super().__init__(self.CODE)
        self.step = step
        """How many steps have been taken."""
        self.directory = directory
        self.problem = problem
        """Why the state could not be saved; empty if it could."""

    def __str__(self) -> str:
        if self.problem:
            return (
                f"stopped after {self.step} steps, but the state could not be saved: "
                f"{self.problem} The same command goes on from the checkpoint before, if there is "
                f"one in {self.directory}."
            )
        return (
            f"stopped after {self.step} steps; the state is in {self.directory}, and the same "
            "command goes on from there."
        )
