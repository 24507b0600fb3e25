"""Find secrets in logs, errors and reports: behind names, flags and headers, and in URLs. Pure.

All that patchkit shows is redacted by this module: texts by ``mask_secrets``, reports by
``secret_spans``. Which variables hold secrets, and which make vLLM run code, is data:
recipes/env/secrets.toml and code.toml.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase, translate
from functools import cache

from patchkit.runtime.rules.releases import read_env_data

Span = tuple[int, int]
"""The positions in a text at which a part of it begins and ends."""

Spans = Iterator[Span]

_MASK = "(masked)"
_SHORTEST_FLAG = 6  # characters; a shorter beginning of a flag is ambiguous
_QUOTES = "'\"`"
_LONGEST = 4000  # characters of a value
# A name, and the signs or words between the name and its value. A backslash before a quote is from
# JSON in a string of JSON.
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
# What may stand before the value itself: pydantic's SecretStr( or the scheme of a header.
_BEFORE = re.compile(r"Secret\w*\(|(?:Bearer|Basic|Token|Digest)[ \t]+", re.IGNORECASE)
_ASSIGNS = re.compile(r"[=:>]|\bset\b")
_SHELL_SETS = re.compile(
    r"(?<![\w-])(?P<word>setenv|set)(?P<flags>(?:[ \t]+--?[A-Za-z][\w-]{0,20}){1,4})?[ \t]+\Z"
)
_COMMAND = 100  # characters before a name in which a command of a shell is searched
_AROUND = " \t\r\\\"'"
_LINE_BEGINS = re.compile(r"[ \t]*(?:export[ \t]+|Environment=|-e[ \t]+)?")


@cache
def _secret_pattern() -> re.Pattern[str]:
    """Return one pattern for all names of secrets, for speed: logs have very many names."""
    patterns = map(translate, read_env_data("secrets")["names"])
    return re.compile("|".join(patterns))


def is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret. Case does not matter."""
    upper = name.upper()

    if upper in read_env_data("secrets")["except"]:
        return False

    return _secret_pattern().match(upper) is not None


def secret_flag(word: str) -> str:
    """Return the flag of `vllm serve` that a word means and whose value is a secret, else "".

    The word may be ``--flag=value``, and the beginning of a flag, as vLLM's parser allows.
    """
    written = re.split(r"[=.]", word, maxsplit=1)[0]
    name = written.replace("_", "-")

    # A shorter beginning fits several flags, so vLLM refuses it.
    if len(name) < _SHORTEST_FLAG:
        return ""

    flags = read_env_data("secrets")["flags"]
    return next((flag for flag in flags if flag.startswith(name)), "")


def find_code_risk(name: str) -> str:
    """Return how a variable or flag of this name makes vLLM run code, "" if it is not known to."""
    for row in read_env_data("code")["code"]:
        is_exception = name in row.get("except", ())
        is_named = any(fnmatchcase(name, form) for form in row["names"])
        if is_named and not is_exception:
            return str(row["reason"])

    return ""


def mask_secrets(text: str) -> str:
    """Return a text in which each secret is replaced by ``(masked)``."""
    parts = []
    end = 0

    for start, stop in secret_spans(text):
        parts += [text[end:start], _MASK]
        end = stop

    parts.append(text[end:])
    return "".join(parts)


def secret_spans(text: str) -> list[Span]:
    """Return the spans of all secrets in a text, in order and without overlaps."""
    spans = list(_spans_by_form(text))
    end = 0

    for name in _NAME.finditer(text):
        # Skip a name inside a secret, since a long line of names would take too much time.
        if name.end() < end:
            continue

        for span in _values_after(text, name):
            spans.append(span)
            end = max(end, span[1])

    return _merge_spans(spans)


def _spans_by_form(text: str) -> Spans:
    """Yield the spans of secrets that have the form of a key, or follow a certain program."""
    texts = read_env_data("secrets")["texts"]
    tokens = "|".join(texts["tokens"])

    for form in (*texts["forms"], rf"(?<![A-Za-z0-9])(?P<value>{tokens})"):
        for match in re.finditer(form, text, re.IGNORECASE):
            if not is_readable(match["value"], quoted=False):
                yield match.span("value")


def _merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, with overlapping spans merged into one."""
    merged: list[Span] = []

    for start, stop in sorted(spans):
        if merged and start < merged[-1][1]:
            start, end = merged.pop()
            stop = max(stop, end)
        merged.append((start, stop))

    return merged


@cache
def holds_secret(name: str) -> bool:
    """Return whether a variable, a header or a key of JSON with this name holds a secret."""
    texts = read_env_data("secrets")["texts"]
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_")

    if matches_one(texts["except"], words):
        return False
    return is_secret(words) or matches_one(texts["names"], words)


def matches_one(forms: Sequence[str], text: str) -> bool:
    """Return whether one of the regular expressions matches a whole text. Case does not matter."""
    return any(re.fullmatch(form, text, re.IGNORECASE) for form in forms)


def _values_after(text: str, name: re.Match[str]) -> Spans:
    """Yield the spans of secrets behind a name: the value of a flag, of a variable, or of a key."""
    assigns = _ASSIGNS.search(name["sign"]) is not None
    dashes = name["dashes"] or ""
    # If only a blank or a comma separates name and value, they count only in a shell's
    # `set NAME VALUE`.
    if not (dashes or assigns or _is_set_by_shell(text, name)):
        return

    flag = dashes and secret_flag(dashes + name["name"])
    takes_several = flag and not assigns
    if takes_several:
        yield from _several_values(text, name.end())
    elif not flag and not holds_secret(name["name"]):
        return
    elif assigns and not dashes:
        yield from _named_values(text, name)
    else:
        yield from _value_at(text, name.end())


def _several_values(text: str, start: int) -> Spans:
    """Yield the secrets of a flag that takes several values, until a value is no secret."""
    while values := list(_value_at(text, start)):
        yield from values

        next_value = _NEXT.match(text, values[0][1])
        if next_value is None:
            return

        start = next_value.end()


def _is_set_by_shell(text: str, name: re.Match[str]) -> bool:
    """Return whether `set` of fish or `setenv` of csh before a name makes it a variable's name.

    These words also occur in prose. So a plain `set` counts only if the value is not all letters.
    """
    begin = max(0, name.start() - _COMMAND)
    command = _SHELL_SETS.search(text, begin, name.start())
    if command is None or not name["sign"].isspace():
        return False

    start = name.end()
    value = _QUOTED.match(text, start) or _BARE.match(text, start)
    if value is None:
        return False

    is_plain_set = command["word"] == "set" and not command["flags"]
    return not (is_plain_set and value[0].isalpha())


def _named_values(text: str, name: re.Match[str]) -> Spans:
    """Yield the secrets in the value of a name: a list, the rest of a line, or one word."""
    start = name.end()
    line_start = text.rfind("\n", 0, name.start()) + 1
    is_of_line = _LINE_BEGINS.fullmatch(text, line_start, name.start()) is not None
    is_quoted_key = name["sign"].lstrip("\\").startswith(tuple(_QUOTES))
    is_list = text.startswith(("[", "("), start)

    # In a string within a string, the quotes of the value have backslashes.
    is_escaped = text.startswith(('\\"', "\\'"), start)
    is_pair = name["quote"] and not (is_quoted_key or is_escaped)
    is_assignment = name["sign"] == "=" and is_of_line

    if is_pair or is_assignment:
        yield from _rest_of_line(text, start, name["quote"] if is_pair else "")
    elif is_list and not text.startswith(_MASK, start):
        yield from _listed_values(text, start + 1)
    else:
        yield from _value_at(text, start)


def _rest_of_line(text: str, start: int, quote: str) -> Spans:
    """Yield a value up to a quote or the line's end, which may hold blanks and further = signs."""
    end = text.find("\n", start)
    line = text[start:] if end < 0 else text[start:end]
    value = line.partition(quote)[0] if quote else line

    begin = start + len(value) - len(value.lstrip(_AROUND))
    stop = start + len(value.rstrip(_AROUND))

    yield from _secret_at(text, begin, stop, quoted=True)


def _listed_values(text: str, start: int) -> Spans:
    """Yield the secrets in a list whose bracket is before ``start``. It ends at a nested list."""
    for item in _ITEM.finditer(text, start, start + _LONGEST):
        is_nested = item.start() > start and text[item.start() - 1] in "[("

        if item["close"] or is_nested:
            return

        is_quoted = item["bare"] is None
        span = item.span("value" if is_quoted else "bare")
        yield from _secret_at(text, *span, quoted=is_quoted)


def _value_at(text: str, start: int) -> Spans:
    """Yield the value that begins at ``start``, if it is a secret."""
    if scheme := _BEFORE.match(text, start):
        start = scheme.end()

    quoted = _QUOTED.match(text, start) or _UNTIL_END.match(text, start)
    value = quoted or _BARE.match(text, start)

    if value:
        yield from _secret_at(text, *value.span("value"), quoted=quoted is not None)


def _secret_at(text: str, start: int, stop: int, *, quoted: bool) -> Spans:
    """Yield a value if it is a secret, without a header's scheme and the end mark of a sentence."""
    if scheme := _BEFORE.match(text, start, stop):
        start = scheme.end()

    if not quoted:
        stop = start + len(text[start:stop].rstrip(":.!?>"))

    if start < stop and not is_readable(text[start:stop], quoted=quoted):
        yield start, stop


def is_readable(value: str, *, quoted: bool) -> bool:
    """Return whether a value is not a secret itself: a reference to one, a path, a dummy, prose."""
    texts = read_env_data("secrets")["texts"]

    if matches_one(texts["readable"], value):
        return True
    return not quoted and matches_one(texts["prose"], value)
