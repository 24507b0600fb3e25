"""Run patchkit in this process, into a pipe or in a pseudo-terminal; list all that it can run."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import sys
import termios
import threading

import click

from patchkit import cli
from patchkit.errors import PatchkitError
from patchkit.records import RecordError


def run(arguments, stream):
    """Run patchkit in this process, with a stream for all that it prints; return its exit code."""
    kept = sys.argv, sys.stdout, sys.stderr
    sys.argv, sys.stdout, sys.stderr = (
        ["patchkit", *map(str, arguments)],
        stream,
        stream,
    )
    try:
        cli.group.main(sys.argv[1:], prog_name="patchkit", standalone_mode=False)
    except SystemExit as end:
        return end.code
    except (PatchkitError, RecordError, click.ClickException) as error:
        translated = cli.translate_error(error)
        cli.show_error(translated)
        return translated.exit_code
    finally:
        stream.flush()
        sys.argv, sys.stdout, sys.stderr = kept
    return 0


def piped(arguments, rc=None):
    """What goes into a pipe; the exit code is checked if one is given."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    code = run(arguments, stream)
    said = stream.buffer.getvalue().decode()
    assert rc is None or code == rc, said
    return said


def terminal(width):
    """Open a pseudo-terminal of that width: our end, and the one of who prints."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    return ours, theirs


def on_terminal(arguments, width):
    """What appears in a terminal of that width, without its styles."""
    ours, theirs = terminal(width)
    parts = []

    def read():
        with contextlib.suppress(
            OSError
        ):  # Linux ends a terminal that nobody has open so
            while part := os.read(ours, 1 << 16):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with os.fdopen(theirs, "w", encoding="utf-8") as stream:
            run(arguments, stream)
    finally:
        reader.join()
        os.close(ours)
    return click.unstyle(b"".join(parts).decode().replace("\r\n", "\n"))


def runnable(command=cli.group, words=()):
    """Words and command of each verb and each verb of a verb."""
    if not isinstance(command, click.Group) or command.invoke_without_command:
        yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from runnable(command.get_command(context, name), (*words, name))
