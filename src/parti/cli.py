"""The command line: it launches and looks. Training itself is configured in Python.

Commands are made with typer, all but one: importing typer takes longer than `parti run` needs to
have its workers started. So `run` reads its own options (`parti.launch.command`), and typer, which
lists it, hands them over unread.
"""

# Without `from __future__ import annotations`: typer reads those of functions that are defined
# where typer is imported, inside a function.

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from parti import __version__
from parti.errors import ConfigError, PartiError

if TYPE_CHECKING:
    import typer

_INTERRUPTED = 130


def main() -> None:
    """The program `parti`."""
    arguments = sys.argv[1:]
    try:
        if arguments[:1] == ["run"]:
            exit_code = _run(arguments[1:])
        else:
            exit_code = application()(arguments, prog_name="parti", standalone_mode=True)
    except KeyboardInterrupt:  # before there was anything to end
        exit_code = _INTERRUPTED
    except PartiError as error:
        sys.stderr.write(f"parti: {error}\n")
        exit_code = 2 if isinstance(error, ConfigError) else 1
    raise SystemExit(exit_code)


def application() -> "typer.Typer":
    """Everything that `parti --help` lists."""
    import typer

    app = typer.Typer(
        help="Train on many devices and hosts from one PyTorch script.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )

    def show_version(is_wanted: bool) -> None:
        if is_wanted:
            typer.echo(f"parti {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=show_version, is_eager=True, help="Show the version."
            ),
        ] = False,
    ) -> None:
        pass

    @app.command(
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    def run(arguments: list[str]) -> None:
        """Run a script on every device of this host, or of several hosts."""
        raise typer.Exit(_run(arguments))

    @app.command()
    def doctor(
        run: Annotated[
            str | None,
            typer.Argument(
                help="A directory, or a name under runs/; the latest if none is named.",
                show_default=False,
            ),
        ] = None,
        runs_dir: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    ) -> None:
        """Tell how a run went: its end, losses and joins, and whether every step counted once."""
        from parti.doctor import command

        raise typer.Exit(command.look(run, runs_dir, typer.echo))

    app.add_typer(_checkpoint_commands(), name="checkpoint")
    return app


def _checkpoint_commands() -> "typer.Typer":
    """What `parti checkpoint --help` lists."""
    import typer

    app = typer.Typer(
        help="Look at checkpoints, verify them, and make files of them for others.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    place = typer.Argument(help="A checkpoint, or a directory of them.", show_default=False)

    @app.command()
    def inspect(path: Annotated[Path, place]) -> None:
        """Show the checkpoints of a directory; or the facts and tensors of one."""
        from parti.checkpoint import command

        raise typer.Exit(command.inspect(path, typer.echo))

    @app.command()
    def verify(path: Annotated[Path, place]) -> None:
        """Compare every byte with its hash. Exit code 1 if anything is wrong."""
        from parti.checkpoint import command

        raise typer.Exit(command.check(path, typer.echo))

    @app.command()
    def export(
        path: Annotated[Path, place],
        target: Annotated[
            Path,
            typer.Argument(
                metavar="OUT",
                help="NAME.safetensors for weights, NAME.pt for the whole state.",
                show_default=False,
            ),
        ],
        only: Annotated[
            str | None,
            typer.Option(
                help="A branch of the state; of weights, 'model' if none is named.",
                show_default=False,
            ),
        ] = None,
    ) -> None:
        """Write one file of a checkpoint; of a directory, of the newest good one."""
        from parti.checkpoint import command

        raise typer.Exit(command.export(path, target, only, typer.echo))

    return app


def _run(arguments: list[str]) -> int:
    from parti.launch.command import read_options, run_script

    return run_script(read_options(arguments))
