"""Find secrets in logs, errors and reports: after their names, flags and headers, in URLs. Pure.

The one redactor of all that is shown: ``mask_secrets`` for texts, ``secret_spans`` for reports.
Which variables are secrets or run code is data: recipes/env/secrets.toml, code.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase, translate
from functools import cache

from patchkit.runtime.rules.releases import read_env_data

_MASK = "(masked)"
_QUOTES = "'\"`"
_LONGEST = 4000  # characters of a value
# A name, and what leads from it to its value. Backslashes before quotes: JSON within JSON.
_NAME = re.compile(
    r"""(?<![\w-])(?<!\$\{)(?P<quote>["'`])?(?P<dashes>--?)?(?P<name>[A-Za-z][\w-]{1,80})
    (?(dashes)(?:\.[\w.+-]+)?)
    (?P<sign>\\*["']?\]?[ \t]{0,3}(?:=>|->|:=|[=:])[ \t]{0,3}(?:\n[ \t]*-[ \t]+)?
    |["'`]?[ \t]+(?:is|was)[ \t]+(?:now[ \t]+)?set[ \t]+to:?[ \t]+
    |["']?,?\s+["']?value["']?:\s*
    |["']\s{0,99},\s{0,99}(?=[bru]?["'])
    |["']?[ \t]*\n[ \t]*-[ \t]+
    |["']?[ \t]+)""",
    re.VERBOSE,
)
_QUOTED = re.compile(
    rf"""[bru]?(?P<quote>\\*["'])(?P<value>(?:(?!(?P=quote))[^\n\\]|\\[^\n]){{0,{_LONGEST}}}?)"""
    r"(?P=quote)"
)
_UNTIL_END = re.compile(r"""\\*["'](?P<value>[^\n]+)""")
_BARE = re.compile(r"""(?P<value>[^\s,;"'`\\}\])&|]+)""")
_ITEM = re.compile(
    rf"""{_QUOTED.pattern}|(?P<bare>[^\s,"'\\\[\]()]+)|(?P<close>[\])])"""
)
_NEXT = re.compile(r"""["']?[ \t]*(?:,\s{0,99}|[ \t])(?=[bru]?["']?[^-\s&|<>;"'])""")
# A class or the scheme of a header, before the value itself.
_BEFORE = re.compile(r"Secret\w*\(|(?:Bearer|Basic|Token|Digest)[ \t]+", re.IGNORECASE)
_ASSIGNS = re.compile(r"[=:>]|\bset\b")
_SHELL_SETS = re.compile(
    r"(?<![\w-])(?P<word>setenv|set)(?P<flags>(?:[ \t]+--?[A-Za-z][\w-]{0,20}){1,4})?[ \t]+\Z"
)
_COMMAND = 100  # characters before a name that say whether a shell sets it
_LINE_BEGINS = re.compile(r"[ \t]*(?:export[ \t]+|Environment=|-e[ \t]+)?")


@cache
def _secret_pattern() -> re.Pattern[str]:
    """Return all patterns of secrets in one: files have hundreds of thousands of names."""
    return re.compile("|".join(map(translate, read_env_data("secrets")["names"])))


def is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret, in upper or lower case."""
    upper, excepted = name.upper(), read_env_data("secrets")["except"]
    return upper not in excepted and _secret_pattern().match(upper) is not None


def secret_flag(word: str) -> str:
    """Return the flag of `vllm serve` that a word gives a secret, as its parser reads it; or ""."""
    name = re.split(r"[=.]", word, maxsplit=1)[0].replace("_", "-")
    # A shorter beginning is that of other flags, too: vLLM refuses it.
    flags = read_env_data("secrets")["flags"] if len(name) > 5 else ()
    return next((flag for flag in flags if flag.startswith(name)), "")


def runs_code(name: str) -> str:
    """Return how a variable of this name runs code; empty if it is not known to."""
    for row in read_env_data("code")["code"]:
        matches = any(fnmatchcase(name, form) for form in row["names"])
        if matches and name not in row.get("except", ()):
            return str(row["reason"])
    return ""


def mask_secrets(text: str) -> str:
    """Return a text with ``(masked)`` for each secret in it."""
    parts, end = [], 0
    for start, stop in secret_spans(text):
        parts += [text[end:start], _MASK]
        end = stop
    return "".join((*parts, text[end:]))


def secret_spans(text: str) -> list[tuple[int, int]]:
    """Return where the secrets of a text begin and end, in order."""
    spans = [
        match.span("value")
        for form in _secret_forms()
        for match in form.finditer(text)
        if not is_readable(match["value"], quoted=False)
    ]
    end = 0
    for name in _NAME.finditer(text):
        if (
            name.end() < end
        ):  # its value is in one that is masked: a line of names takes long
            continue
        values = list(_values_after(text, name))
        spans += values
        end = max((end, *(stop for _start, stop in values)))

    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


@cache
def holds_secret(name: str) -> bool:
    """Return whether a variable, a header or a key of JSON holds a secret."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_")
    texts = read_env_data("secrets")["texts"]
    known = is_secret(plain) or matches_one(texts["names"], plain)
    return known and not matches_one(texts["except"], plain)


def matches_one(forms: Sequence[str], text: str) -> bool:
    """Return whether a text has one of these forms, as a whole and in whatever case."""
    return any(re.fullmatch(form, text, re.IGNORECASE) for form in forms)


@cache
def _secret_forms() -> tuple[re.Pattern[str], ...]:
    """Return the forms of what is a secret by itself, or by the program that takes it."""
    texts = read_env_data("secrets")["texts"]
    forms = (
        *texts["forms"],
        rf"(?<![A-Za-z0-9])(?P<value>{'|'.join(texts['tokens'])})",
    )
    return tuple(re.compile(form, re.IGNORECASE) for form in forms)


def _values_after(text: str, name: re.Match[str]) -> Iterator[tuple[int, int]]:
    """Yield the secrets that follow a name: the value of a flag, of a variable, or of a key."""
    assigns = _ASSIGNS.search(name["sign"]) is not None
    if name["dashes"]:
        yield from _flag_values(text, name, several=not assigns)
    elif assigns:
        if holds_secret(name["name"]):
            yield from _named_values(text, name)
    # Behind a blank or a comma only a shell's own word makes it a value.
    elif _is_set_by_shell(text, name) and holds_secret(name["name"]):
        yield from _value_at(text, name.end())


def _flag_values(
    text: str, name: re.Match[str], *, several: bool
) -> Iterator[tuple[int, int]]:
    """Yield the values of a flag, if it takes a secret; `--api-key` takes several."""
    flag = secret_flag(name["dashes"] + name["name"])
    if flag and several:
        yield from _several_values(text, name.end())
    elif flag or holds_secret(name["name"]):
        yield from _value_at(text, name.end())


def _several_values(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Yield the values of a flag that takes several, until one that is no secret."""
    while values := list(_value_at(text, at)):
        yield from values
        following = _NEXT.match(text, values[0][1])
        if following is None:
            return
        at = following.end()


def _is_set_by_shell(text: str, name: re.Match[str]) -> bool:
    """Return whether a shell sets a name there: fish's and csh's words stand in sentences, too."""
    command = _SHELL_SETS.search(text, max(0, name.start() - _COMMAND), name.start())
    if command is None or not name["sign"].isspace():
        return False

    value = _QUOTED.match(text, name.end()) or _BARE.match(text, name.end())
    plain = command["word"] == "set" and not command["flags"]
    return value is not None and not (plain and value[0].isalpha())


def _named_values(text: str, name: re.Match[str]) -> Iterator[tuple[int, int]]:
    """Yield the value of a name, or those in a list."""
    at, quote, sign = name.end(), name["quote"], name["sign"]
    begin = text.rfind("\n", 0, name.start()) + 1
    end = text.find("\n", at) % (len(text) + 1)
    if quote and not sign.lstrip("\\").startswith(tuple(_QUOTES)):  # "NAME=value"
        stop = text.find(quote, at, end) % (end + 1)
        yield from _secret_at(text, at, stop - (text[stop - 1] == "\\"), quoted=True)
    elif sign == "=" and _LINE_BEGINS.fullmatch(text, begin, name.start()):
        # To the end of the line: such a value may hold blanks, quotes and further = signs.
        value = text[at:end]
        stop = at + len(value.rstrip(" \t\r\"'"))
        yield from _secret_at(
            text, end - len(value.lstrip(" \t\"'")), stop, quoted=True
        )
    elif text[at : at + 1] in ("[", "(") and not text.startswith(_MASK, at):
        yield from _listed_values(text, at + 1)
    else:
        yield from _value_at(text, at)


def _listed_values(text: str, start: int) -> Iterator[tuple[int, int]]:
    """Yield the values of a list that begins before ``start``, until it ends or has another."""
    for item in _ITEM.finditer(text, start, start + _LONGEST):
        is_nested = item.start() > start and text[item.start() - 1] in "[("
        if item["close"] or is_nested:
            return
        kind = "value" if item["bare"] is None else "bare"
        yield from _secret_at(text, *item.span(kind), quoted=kind == "value")


def _value_at(text: str, at: int) -> Iterator[tuple[int, int]]:
    """Yield the value that begins at a place, if it is a secret."""
    before = _BEFORE.match(text, at)
    at = before.end() if before else at
    quoted = _QUOTED.match(text, at) or _UNTIL_END.match(text, at)
    if found := quoted or _BARE.match(text, at):
        yield from _secret_at(text, *found.span("value"), quoted=quoted is not None)


def _secret_at(
    text: str, start: int, stop: int, *, quoted: bool
) -> Iterator[tuple[int, int]]:
    """Yield a value without its scheme and the sign that ends a sentence, if it is a secret."""
    if scheme := _BEFORE.match(text, start, stop):
        start = scheme.end()
    if not quoted:
        stop = start + len(text[start:stop].rstrip(":.!?>"))
    if start < stop and not is_readable(text[start:stop], quoted=quoted):
        yield start, stop


def is_readable(value: str, *, quoted: bool) -> bool:
    """Return whether a value stands in the place of a secret: a reference, a path, a dummy."""
    texts = read_env_data("secrets")["texts"]
    return matches_one(
        texts["readable"] if quoted else (*texts["readable"], *texts["prose"]), value
    )
