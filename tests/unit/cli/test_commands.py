"""Every command of patchkit that code, recipes and documents name is one that the CLI takes."""

import ast
import itertools
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import click

from patchkit.cli import group
from patchkit.cli.runtime.env import env_command
from patchkit.cli.verbs import VERBS
from patchkit.cli.wheel.build import build_nccl_wheel
from patchkit.errors import PatchkitError
from patchkit.runtime.envfile.env_file import NODES_MAX, Format
from patchkit.runtime.rules import rule
from patchkit.runtime.rules.presets import named_preset
from patchkit.wheel.build.machine import MACHINES
from support import readme
from support.terminal import runnable

ROOT = Path(__file__).parents[3]
PLACES = (
    "*.md",
    "docs/*.md",
    "patchkit/**/*.py",
    "recipes/**/*.py",
    "recipes/**/*.toml",
)
TEXTS = sorted({it for at in PLACES for it in ROOT.glob(at)})
# In backticks, after a prompt or another command, in a substitution, or at the beginning of a line
# or a message.
COMMAND = re.compile(
    r"(`|\$ |&& |\$\(|^)(?:sudo )?(?:\.venv/bin/)?"
    r"patchkit ((?![\d.]+ )(?:(?!`|  #|\s[|&;<>]|[|;)]|\\n)[^\n])+)",
    re.MULTILINE,
)
HOLE = "X"  # what stands for a word that is put in
REST = "…"  # for any number of them


def commands(place):
    """Line and words of each command that a file names."""
    text = place.read_text(encoding="utf-8")
    if place.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.JoinedStr(values=parts):
                    said = "".join(
                        p.value if isinstance(p, ast.Constant) else HOLE for p in parts
                    )
                case ast.Constant(value=str(said)):
                    pass
                case ast.Call(func=ast.Name(id="quoted" | "next_step"), args=args):
                    words = [*itertools.chain(*map(_words, args))]
                    if words[:1] == ["patchkit"]:
                        yield node.lineno, words[1:]
                    continue
                case ast.Call(func=ast.Name(id="next_verb"), args=args):
                    yield node.lineno, [*itertools.chain(*map(_words, args))]
                    continue
                case _:
                    continue
            yield from ((node.lineno, words) for words in _named(said))
    elif place.suffix == ".toml":
        for said in _strings(tomllib.loads(text)):
            # The line in which it begins: of one that escapes something, only the file is known.
            number = text[: max(text.find(said), 0)].count("\n") + 1
            yield from ((number, words) for words in _named(said))
    else:
        yield from (
            (number, words)
            for number, line in enumerate(text.replace("\\\n", "  ").splitlines(), 1)
            for words in _named(line)
        )


def _strings(value):
    match value:
        case str():
            yield value
        case dict() | list():
            for inner in value.values() if isinstance(value, dict) else value:
                yield from _strings(inner)


def _words(node):
    match node:
        case ast.Constant(value=value):
            return [str(value)]
        case ast.Starred(value=ast.Call(func=ast.Name(id="program"))):
            return ["patchkit"]
        case ast.Starred():
            return [REST]
        case _:
            return [HOLE]


def _named(said):
    for found in COMMAND.finditer(said):
        try:
            words = shlex.split(re.sub(r"[][]", "", found[2]).rstrip(",.:"))
        except ValueError:  # an apostrophe: prose
            continue
        # Outside of backticks a sentence may begin with the name.
        if found[1] == "`" or words[0] in VERBS:
            yield [REST if word == "..." else word for word in words]


def refused(words):
    """What the CLI says against a command; "" if it would run it."""
    known = [*itertools.takewhile(lambda word: word != REST, words)]
    command, context = group, click.Context(group, info_name="patchkit")
    try:
        while (
            isinstance(command, click.Group) and known and not known[0].startswith("-")
        ):
            if known[0] in (HOLE, "VERB"):
                return ""
            name, command, known = command.resolve_command(context, known)
            context = click.Context(command, parent=context, info_name=name)
        if default := getattr(command, "default", ""):  # a verb that need not be named
            command = command.commands[default]
            context = click.Context(command, parent=context, info_name=default)
        values, left, _ = command.make_parser(context).parse_args([*known])
        for parameter in command.params:
            value = values.get(parameter.name)
            chosen = isinstance(parameter.type, click.Choice) and isinstance(value, str)
            if chosen and not value.isupper():  # which is a placeholder
                parameter.type.convert(value, parameter, context)
    except click.BadOptionUsage as error:  # "what `probe --save` writes"
        return "" if known[-1] == error.option_name else error.message
    except (click.ClickException, PatchkitError) as error:
        return getattr(error, "message", str(error))
    extra = [word for word in left if word != HOLE]
    return f"does not take {extra[0]}" if extra and REST not in words else ""


def test_every_command_that_is_named_is_one_that_the_cli_takes():
    found = [(place, *named) for place in TEXTS for named in commands(place)]
    wrong = [
        f"{place.relative_to(ROOT)}:{line}: patchkit {' '.join(map(str, words))}: {why}"
        for place, line, words in found
        if (why := refused(words))
    ]
    assert len(found) > 200
    assert not wrong, "\n".join(wrong)


def test_every_verb_takes_json():
    found = dict(runnable())
    without = {
        words
        for words, command in found.items()
        if not any("--json" in option.opts for option in command.params)
    }
    assert {("apply",), ("env",), ("env", "explain"), ("net", "plan")} <= found.keys()
    assert not without


def test_the_loop_over_models_runs_as_pasted():
    page = (ROOT / "docs/bench.md").read_text(encoding="utf-8")
    (loop,) = re.findall(r"^for model in .*?^done$", page, re.MULTILINE | re.DOTALL)
    # The shell does the loop, and the command line judges what it is asked for.
    shown = "patchkit() { printf '%q ' \"$@\"; echo; }\n"
    done = subprocess.run(
        ["bash", "-euc", shown + loop], capture_output=True, text=True, check=True
    )
    asked = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [words[0] for words in asked] == ["up", "bench"] * 2
    assert [refused(words) for words in asked] == [""] * 4
    assert [words[1] for words in asked] == [
        named_preset(words[1]).id for words in asked
    ]
    assert len({words[3] for words in asked if words[0] == "bench"}) == 2


def test_a_release_of_vllm_that_is_an_example_is_the_one_that_readme_takes():
    """In help and in what comes next: who pastes it gets the release that everything else takes."""
    before = r"patchkit \w+ vllm==|(?:release:|such as) vllm==|--vllm |write it as |for example "
    example = re.compile(rf"(?:{before})(\d+\.\d+\.\d+)")
    sources = [place for place in TEXTS if place.suffix in {".py", ".toml"}]
    named = {
        f"{place.relative_to(ROOT)}: {release}"
        for place in sources
        for release in example.findall(place.read_text(encoding="utf-8"))
        if not release.startswith("2.")  # of NCCL
    }
    assert len(named) > 5
    assert {row for row in named if not row.endswith(f": {readme.release()}")} == set()


def test_options_of_verbs_take_what_the_rooms_below_take():
    """options.toml repeats words and a number that other files decide."""
    options = {option.name: option.type for option in env_command.params}
    facts = rule.CHOICES

    assert list(options["kind"].choices) == [*map(str, Format)]
    assert options["nodes"].max == NODES_MAX
    assert list(options["topology"].choices) == ["auto", *facts["topology"][1:]]
    assert list(options["executor"].choices) == ["auto", *facts["executor"][1:]]

    builds = {option.name: option.type for option in build_nccl_wheel.params}
    assert list(builds["cpu"].choices) == [*MACHINES]
