"""Put back what upstream shipped: `patchkit revert`."""

from __future__ import annotations

import click

from patchkit.apply import revert, revert_by_force
from patchkit.cli.options import SourceOptions, as_json, folder_options
from patchkit.cli.out import print_json, say
from patchkit.patching.forced_revert import Rescued
from patchkit.source.resolve import patched_tree


@click.command()
@folder_options
@click.option(
    "--force",
    is_flag=True,
    help="Put the originals back though files were edited, or what patchkit keeps is damaged; "
    "what is in the way is moved aside.",
)
@as_json
def command(source: SourceOptions, *, force: bool, as_json: bool) -> None:
    """Put back what upstream shipped, byte by byte.

    SOURCE is the folder, or the release that `apply` unpacked and patched below build/. Refuses,
    and names the file, if a patched file was edited since.
    """
    path = patched_tree(source.spec, source.project)
    if force:
        done = revert_by_force(path, source.project)
        _print_rescued(done, as_json=as_json)
        return
    restored = revert(path, source.project)
    if as_json:
        print_json({"restored": list(restored)})
    elif not restored:
        say("nothing to do: patchkit has changed nothing here")
    else:
        say(f"{len(restored)} files are as upstream shipped them")


def _print_rescued(done: Rescued, *, as_json: bool) -> None:
    if as_json:
        lists = {"restored": done.restored, "moved": done.moved, "lost": done.lost}
        fields = {name: list(paths) for name, paths in lists.items()}
        print_json({**fields, "aside": str(done.aside), "created_known": done.created})
        return
    say(f"{len(done.restored)} files are as upstream shipped them")
    if done.moved:
        say(f"moved to {done.aside}: {', '.join(done.moved)}")
    if done.lost:
        say(f"not restored, as the original is damaged: {', '.join(done.lost)}")
    if not done.created:
        say("no ledger says which files patchkit created: those stay where they are")
