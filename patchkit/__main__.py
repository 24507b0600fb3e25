"""Start the command line, for `patchkit` and `python -m patchkit`."""

from __future__ import annotations

import sys

from patchkit.durable.signals import Interrupted, raise_interrupts


def main() -> None:
    """Run the command line; an interrupt while it is loaded is also one line."""
    raise_interrupts()
    try:
        from patchkit.cli import main as run
    except Interrupted as interrupt:
        print(interrupt, file=sys.stderr)  # noqa: T201  (nothing that prints is loaded yet)
        sys.exit(interrupt.exit_code)
    run()


if __name__ == "__main__":
    main()
