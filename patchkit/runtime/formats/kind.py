"""Tell what kind of file a text is, by its name and else by what stands in it."""

from __future__ import annotations

import re
from pathlib import PurePath

from patchkit.runtime.files.content import FileKind

_ENV_LINE = re.compile(r"[ \t]*(?:export[ \t]+)?(?!Environment=)[A-Za-z_]\w*(?:=.*)?")
_ASSIGNED = re.compile(r"(?:export[ \t]+)?[A-Z_][A-Z0-9_]*=.*")
# Endings that say nothing of the kind.
_VARIANTS = re.compile(r"\.(example|sample|template|tmpl|tpl|dist|local|bak|j2|jinja2?|orig|in)$")
_NAMES = [
    (
        re.compile(r"\.(sh|bash|zsh|ksh|sbatch|slurm)$|^\.?(bashrc|profile|bash_profile)$"),
        FileKind.SHELL,
    ),
    (re.compile(r"\.py$"), FileKind.PYTHON),
    (re.compile(r"\.ya?ml$"), FileKind.YAML),
    (re.compile(r"\.json$"), FileKind.JSON),
    (
        re.compile(r"^(dockerfile|containerfile)([._-].*)?$|\.(dockerfile|containerfile)$"),
        FileKind.DOCKERFILE,
    ),
    (re.compile(r"\.(service|timer|slice|container|pod)$"), FileKind.SYSTEMD),
    (re.compile(r"^\.?env$|\.env$|^\.env\.|^environment$"), FileKind.ENV),
]
_TEXTS = [
    (re.compile(r"#!.*\bpython"), FileKind.PYTHON),
    (re.compile(r"#!"), FileKind.SHELL),
    (re.compile(r"\s*\{"), FileKind.JSON),
    (re.compile(r"(?:[ \t]*(?:[#;][^\n]*)?\n)*\[[A-Z]\w*\][ \t]*\n"), FileKind.SYSTEMD),
    (
        re.compile(
            r"(?:[ \t]*(?:#[^\n]*)?\n)*(?:ARG[ \t][^\n]*\n\s*)*FROM[ \t]+\S+", re.IGNORECASE
        ),
        FileKind.DOCKERFILE,
    ),
    (
        re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*(?:---|[\w.-]+:(?:[ \t]+[^\n]*)?|-[ \t]+[^\n]*)\n"),
        FileKind.YAML,
    ),
]


def kind_of(text: str, where: str) -> FileKind:
    """Return the kind of a file; ``where`` is its name, - and "" for none."""
    kind = kind_by_name(where)
    if kind is FileKind.ENV and text.startswith("{"):
        return FileKind.JSON  # `patchkit env --format json`, under whatever name
    if kind:
        return kind
    if is_env_file(text):
        return FileKind.ENV
    for pattern, kind in _TEXTS:
        if pattern.match(text):
            return kind
    return FileKind.ENV if _is_listing(text) else FileKind.SHELL


def kind_by_name(where: str) -> FileKind | None:
    """Return the kind that a file's name says, None if it says none."""
    name = PurePath(where).name.lower()
    while shorter := _VARIANTS.sub("", name):
        if shorter == name:
            break
        name = shorter
    return next((kind for pattern, kind in _NAMES if pattern.search(name)), None)


def is_env_file(text: str) -> bool:
    """Return whether a text is a list of NAME=value alone, as systemd and docker read it."""
    lines = [line for line in text.splitlines() if line.strip() and not _is_comment(line)]
    return bool(lines) and not text.startswith("#!") and all(map(_ENV_LINE.fullmatch, lines))


def _is_listing(text: str) -> bool:
    """Return whether a text that is no script mainly shows variables, as `env` prints them."""
    lines = [line for line in text.splitlines() if line.strip() and not _is_comment(line)]
    return 2 * sum(1 for line in lines if _ASSIGNED.fullmatch(line)) > len(lines)


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith(("#", ";"))
