"""Follow the variables of a shell script as far as their values are known without running it."""

from __future__ import annotations

from collections.abc import Iterable

from patchkit.runtime.files.value import Value, unknown

_LARGEST = 1 << 14  # characters of a value; what grows beyond is not followed
_MOST_ITEMS = 300  # words of an array
_TOO_LONG = "it is too long to follow"


class Scope:
    """The variables at one place of a script; a branch has a scope of its own until it is over."""

    def __init__(self, outer: Scope | None = None) -> None:
        self._outer = outer
        self.values: dict[str, Value | None] = {}  # None: unset
        self.local: set[str] = set()

    def get(self, name: str) -> Value | None:
        """Return the value of a name; None if nothing sets it."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope._outer
        return None

    def set(self, name: str, value: Value | None) -> None:
        """Set a variable, or unset it."""
        if value is not None and _is_large(value):
            value = unknown(f"${name}", value.line, _TOO_LONG)
        self.values[name] = value

    def append(self, name: str, value: Value) -> Value:
        """Add a text to a text, or words to an array, and return the whole."""
        before = self.get(name)
        if before is not None and before.why == _TOO_LONG:
            return before
        if before is not None and before.items is not None and value.items is not None:
            value = Value(items=before.items + value.items)
        elif before is not None:
            value = before + value
        self.set(name, value)
        return value

    def merge(self, branches: Iterable[Scope], *, one_is_taken: bool) -> None:
        """Take over what branches set; without ``one_is_taken`` perhaps none of them ran."""
        merged: dict[str, Value | None] = {}
        counts: dict[str, int] = {}
        branches = list(branches)
        for branch in branches:
            for name, value in branch.values.items():
                merged[name] = _either(name, merged[name], value) if name in merged else value
                counts[name] = counts.get(name, 0) + 1
        for name, value in merged.items():
            is_sure = one_is_taken and counts[name] == len(branches)
            self.set(name, value if is_sure else _either(name, self.get(name), value))

    def leave(self, function: Scope) -> None:
        """Take over what a function set, but for its local variables."""
        for name, value in function.values.items():
            if name not in function.local:
                self.set(name, value)


def _either(name: str, one: Value | None, other: Value | None) -> Value | None:
    """Return what a variable holds if either of two values was set."""
    if one is None or other is None:
        value = one or other
        return value.as_default() if value else None
    if one.items is not None and other.items is not None:
        return one if len(one.items) > len(other.items) else other
    if one.why or other.why:
        # A value that the caller can replace, as options of a script do.
        unsure, value = (one, other) if one.why else (other, one)
        return unsure if value.why or not value.text else value.as_default()
    if one.text == other.text:
        return one
    shorter, longer = sorted((one, other), key=lambda each: len(each.text))
    # Of options to which a branch adds some, all may be given.
    if not shorter.text or longer.text.startswith((f"{shorter.text} ", f"{shorter.text}\n")):
        return longer.as_default()
    return unknown(f"${name}", one.line, f"{name} is set to several values")


def _is_large(value: Value) -> bool:
    return len(value.items or ()) > _MOST_ITEMS or value.size > _LARGEST
