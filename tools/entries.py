"""Entries of a release in the files that people write: texts in, texts out, comments untouched."""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence

from packaging.version import Version

from patchkit.errors import DriftError
from patchkit.recipes.vllm.external import External

_RELEASES = re.compile(r"^releases = \[\n.*?^\]\n", re.MULTILINE | re.DOTALL)
# In build.toml the [[needs]] end where this comment begins.
_BEHIND_NEEDS = "\n# How the locked environment is divided"
_NCCL_RELEASE = re.compile(
    r'^\[\[release\]\]\nversion = "(?P<version>[^"]+)"\n', re.MULTILINE
)
_NCCL_TORCH = re.compile(r"^\[torch\]\n(?:.+\n)*", re.MULTILINE)

Value = str | int | bool


def with_releases(recipe: str, versions: Sequence[str]) -> str:
    """Replace the list of releases in recipes/vllm/recipe.toml."""
    listed = ", ".join(f'"{each}"' for each in sorted(versions, key=Version))
    lines = textwrap.fill(listed, width=99, initial_indent="  ", subsequent_indent="  ")
    return _once(_RELEASES, f"releases = [\n{lines},\n]\n", recipe)


def with_span(readme: str, releases: Sequence[str]) -> str:
    """Say in README.md which releases there are, oldest first."""
    span = rf"\g<1>{releases[0]} to {releases[-1]}"
    return _once(re.compile(r"(patches vLLM )[\d.]+ to \d[\d.]*\d"), span, readme)


def with_needs(build: str, version: str, changed: Mapping[str, Value]) -> str:
    """Append what a build takes differently from a release on, to recipes/vllm/build.toml."""
    fields = "".join(f"{name} = {_toml(value)}\n" for name, value in changed.items())
    head, found, tail = build.partition(_BEHIND_NEEDS)
    if not found:
        raise DriftError(
            f"recipes/vllm/build.toml: no line begins with {_BEHIND_NEEDS.strip()!r}"
        )
    return f'{head}\n[[needs]]\nfrom = "{version}"\n{fields}{found}{tail}'


def with_pin(build: str, version: str, external: External) -> str:
    """Append what a release fetches of a source that the file knows."""
    for block in re.finditer(
        r"^\[\[external\]\]\n.*?(?=^\[\[|\Z)", build, re.MULTILINE | re.DOTALL
    ):
        table = tomllib.loads(block[0])["external"][0]
        if table["name"] == external.name:
            url = "" if external.url == table["url"] else f', url = "{external.url}"'
            line = f'  {{ from = "{version}", pin = "{external.pin}"{url} }},\n'
            # A list in one line is broken up first, so that each pin has a line of its own.
            pins = re.sub(
                r"^pins = \[(\{.*\})\]$",
                r"pins = [\n  \1,\n]",
                block[0],
                flags=re.MULTILINE,
            )
            new = _once(
                re.compile(r"^(pins = \[\n(?:.+\n)*?)\]$", re.MULTILINE),
                rf"\1{line}]",
                pins,
            )
            return build[: block.start()] + new + build[block.end() :]
    raise DriftError(
        f"recipes/vllm/build.toml: no [[external]] is called {external.name!r}"
    )


def with_nccl_torch(recipe: str, series: str, pin: str) -> str:
    """Append which NCCL a torch pins, to recipes/nccl/recipe.toml."""
    return _once(_NCCL_TORCH, rf'\g<0>"{series}" = "{pin}"' + "\n", recipe)


def with_nccl_release(recipe: str, fields: Mapping[str, Value | Sequence[str]]) -> str:
    """Insert a release of NCCL behind those before it, its fields in the order of the file."""
    block = "".join(f"{name} = {_toml(value)}\n" for name, value in fields.items())
    version = Version(str(fields["version"]))
    for found in _NCCL_RELEASE.finditer(recipe):
        if Version(found["version"]) > version:
            return f"{recipe[: found.start()]}[[release]]\n{block}\n{recipe[found.start() :]}"
    return f"{recipe}\n[[release]]\n{block}"


def _toml(value: Value | Sequence[str]) -> str:
    # bool first: it is an int to Python.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"[{', '.join(map(_toml, value))}]"


def _once(pattern: re.Pattern[str], new: str, text: str) -> str:
    result, count = pattern.subn(new, text)
    if count != 1:
        raise DriftError(f"{pattern.pattern!r} is there {count} times, expected 1")
    return result


def without(text: str, version: str) -> str:
    """Take out what the functions above put in for a release, or for a torch of that version."""
    listed = re.escape(f'"{version}"')
    text = re.sub(rf"^  \{{ from = {listed}, .*\n", "", text, flags=re.MULTILINE)
    block = (
        rf"\n\[\[(?:needs|torch|release)\]\]\n(?:from|version) = {listed}\n(?:.+\n)*"
    )
    return re.sub(block, "", text)
