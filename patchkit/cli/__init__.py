"""The command line: the only place that prints; a verb is `NAME_command` in some module."""

import gc
import importlib
import os
import sys
from typing import Any

import click

from patchkit import __version__
from patchkit.cli import out
from patchkit.cli.out import error_text
from patchkit.cli.render import VerbGroup
from patchkit.cli.verbs import CLICK_ALONE, GROUPS, MODULES, MORE, VERBS
from patchkit.durable.signals import Interrupted, raise_interrupts, unwrapped
from patchkit.errors import (
    DriftError,
    PatchkitError,
    SourceError,
    StorageError,
    UsageError,
    reason,
)
from patchkit.extras import BASE, missing_libraries, require_libraries
from patchkit.quoting import quoted
from patchkit.records import RECIPES_VARIABLE, RecordError
from patchkit.runtime.rules.secret_texts import mask_secrets

_EPILOG = """\
\b
Examples:
  patchkit up openai/gpt-oss-120b
  patchkit doctor --log vllm.log
  patchkit apply vllm==0.33.0
  patchkit repack vllm==0.33.0

\b
Exit codes: 0 done, 2 usage, 3 unknown source or invalid file, 4 drift,
5 proof failed, 6 busy, 7 I/O or no network, 8 hash mismatch,
9 this machine or its network, 10 a build failed, 11 a recipe has a mistake,
128 + N interrupted by signal N, 1 a bug. docs/commands.md says more.
"""

_LIMITED = "other programs hold it, or a limit of this shell is low: `ulimit -v`"
_FREE = "end other programs or raise the limit, then run the same command again"
_NESTED = "no release has such a text: it was edited by hand, or made to do harm"
_RESTORE = "restore it from the release, or leave it out"


class _Verbs(VerbGroup):
    """The group of all verbs. It imports a verb's module only to run it: --help stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        if cmd_name not in CLICK_ALONE:
            require_libraries(BASE)

        module = importlib.import_module(f"patchkit.cli.{MODULES[cmd_name]}")
        command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        assert isinstance(command, click.Command)
        return command

    def main(self, *args: Any, **options: Any) -> Any:
        out.prepare_streams()
        return super().main(*args, **options)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        with out.exit_on_closed_pipe():
            return super().make_context(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with out.exit_on_closed_pipe():
            return super().invoke(ctx)

    def format_commands(  # click's signature
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(verbs.items()))

        with formatter.section("More, each with --help"):
            formatter.write_text(", ".join(MORE))


@click.command(
    "patchkit",
    cls=_Verbs,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)
@click.version_option(
    __version__, "-V", "--version", message="patchkit, version %(version)s"
)
@click.option(
    "--recipes",
    metavar="DIR",
    expose_value=False,
    help="Also take the projects and fixes in this folder.",
)
def group() -> None:
    """Make vLLM build and run on a DGX Spark GB10 (sm_121), with one exact NCCL on every node.

    patchkit knows the releases of vLLM from 0.11.1 and of NCCL from 2.26 on, decides by looking at
    the code, and proves the effect with the release's own build files (no GPU, no compiler).
    """


def _take_recipes() -> None:
    """Move each --recipes DIR to the variable, before the options of verbs are made of it."""
    words = [*sys.argv]
    remaining = []
    folders = [os.environ.get(RECIPES_VARIABLE, "")]
    while words and words[0] != "--":
        option, is_set, folder = words.pop(0).partition("=")
        if option != "--recipes" or not (is_set or words):
            remaining.append(option + is_set + folder)
        else:
            folders.append(folder if is_set else words.pop(0))

    os.environ[RECIPES_VARIABLE] = os.pathsep.join(filter(None, folders))
    sys.argv[:] = remaining + words


def main() -> None:
    """Run the command line; errors become one message and their own exit code."""
    _take_recipes()
    gc.disable()  # a run is too short for collections to pay off: they take 15 % of apply's time
    raise_interrupts()
    try:
        with unwrapped():
            # click itself would print errors and exit with codes of its own.
            code = group.main(prog_name="patchkit", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except Interrupted as interrupt:
        out.say_at_end(str(interrupt))
        sys.exit(interrupt.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception as error:
        translated = translate_error(error)
        if translated is None:
            if os.environ.get("PATCHKIT_DEBUG"):
                raise
            text = mask_secrets(f"{type(error).__name__}: {error}")
            out.say_at_end(
                f"patchkit: internal error: {text}\n"
                "  next: run again with PATCHKIT_DEBUG=1 and report what it prints"
            )
            sys.exit(1)

        show_error(translated)
        if isinstance(error, OSError):
            out.discard_output()
        sys.exit(translated.exit_code)
    finally:
        gc.freeze()  # or Python's last collection, as it ends, takes another 15 %


def translate_error(error: Exception) -> PatchkitError | None:
    """Return the PatchkitError that says the same as ``error``; None if ``error`` is a bug."""
    match error:
        case DriftError() if error.without:
            # The same command with --without for each fix that does not fit.
            options = [word for fix in error.without for word in ("--without", fix)]
            command = quoted(*out.program(), *sys.argv[1:], *options)
            error.hint = f"leave out what does not fit: {command}"
            return error
        case PatchkitError():
            return error
        case click.ClickException():
            return _usage_error(error)
        case RecordError():  # words of the user, which a record does not take
            return UsageError(str(error), hint="correct it, and run the command again")
        case ModuleNotFoundError():
            return missing_libraries([str(error.name)])
        case OSError():
            return StorageError(reason(error), hint="check space and permissions")
        case MemoryError():
            return StorageError("no memory is left", why=_LIMITED, hint=_FREE)
        case RecursionError():
            return SourceError(
                "a text is nested too deeply to be read", why=_NESTED, hint=_RESTORE
            )
    return None


def _usage_error(error: click.ClickException) -> UsageError:
    """Return click's complaint about an option, an argument or a verb."""
    command = "patchkit"
    if isinstance(error, click.UsageError) and error.ctx:
        command = error.ctx.command_path

    text = error.format_message().rstrip(".")
    usage = quoted(*command.split(), "--help")
    return UsageError(text[:1].lower() + text[1:], hint=f"`{usage}` lists it all")


def show_error(error: PatchkitError) -> None:
    """Print an error: as JSON with --json, otherwise as text on standard error."""
    # The options may not be parsed yet when the error is raised, so look at the plain arguments.
    if "--json" not in sys.argv:
        out.say_at_end(error_text(error))
        return

    parts = {
        "what": error.what,
        "why": error.why,
        "next": error.hint,
    }
    fields = {name: mask_secrets(text) for name, text in parts.items()}
    try:
        document = error.document | {"error": {**fields, "exit_code": error.exit_code}}
        # One line, since the verb may have printed lines of JSON before.
        out.print_json(document, indent=None)
    except OSError:  # standard output failed: standard error may still be read
        out.say_at_end(error_text(error))
