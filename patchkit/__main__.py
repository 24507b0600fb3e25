"""Start the command line, for `patchkit` and `python -m patchkit`."""

from __future__ import annotations

import sys

from patchkit.durable.signals import (
    Interrupted,
    leave_interrupts,
    raise_interrupts,
    unwrapped,
)


def main() -> None:
    """Run the command line.

    An interrupt prints one line and no traceback, also while the command line is loaded or ends.
    """
    try:
        try:
            raise_interrupts()
            with unwrapped():
                from patchkit.cli import main as run
            run()
        finally:
            leave_interrupts()
    except Interrupted as interrupt:
        leave_interrupts()
        print(interrupt, file=sys.stderr)  # noqa: T201  (perhaps nothing that prints is loaded yet)
        sys.exit(interrupt.exit_code)


if __name__ == "__main__":
    main()
