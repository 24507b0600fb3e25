"""Render, write, read and check an env file of patchkit, and read the lock of a wheelhouse.

The first line has facts, and a digest of the text::

    # patchkit env: role=head topology=roce vllm=0.25.1 format=env digest=0123456789abcdef

The digest is the start of the sha256 of the whole text, in which zeros stand for the digest. A
file may come from anybody, so each fact is checked: it must be known, and have a certain form. An
edited file is refused. A head's file is copied by somebody, so a
worker does not trust it: it takes over what a rule sets, and a variable that a user added on the
head only if vLLM, NCCL or another known program reads it, if it runs no code and is no secret, and
if its value is no path and valid for the variable. The lock of a wheelhouse names the versions
that a node will have installed.

Each program that reads env files has rules of its own: a shell expands and splits, systemd
unquotes, docker takes the rest of the line as it is. A value that a format cannot hold is refused,
never changed. Reading is stricter than these programs: a line that one of them would ignore, run,
expand or read in another way than the others is an error.
"""

import hashlib
import re
import shlex
import stat
import textwrap
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from ipaddress import ip_network
from pathlib import Path

from patchkit.durable.atomic import replacing, status_of_file
from patchkit.errors import UsageError, translated
from patchkit.frozen import Values, frozen, positional
from patchkit.quoting import quoted
from patchkit.reading import read_bytes, read_text
from patchkit.runtime.rules.presets import find_preset
from patchkit.runtime.rules.releases import read_env_data, refusal
from patchkit.runtime.rules.rule import CHOICES, load_variable_rules
from patchkit.runtime.rules.secret_texts import find_code_risk, is_secret, mask_secrets
from patchkit.runtime.rules.variable_values import find_value_problems, is_placeholder

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"  # POSIX.1-2024, base definitions 8.1
_FORMATS = read_env_data("formats")
_WIDTH = 100  # columns of a comment
_ODD_SHOWN = 5  # characters in a message
_UNFIT = "[\0\ud800-\udfff]"


class Format(StrEnum):
    """Formats of env files; ``env`` is the subset that sh, systemd and docker read the same."""

    ENV = "env"
    SH = "sh"
    SYSTEMD = "systemd"
    DOCKER = "docker"


_OF_SHELLS = (Format.ENV, Format.SH)

# systemd ends a comment at a CR, and before 254 a backslash at its end swallows the next line.
_SKIPPED = re.compile(r"[ \t]*(?:#[^\r\n]*(?<!\\))?(?:\n|\Z)")


@positional
class EnvEntry:
    """A variable to write; ``comment`` says why it is set. A secret has an empty ``value``."""

    name: str
    value: str
    comment: str = ""


def render_assignment(kind: Format, entry: EnvEntry) -> str:
    """Return the line that sets a variable, or the lines that say where a secret comes from.

    Raise UsageError if the name is invalid, a secret has a value, or the format cannot hold it.
    """
    name = entry.name
    if not re.fullmatch(_NAME, name):
        raise refusal("no-name", name=name)
    if is_secret(name) and entry.value:
        raise refusal("secret-value", name=name)
    if trouble := _format_trouble(kind, name, entry.value):
        formats = [
            form for form in Format if not _format_trouble(form, name, entry.value)
        ]
        able = ", ".join(formats) or "none"
        raise refusal("value-in-format", name=name, trouble=trouble, able=able)

    if is_secret(name):
        return _refer_to_secret(kind, name)
    match kind:
        case Format.SH:
            value = entry.value.replace("'", r"'\''")
            return f"export {name}='{value}'"
        case Format.SYSTEMD:
            value = re.sub(r'(["$\\`])', r"\\\1", entry.value)
            return f'{name}="{value}"'
        case _:
            return f"{name}={entry.value}"


def _refer_to_secret(kind: Format, name: str) -> str:
    """Return the lines that say where a secret comes from."""
    form = _FORMATS[kind]
    file_variable = read_env_data("secrets")["files"].get(name, "")

    text = form["secret"]
    if file_variable:
        text += form["from_file"]

    sentence = f"{name} {text}.".format(name=name, file=file_variable)
    lines = render_comment(sentence)
    if "passes" in form:
        lines.append(form["passes"].format(name=name))

    return "\n".join(lines)


def render_comment(text: str) -> list[str]:
    """Return a text as comment lines: each starts with ``# ``, whatever the text contains.

    None ends with a backslash: systemd before 254 would take the variable below for a part of
    the comment.
    """
    one_line = " ".join(text.split())
    signs = [sign if sign.isprintable() else "?" for sign in one_line]
    width = _WIDTH - len("# ")

    lines = textwrap.wrap("".join(signs), width, break_on_hyphens=False)
    return [f"# {line}." if line.endswith("\\") else f"# {line}" for line in lines]


def _format_trouble(kind: Format, name: str, value: str) -> str:
    """Return why the format cannot hold a value, "" if it can."""
    if re.search(_UNFIT, value):
        return "the value holds a NUL, or half a surrogate pair, which is not UTF-8"
    if kind in _OF_SHELLS and re.fullmatch(_FORMATS["shell"]["owns"], name):
        return "a shell sets this variable itself"

    form = _FORMATS[kind]
    if odd_signs := set(re.findall(form["odd"], value)):
        shown = ", ".join(map(repr, sorted(odd_signs)[:_ODD_SHOWN]))
        return f"the value holds {shown}, {form['why']}"

    return ""


def parse_assignments(kind: Format, text: str, where: str) -> Values:
    """Return name → value of the variables that a file sets.

    Raise SourceError, which names ``where`` and the line, for a line that is no assignment.
    """
    statement = re.compile(rf"(?:{_FORMATS[kind]['line']})(?:\n|\Z)")
    variables: dict[str, str] = {}
    position = 0

    while position < len(text):
        match = _SKIPPED.match(text, position) or statement.match(text, position)
        if match is None:
            line = text.count("\n", 0, position) + 1
            raise refusal(
                "no-assignment", file=where, line=line, takes=_FORMATS[kind]["takes"]
            )
        position = match.end()
        parts = match.groupdict()

        value = parts.get("plain")
        quoted = parts.get("quoted")
        if quoted is not None and kind is Format.SYSTEMD:
            value = re.sub(r"\\(.)", r"\1", quoted)
        elif quoted is not None:
            (value,) = shlex.split(quoted)
        if value is not None:
            variables[parts["name"]] = value

    return variables


# Facts in the first line of each env file; files for several nodes also have `head`.
_FACTS = ("role", "topology", "executor", "vllm", "nodes")
_SHOWN = 60  # characters of a name or a value
_LOCK = "requirements.txt"
# A line of a lock: nvidia-nccl-cu13==2.30.7+gb10.0a1b2c ; platform_machine == "aarch64" --hash=…
_LOCKED = re.compile(
    r"^(?P<project>vllm|triton|nvidia-(?P<nccl>nccl)-cu\d+)==(?P<public>[\w.!]+)"
    r"(?:\+[\w.]+)?(?=[\s;]|$)",
    re.MULTILINE,
)
_FROM_HEAD = "`patchkit env --role head -o head.env` on the head, and copy that file"

MARK = "patchkit env:"
BLANK = "0" * 16  # in place of the digest while the digest is computed
_FACT = re.compile(r"[A-Za-z_]+=[!#-\[\]-~]*")
_LINE = re.compile(
    rf"\A# {MARK}(?P<facts>[^\n]*) digest=(?P<digest>[0-9a-f]{{16}})(?=\n)"
)

NODES_MAX = int(read_env_data("network")["plan"]["nodes_max"])
"""The largest number of nodes in a cluster."""

_CHOSEN = ("role", "topology", "twin", "executor", "target", "quantization")
_CHOICES = {**{name: CHOICES[name] for name in _CHOSEN}, "format": tuple(Format)}
_FORMS: Mapping[str, Values] = {
    **{
        name: {"form": "|".join(words), "takes": ", ".join(words)}
        for name, words in _CHOICES.items()
    },
    **read_env_data("facts")["header"],
}

_PRIVATE = 0o600


@frozen
class EnvFile:
    """An env file: the facts of its first line, and its variables.

    ``edited`` says that the text does not match its digest.
    ``extra`` are the variables that a user added with --set.
    """

    where: str
    role: str
    facts: Values
    variables: Values
    edited: bool
    extra: Values


def read_env_file(path: Path, hint: str = "") -> EnvFile:
    """Return an env file of patchkit. Raise UsageError, SourceError or HashMismatchError.

    ``hint`` is for the error of a missing file; the default is the command that writes the file.
    """
    text = read_text(path, hint=hint or quoted("patchkit", "env", "-o", path))
    return parse_env_file(text, str(path))


def parse_env_file(text: str, where: str, *, accept_edited: bool = False) -> EnvFile:
    """Return the env file that a text is; ``where`` is its name in messages.

    Raise SourceError or HashMismatchError as ``read_env_file`` does.
    """
    facts = head_facts(text)
    needed_facts = _FACTS if facts.get("role") == "single" else (*_FACTS, "head")
    missing = [name for name in needed_facts if not facts.get(name)]
    if missing:
        raise refusal("no-env-file", file=where, missing=", ".join(missing))

    is_edited = not is_untouched(text)
    if is_edited and not accept_edited:
        command = quoted("patchkit", "check", Path(where))
        raise refusal("edited", file=where, command=command)

    problems = fact_problems(facts)
    if problems:
        shown = "; ".join(
            f"{name}={facts[name][:_SHOWN]}: {name} {problem}"
            for name, problem in problems.items()
        )
        raise refusal("wrong-facts", file=where, facts=shown)

    kind = Format(facts.get("format", Format.ENV))
    variables = parse_assignments(kind, text, where)
    user_names = facts.get("set", "").split(",")
    return EnvFile(
        where=where,
        role=facts["role"],
        facts=facts,
        variables=variables,
        edited=is_edited,
        extra={name: variables[name] for name in variables if name in user_names},
    )


def read_head(path: Path, role: str) -> EnvFile:
    """Return a head's env file for a worker. Raise UsageError, SourceError or HashMismatchError.

    Raise also if ``role``, that of this node, is not "worker".
    """
    if role != "worker":
        raise refusal("from-without-worker")

    file = read_env_file(path, _FROM_HEAD)
    if file.role != "head":
        raise refusal("no-head-file", file=path, role=file.role)
    return file


def check_transfer(
    head: EnvFile, known_names: Collection[str], local_names: Collection[str]
) -> None:
    """Raise SourceError if the head's file has variables that this node must not take over.

    ``known_names`` are names that a known program reads. ``local_names`` are variables that this
    node sets itself.
    """
    # What rules and the model's preset set on every node.
    rules = load_variable_rules().rules
    shared = [rule.set for rule in rules if rule.scope == "shared"]
    if preset := find_preset(head.facts.get("model", "")):
        shared.append(preset.variables)
    pairs_of_rules = {pair for variables in shared for pair in variables.items()}

    host_names = load_variable_rules().of_host

    lines = []
    for name, value in head.variables.items():
        is_of_rule = name in local_names or (name, value) in pairs_of_rules
        # Each node sets these for itself.
        is_of_head = name in host_names and name not in head.extra
        if is_of_rule or is_of_head:
            continue

        if trouble := _transfer_trouble(head, known_names, name, value):
            lines.append(f"  {head.where}: {name[:_SHOWN]} {trouble}")

    if lines:
        raise refusal("not-taken-over", lines="\n".join(lines))


def _transfer_trouble(
    head: EnvFile, known_names: Collection[str], name: str, value: str
) -> str:
    """Return why another node must not take a variable over, "" if it may."""
    # Only one reason is reported, so the gravest comes first.
    if risk := find_code_risk(name):
        return f"runs code: {risk}"
    if is_secret(name):
        return "is a secret, which belongs into no file that is copied"

    if name not in known_names:
        return "is read by neither vLLM, NCCL nor another program that patchkit knows"

    if name not in head.extra:
        return "is set by no rule of this patchkit, nor was it added with --set"

    if not value.isprintable() or is_placeholder(name, value):
        return "has a value that is none"

    if _is_path(value):
        return f"is {value[:_SHOWN]}: a path, and nobody here knows what lies there"

    # Checked for a worker, where a loopback address is wrong; a single node may have one.
    problems = find_value_problems(name, value, role="worker")
    return "; ".join(f"is {value[:_SHOWN]}: {problem.what}" for problem in problems)


def _is_path(value: str) -> bool:
    """Return whether a value has a slash, and is not a network."""
    try:
        ip_network(value, strict=False)
    except ValueError:
        return "/" in value
    return False


def locked_versions(place: Path) -> Values:
    """Return project → public version of vllm, triton and nccl in a lock.

    ``place`` is the lock or its wheelhouse. Raise UsageError if it cannot be read, or names none
    of the projects or several versions of one.
    """
    path = place / _LOCK if place.is_dir() else place
    text = read_text(path, hint="name a wheelhouse, or its requirements.txt")

    locked: dict[str, str] = {}
    for match in _LOCKED.finditer(text):
        name = match["nccl"] or match["project"]
        version = match["public"]
        first = locked.setdefault(name, version)
        if first != version:
            several = f"{first} and {version}"
            raise refusal("locks-several", file=path, project=name, versions=several)

    if not locked:
        raise refusal("locks-nothing", file=path, projects="vllm, triton, nccl")

    return locked


def render_env_file(
    kind: Format, header: Sequence[str], entries: Sequence[EnvEntry]
) -> str:
    """Return the text of an env file.

    ``header`` has the facts (``role=head …``) and then lines for comments. Raise UsageError if an
    entry or a fact is invalid.
    """
    first, *notes = header or [""]
    head = [f"# {MARK} {first} format={kind} digest={BLANK}"]
    for note in notes:
        head += render_comment(note)

    blocks = [head]
    for entry in entries:
        assignment = render_assignment(kind, entry)
        blocks.append([*render_comment(entry.comment), assignment])

    text = "\n\n".join("\n".join(block) for block in blocks)
    if not head_facts(f"{text}\n"):
        raise UsageError(f"{first!r} cannot stand in the first line of an env file")

    return with_digest(f"{text}\n")


def head_facts(text: str) -> Values:
    """Return the facts of the first line, {} if the line is not one that patchkit writes."""
    match = _LINE.match(text)
    facts = match["facts"].split() if match else []
    if not all(map(_FACT.fullmatch, facts)):
        return {}  # patchkit does not write such a line: it is damaged or hostile

    return dict(fact.split("=", 1) for fact in facts)


def with_digest(text: str) -> str:
    """Return the text with its digest, or unchanged if its first line has no digest."""
    match = _LINE.match(text)
    if not match:
        return text

    start, end = match.span("digest")
    blank = text[:start] + BLANK + text[end:]

    # Half a surrogate pair cannot be encoded as UTF-8; it must not raise here.
    sha256 = hashlib.sha256(blank.encode(errors="surrogatepass"))
    digest = sha256.hexdigest()[: len(BLANK)]
    return text[:start] + digest + text[end:]


def is_untouched(text: str) -> bool:
    """Return whether patchkit wrote this text and nobody has changed it since."""
    return _LINE.match(text) is not None and with_digest(text) == text


def fact_problems(facts: Values) -> Values:
    """Return name → what is wrong, such as ``takes …``, for each fact that is wrong."""
    problems = {}

    for name, value in facts.items():
        if name not in _FORMS:
            problems[name] = "is not a fact that this patchkit knows"
        elif not _is_fact(name, value):
            takes = _FORMS[name]["takes"].format(most=NODES_MAX)
            problems[name] = f"takes {takes}"

    return problems


def _is_fact(name: str, value: str) -> bool:
    """Return whether a fact has its form, and its value is in range or names a known preset."""
    if not re.fullmatch(_FORMS[name]["form"], value, re.ASCII):
        return False

    match name:
        case "nodes":
            return int(value) <= NODES_MAX
        case "model":
            preset = find_preset(value)
            return preset is not None and preset.id == value
        case _:
            return True


def write(
    path: Path, text: str, *, force: bool, private: bool, by: str = "patchkit env"
) -> str:
    """Write a file, all or nothing, and return "created", "unchanged" or "replaced".

    An existing file keeps its mode, but with ``private`` only its owner may read the file. ``by``
    is the command that writes, for the message. Raise UsageError, with the difference, if the
    existing file was not written by patchkit or was edited since, unless ``force`` is set. Raise
    UsageError in any case if the path is a link or another thing that is no file. Raise
    StorageError if the file cannot be written; then nothing has changed.
    """
    with translated(at=path):
        status = status_of_file(path)
        # Do not follow a link: since the check of the status the path may have become one.
        old = read_bytes(path, follow=False) if status else b""

        # A file with the same bytes is written again if others may read the secret in it.
        is_too_open = private and status and stat.S_IMODE(status.st_mode) & ~_PRIVATE

        if status and old == text.encode() and not is_too_open:
            return "unchanged"

        if status and not force:
            _check_replaceable(path, old.decode(errors="replace"), text, by)

        with replacing(path, private=private) as file:
            file.write(text.encode())
    return "replaced" if status else "created"


def _check_replaceable(path: Path, old: str, new: str, by: str) -> None:
    """Raise UsageError, with the difference, if the old text is not patchkit's or was edited."""
    if old == new or is_untouched(old):
        return

    import difflib  # 5 ms, and seldom needed

    difference = difflib.unified_diff(
        mask_secrets(old).splitlines(),
        mask_secrets(new).splitlines(),
        str(path),
        by,
        lineterm="",
    )

    heading = f"{path}: is there already, with another content"
    raise UsageError(
        "\n".join([heading, *difference]),
        why="patchkit did not write it, or it was edited since",
        hint="--force replaces it; or name another file",
    )
