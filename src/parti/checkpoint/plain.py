"""Nested plain values as JSON and back, exact to the bit: NaN, tuples and integer keys included.

What JSON has a form for stays as it is. Everything else becomes an object of one key that begins
with `$`:

    {"$float": hex of the 8 bytes}      NaN and infinities
    {"$int": hex}                       beyond 64 bits
    {"$text": hex of the bytes}         with lone surrogates, as in undecodable file names
    {"$bytes": base64}
    {"$tuple": [...]}
    {"$dict": [[key, value], ...]}      where a key is no text, or begins with `$`
    {"$ordered": [dict, versions]}      an OrderedDict; versions: the `_metadata` of torch's modules
    {"$counter": dict}

Other types are the caller's: it is asked for a form when one is met, and for the value when an
unknown key is. Pure; must not know torch.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from parti.errors import CheckpointError

Json = Any
"""What a JSON encoder takes: None, bool, int, float, str, lists, and dicts with texts as keys."""

Where = tuple[object, ...]
"""The keys and indices that lead to a value."""

LEFT_OUT = object()
"""Returned for a form whose value was not asked for: a dict drops the entry."""

_LARGEST_INT = 2**63


def show(where: Where) -> str:
    """The way to a value as a dotted path."""
    return ".".join(key if isinstance(key, str) else repr(key) for key in where) or "the state"


def refuse(value: object, where: Where) -> Json:
    """Nothing but plain values."""
    kind = type(value)
    raise CheckpointError(
        f"{show(where)} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds numbers, "
        f"texts, bytes, tensors, lists, tuples and dictionaries, so that loading it runs no code. "
        f"Store what it is made of."
    )


def refuse_form(tag: str, content: Json) -> object:
    """Nothing but the forms of this module."""
    raise CheckpointError(f"{tag!r} is no form of a value that this version of Parti knows.")


def encode(
    value: object, other: Callable[[object, Where], Json] = refuse, where: Where = ()
) -> Json:
    """The JSON form of a value."""
    kind = type(value)  # exactly these types: of a subclass only the plain part would come back
    if value is None or kind is bool:
        return value
    if isinstance(value, str) and kind is str:
        return value if _is_text(value) else {"$text": value.encode("utf-8", "surrogatepass").hex()}
    if isinstance(value, int) and kind is int:
        return value if -_LARGEST_INT <= value < _LARGEST_INT else {"$int": hex(value)}
    if isinstance(value, float) and kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if isinstance(value, bytes) and kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple) and kind in (list, tuple):
        items = [encode(item, other, (*where, i)) for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if isinstance(value, dict) and kind in (dict, Counter, OrderedDict):
        content = _encode_entries(value, other, where)
        if kind is dict:
            return content
        if kind is Counter:
            return {"$counter": content}
        return {"$ordered": [content, encode(getattr(value, "_metadata", None), refuse, where)]}
    return other(value, where)


def _encode_entries(
    value: Mapping[Any, object], other: Callable[[object, Where], Json], where: Where
) -> Json:
    if all(type(key) is str and _is_text(key) and not key.startswith("$") for key in value):
        return {key: encode(inner, other, (*where, key)) for key, inner in value.items()}
    pairs = [
        [encode(key, refuse, (*where, key)), encode(inner, other, (*where, key))]
        for key, inner in value.items()
    ]
    return {"$dict": pairs}


def _is_text(value: str) -> bool:
    """Whether UTF-8 has a form for it."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode(form: Json, other: Callable[[str, Json], object] = refuse_form) -> Any:
    """The value that `encode` made the form of."""
    if type(form) is list:
        return _decode_items(form, other)
    if type(form) is not dict:
        return form
    if len(form) == 1:
        ((tag, content),) = form.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, content, other)
    return _entries(((key, decode(inner, other)) for key, inner in form.items()))


def _decode_tagged(tag: str, content: Json, other: Callable[[str, Json], object]) -> Any:
    match tag:
        case "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        case "$int":
            return int(content, 16)
        case "$text":
            return bytes.fromhex(content).decode("utf-8", "surrogatepass")
        case "$bytes":
            return base64.b64decode(content)
        case "$tuple":
            return tuple(_decode_items(content, other))
        case "$dict":
            return _entries((decode(key), decode(inner, other)) for key, inner in content)
        case "$counter":
            return Counter(decode(content, other))
        case "$ordered":
            ordered = OrderedDict(decode(content[0], other))
            versions = decode(content[1])
            if versions is not None:
                ordered._metadata = versions  # type: ignore[attr-defined]
            return ordered
    return other(tag, content)


def _decode_items(forms: list[Json], other: Callable[[str, Json], object]) -> list[Any]:
    values = (decode(form, other) for form in forms)
    return [None if value is LEFT_OUT else value for value in values]


def _entries(pairs: Any) -> dict[Any, Any]:
    return {key: value for key, value in pairs if value is not LEFT_OUT}
