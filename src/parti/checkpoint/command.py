"""`parti checkpoint inspect | verify | export`: what each prints.

Looking and verifying read JSON and hashes; only exporting loads torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from parti.checkpoint.listing import Found, list_checkpoints, look_at, wrong_sizes
from parti.checkpoint.manifest import MANIFEST, Head, parse_final, read_manifest
from parti.checkpoint.plain import Json
from parti.checkpoint.read import newest_good, verify
from parti.errors import CheckpointError, ConfigError

Print = Callable[[str], None]

_MOST_TEXT = 60
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def inspect(path: Path, say: Print) -> int:
    """A table of a directory's checkpoints; or one checkpoint's facts and tensors."""
    if _is_checkpoint(path):
        return _show_one(look_at(path), say)
    every = _those_of(path)
    say(_table(("step", "epoch", "written", "size", "parts", "tensors", ""), map(_row, every)))
    return 0


def check(path: Path, say: Print) -> int:
    """0 if the checkpoint, or each in the directory, is as it was written; else 1."""
    every = (look_at(path),) if _is_checkpoint(path) else _those_of(path)
    is_good = True
    for found in every:
        problems = verify(found.path)
        is_good = is_good and not problems
        if problems:
            say("\n  ".join((f"{found.path.name}: damaged", *problems)))
        else:
            say(f"{found.path.name}: good ({_size(found.num_bytes)} in {_parts(found)})")
    return 0 if is_good else 1


def export(path: Path, target: Path, only: str | None, say: Print) -> int:
    """One file of a checkpoint, or of the newest good one of a directory."""
    if not _is_checkpoint(path):
        _those_of(path)
        newest = newest_good(path, say)
        if newest is None:
            raise CheckpointError(f"{path} holds no good checkpoint.")
        path = newest.path
    from parti.checkpoint import export as exporting

    exporting.check_target(target)
    exporting.export(path, target, only)
    say(f"{path.name} → {target} ({_size(target.stat().st_size)})")
    return 0


def _is_checkpoint(path: Path) -> bool:
    return parse_final(path.absolute().name) is not None or (path / MANIFEST).exists()


def _those_of(path: Path) -> tuple[Found, ...]:
    if not path.exists():
        raise ConfigError(f"{path} does not exist; expected a checkpoint or a directory of them.")
    every = list_checkpoints(path)
    if not every:
        raise ConfigError(
            f"{path} is no checkpoint and holds none; expected {MANIFEST} in it, or directories "
            f"named like step-0000000100."
        )
    return every


def _row(found: Found) -> tuple[str, ...]:
    head = found.head
    if head is None:
        return str(found.step), "", "", "", "", "", found.problem or ""
    note = " ".join(wrong_sizes(found))
    return (
        str(head.step),
        _text(head.facts.get("epoch", "")),
        _when(head),
        _size(found.num_bytes),
        str(len(head.files)),
        str(head.num_tensors),
        note,
    )


def _show_one(found: Found, say: Print) -> int:
    if found.head is None:
        raise CheckpointError(f"{found.path}: {found.problem}")
    manifest = read_manifest(found.path)
    say(f"{found.path}")
    facts = {"step": manifest.step, "written": _when(manifest), **manifest.facts}
    facts["size"] = f"{_size(found.num_bytes)} in {_parts(found)}"
    width = max(map(len, facts))
    for name, value in facts.items():
        say(f"  {name.ljust(width)}  {_text(value)}")
    for problem in wrong_sizes(found):
        say(f"  {problem}")
    rows = [
        (name, tensor.dtype, "×".join(map(str, tensor.shape)) or "–", tensor.file.split("-of-")[0])
        for name, tensor in manifest.tensors.items()
    ]
    rows += [(name, "", "", f"= {held}") for name, held in manifest.ties.items()]
    say("")
    say(_table(("tensor", "type", "shape", "in"), rows))
    return 0


def _text(value: Json) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 1]}…"


def _when(head: Head) -> str:
    return head.written_at.replace("T", " ").removesuffix("+00:00") + " UTC"


def _parts(found: Found) -> str:
    count = len(found.head.files) if found.head else 0
    return f"{count} part{'' if count == 1 else 's'}"


def _size(num_bytes: int) -> str:
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [list(columns), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
