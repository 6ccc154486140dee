"""Calls in the source of a user's modules that are handed to functions of ours.

Three things are found, by what the names stand for at the time:

- `pool(relu(x), ...)`, and `x = relu(x)` directly followed by `x = pool(x, ...)`: both go to
  `pool_then_relu`, which exchanges them where that is the same;
- `x.view(...)`: goes to `viewed`, which also views a tensor that lies in memory in another order;
- `torch.flatten(x, ...)`, `x.mean(...)` and the like, where an image ends: `x` is passed through
  `image_ends`, which keeps the gradient of an image in the image's own order in memory.

All of them do the same as the original for any value, so later changes to the module are followed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from parti.engine.transforms.change import Patch
from parti.engine.transforms.pool_order import is_max_pool, may_exchange, pool_then_relu
from parti.engine.transforms.source import parsed, recompiled

IMAGE_ENDS: tuple[object, ...] = (torch.flatten, torch.mean, F.adaptive_avg_pool2d)
IMAGE_END_METHODS = ("flatten", "mean", "reshape")
_UNKNOWN = object()


def viewed(tensor: Any, /, *shape: Any, **kwargs: Any) -> Any:
    """`tensor.view(*shape)`, copying only where the order in memory makes a view impossible."""
    if not isinstance(tensor, torch.Tensor):
        return tensor.view(*shape, **kwargs)
    tensor = image_ends(tensor)
    try:
        return tensor.view(*shape, **kwargs)
    except RuntimeError:
        if tensor.is_contiguous() or tensor.dim() != 4:
            raise
        return tensor.contiguous().view(*shape, **kwargs)


def is_image(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in channels-last order, and in no other."""
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def image_ends(tensor: Any) -> Any:
    """The same tensor; its gradient will come in the memory format of the tensor.

    What follows an image (flatten, mean) makes a gradient in the default format. The operation
    before it would then walk over two formats at once, ten times slower than converting first.
    """
    if (
        isinstance(tensor, torch.Tensor)
        and tensor.grad_fn is not None  # a leaf would keep the hook, and get another every time
        and is_image(tensor)
    ):
        tensor.register_hook(_to_channels_last)  # type: ignore[no-untyped-call]
    return tensor


def _to_channels_last(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)


_HELPERS: Mapping[str, Callable[..., Any]] = {
    "_parti_pool_then_relu": pool_then_relu,
    "_parti_viewed": viewed,
    "_parti_image_ends": image_ends,
}


@dataclass(frozen=True, slots=True)
class Rewriting:
    """A module's own methods with calls handed over."""

    patches: tuple[Patch, ...]
    num_exchanged: int
    minds_order: bool
    """Whether a method may look at the order of a tensor in memory in a way we cannot help."""


def hand_over_calls(module: nn.Module, methods: Sequence[str], *, images: bool) -> Rewriting:
    """Rewrite methods of the module's class, as far as they are understood.

    With `images`, they are prepared for images in another order in memory.
    """
    patches: list[Patch] = []
    exchanged = 0
    minds = False
    for name in methods:
        function = getattr(type(module), name)
        if not _concerns(module, function, images):
            continue
        rewriter = _Rewriter(module, function, images)
        made = rewriter.run()
        exchanged += rewriter.num_exchanged
        minds = minds or rewriter.minds_order
        if made is not None:
            # The name in the class, under which a pickled module finds its class's own method.
            made.__name__ = name
            patches.append(Patch(module, name, made))
    return Rewriting(tuple(patches), exchanged, minds)


def _concerns(module: nn.Module, function: Callable[..., Any], images: bool) -> bool:
    """Whether the names in the code make it worth reading its source."""
    names = _names(function.__code__)
    pools = {name for name, child in module._modules.items() if is_max_pool(child)}
    return bool(names & (_POOL_NAMES | pools)) or (images and bool(names & _IMAGE_NAMES))


def _names(code: CodeType) -> set[str]:
    nested = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*(_names(each) for each in nested))


_POOL_NAMES = {"max_pool1d", "max_pool2d"}
_ORDER_NAMES = {"as_strided", "data_ptr", "is_contiguous", "stride", "storage", "untyped_storage"}
"""Names in a method that looks at how a tensor lies in memory. It is left alone."""
_IMAGE_NAMES = _ORDER_NAMES | {"view", "adaptive_avg_pool2d", *IMAGE_END_METHODS}


class _Rewriter(ast.NodeTransformer):
    """Changes one method for one instance."""

    def __init__(self, module: nn.Module, function: Callable[..., Any], images: bool) -> None:
        self._module = module
        self._function = function
        self._images = images
        self._self_name = ""
        self._changed = False
        self._views = False
        self.num_exchanged = 0
        self.minds_order = False

    def run(self) -> FunctionType | None:
        names = _names(self._function.__code__)
        self.minds_order = bool(names & (_ORDER_NAMES | {"view"}))
        tree = parsed(self._function)
        if tree is None or not tree.args.args:
            return None
        self._self_name = tree.args.args[0].arg
        # A view may be written to and so change what it views; a copy would not.
        self._views = self._images and not _writes_in_place(tree)
        tree.body = self._block(tree.body)
        self.minds_order = bool(names & _ORDER_NAMES) or self._has_views(tree)
        return recompiled(self._function, tree, _HELPERS) if self._changed else None

    def _has_views(self, tree: ast.AST) -> bool:
        return any(
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr == "view"
            and not self._is_module(each.func.value)
            for each in ast.walk(tree)
        )

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, self._joined(block))
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node  # another scope, where names may stand for something else

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        super().generic_visit(node)
        inner = node.args[0] if node.args else None
        if isinstance(inner, ast.Call) and _takes_only_operand(inner) and _simple_rest(node):
            producer = _called(inner.args[0])
            if self._exchangeable(inner.func, node.func, producer):
                return self._exchange(node, inner.func, inner.args[0], producer)
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "view" and self._views and not self._is_module(node.func.value):
                return self._replaced(node, "_parti_viewed", [node.func.value, *node.args])
            if self._resolve(node.func) is _UNKNOWN and node.func.attr in IMAGE_END_METHODS:
                node.func.value = self._marked(node.func.value)
                return node
        function = self._resolve(node.func)
        if inner is not None and any(function is each for each in IMAGE_ENDS):
            node.args[0] = self._marked(inner)
        return node

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        return self._joined([self.visit(each) for each in statements])

    def _joined(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """Exchange neighbouring statements `x = relu(...)` and `x = pool(x, ...)`."""
        result: list[ast.stmt] = []
        for statement in statements:
            last = result[-1] if result else None
            before = result[-2] if len(result) > 1 else None
            joined = self._join(before, last, statement)
            if joined is not None:
                result[-1] = joined
            else:
                result.append(statement)
        return result

    def _join(
        self, before: ast.stmt | None, relu: ast.stmt | None, pool: ast.stmt
    ) -> ast.stmt | None:
        first, second = _call_assigned(relu), _call_assigned(pool)
        if first is None or second is None or first[0] != second[0]:
            return None
        name, inner = first
        outer = second[1]
        operand = outer.args[0] if outer.args else None
        if not (isinstance(operand, ast.Name) and operand.id == name):
            return None
        if not (_takes_only_operand(inner) and _simple_rest(outer)):
            return None
        producer = _called(inner.args[0])
        made = _call_assigned(before)
        if isinstance(inner.args[0], ast.Name) and made is not None and made[0] == name:
            producer = made[1].func if inner.args[0].id == name else None
        if not self._exchangeable(inner.func, outer.func, producer):
            return None
        assert isinstance(pool, ast.Assign)
        pool.value = self._exchange(outer, inner.func, inner.args[0], producer)
        return pool

    def _exchangeable(self, relu: ast.expr, pool: ast.expr, producer: ast.expr | None) -> bool:
        return may_exchange(
            self._resolve(relu), self._resolve(pool), producer and self._resolve(producer)
        )

    def _exchange(
        self, pool: ast.Call, relu: ast.expr, operand: ast.expr, producer: ast.expr | None
    ) -> ast.Call:
        self.num_exchanged += 1
        known = producer if producer is not None and self._is_module(producer) else None
        maker: ast.expr = _copied(known) if known is not None else ast.Constant(None)
        arguments = [pool.func, relu, maker, operand, *pool.args[1:]]
        return self._replaced(pool, "_parti_pool_then_relu", arguments)

    def _replaced(self, node: ast.Call, helper: str, arguments: list[ast.expr]) -> ast.Call:
        self._changed = True
        name = ast.copy_location(ast.Name(helper, ast.Load()), node)
        call = ast.Call(func=name, args=arguments, keywords=node.keywords)
        return ast.fix_missing_locations(ast.copy_location(call, node))

    def _marked(self, operand: ast.expr) -> ast.expr:
        if not self._images or isinstance(operand, ast.Starred):
            return operand
        self._changed = True
        name = ast.copy_location(ast.Name("_parti_image_ends", ast.Load()), operand)
        return ast.copy_location(ast.Call(func=name, args=[operand], keywords=[]), operand)

    def _is_module(self, node: ast.expr) -> bool:
        return isinstance(self._resolve(node), nn.Module)

    def _resolve(self, node: ast.expr) -> object:
        """What a name, or a chain of attributes, stands for now."""
        if isinstance(node, ast.Name):
            if node.id == self._self_name:
                return self._module
            function = self._function
            assert isinstance(function, FunctionType)
            return (
                _UNKNOWN
                if node.id in function.__code__.co_varnames
                else function.__globals__.get(node.id, _UNKNOWN)
            )
        if isinstance(node, ast.Attribute):
            # Looked up without getattr: a property would run code of the user's.
            whole = self._resolve(node.value)
            if isinstance(whole, nn.Module):
                return whole._modules.get(node.attr, _UNKNOWN)
            if isinstance(whole, ModuleType):
                return vars(whole).get(node.attr, _UNKNOWN)
        return _UNKNOWN


def _takes_only_operand(call: ast.Call) -> bool:
    return len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred)


def _simple_rest(call: ast.Call) -> bool:
    """Whether the arguments after the operand mean the same whenever they are evaluated."""
    rest = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    return all(keyword.arg for keyword in call.keywords) and all(_is_simple(each) for each in rest)


def _is_simple(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return all(_is_simple(each) for each in node.elts)
    return isinstance(node, ast.Constant)


def _called(node: ast.expr) -> ast.expr | None:
    return node.func if isinstance(node, ast.Call) else None


def _call_assigned(statement: ast.stmt | None) -> tuple[str, ast.Call] | None:
    """The name and the call of a statement `name = call(...)`."""
    if (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Call)
    ):
        return statement.targets[0].id, statement.value
    return None


def _copied(node: ast.expr) -> ast.expr:
    copied = ast.parse(ast.unparse(node), mode="eval").body
    for each in ast.walk(copied):
        ast.copy_location(each, node)
    return copied


def _writes_in_place(tree: ast.AST) -> bool:
    for each in ast.walk(tree):
        if isinstance(each, ast.AugAssign):
            return True
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store):
            return True
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            attribute = each.func.attr
            if attribute.endswith("_") and not attribute.endswith("__"):
                return True
    return False
