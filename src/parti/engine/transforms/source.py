"""A function's source as a tree, and a function again from a changed tree.

A user's `forward` is changed this way rather than replaced by a trace of it, because a trace bakes
in what was true while tracing: the training mode, numbers held by the module, the branch taken.
The changed function keeps its globals, closure, defaults, file name and line numbers, so it follows
later changes to any of them, and tracebacks and debuggers show the user's own lines.
"""

from __future__ import annotations

import ast
import dis
import inspect
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any


def parsed(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The tree of a plain method; None where it is not certain to be what runs.

    Refused: decorated functions, generators and coroutines, private names (`self.__x` means
    another name outside its class), and a file that says something else than the code in memory.
    """
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return None
    try:
        lines, first = inspect.getsourcelines(function)
        # Indented lines stay so, in a block: columns are the user's, and strings are whole.
        block = "if True:" if lines[0][:1].isspace() else ""
        body = ast.parse(block + "\n" + "".join(lines)).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if block and isinstance(body[0], ast.If):
        body = body[0].body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        return None
    tree = body[0]
    if tree.decorator_list or tree.name != function.__name__ or _has_private_names(tree):
        return None
    # Defaults are taken from the function itself; annotations were evaluated long ago.
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [d and ast.Constant(None) for d in tree.args.kw_defaults]
    tree.returns = None
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    ast.increment_lineno(tree, first - 2)
    code = _compiled(function, tree, ())
    return tree if code is not None and _same(code, function.__code__) else None


def recompiled(
    function: Callable[..., Any], tree: ast.FunctionDef, helpers: Mapping[str, object]
) -> FunctionType | None:
    """A function like `function` from the changed tree, which may call the helpers by name."""
    assert isinstance(function, FunctionType)
    code = _compiled(function, tree, tuple(helpers))
    if code is None:
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType(helper) for name, helper in helpers.items()}
    made = FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    made.__module__ = function.__module__
    made.__doc__ = function.__doc__
    return made


def _compiled(
    function: FunctionType, tree: ast.FunctionDef, more_names: tuple[str, ...]
) -> CodeType | None:
    """Compile within a function whose arguments stand for the closure."""
    free = [*function.__code__.co_freevars, *more_names]
    around = ast.FunctionDef(
        name="around",
        args=ast.arguments(
            posonlyargs=[],
            args=[ast.arg(arg=name) for name in free],
            kwonlyargs=[],
            kw_defaults=[],
            defaults=[],
        ),
        body=[tree],
        decorator_list=[],
    )
    module = ast.fix_missing_locations(ast.Module(body=[around], type_ignores=[]))
    flags = function.__code__.co_flags & _future_flags()
    try:
        whole = compile(module, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    outer = next(each for each in whole.co_consts if isinstance(each, CodeType))
    inner = [each for each in outer.co_consts if isinstance(each, CodeType)]
    return next((each for each in inner if each.co_name == function.__name__), None)


def _same(mine: CodeType, theirs: CodeType) -> bool:
    return (
        mine.co_varnames == theirs.co_varnames
        and set(mine.co_freevars) == set(theirs.co_freevars)
        and _instructions(mine) == _instructions(theirs)
        and not mine.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE)
    )


def _instructions(code: CodeType) -> list[tuple[str, str]]:
    """What the code does, in a form that does not depend on where its names were imported.

    The compiler loads `F.relu` in another way if it has seen `import ... as F` in the same file,
    and lengths of jumps follow from that.
    """
    result = []
    for each in dis.get_instructions(code):
        name = _SAME_OPERATION.get(each.opname, each.opname)
        if isinstance(each.argval, CodeType):
            result.append((name, repr(_instructions(each.argval))))
        elif "JUMP" in name or name in ("SEND", "FOR_ITER"):
            result.append((name, ""))
        else:
            result.append((name, repr(each.argval)))
    return result


_SAME_OPERATION = {"LOAD_METHOD": "LOAD_ATTR"}


def _has_private_names(tree: ast.FunctionDef) -> bool:
    names = [each.id for each in ast.walk(tree) if isinstance(each, ast.Name)]
    names += [each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
    return any(name.startswith("__") and not name.endswith("__") for name in names)


def _future_flags() -> int:
    import __future__

    flags = 0
    for name in __future__.all_feature_names:
        flags |= getattr(__future__, name).compiler_flag
    return flags
