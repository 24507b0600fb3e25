"""SM100 groups that stock 0.11.1 builds for SM12x by mistake."""

from operator import methodcaller

from patchkit.recipes.vllm import kit

_PATH = "CMakeLists.txt"
_IS_SM12X = methodcaller("startswith", "12.")


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    """Read the lists with a 12.x entry whose block switches an SM100 kernel on."""
    lists = [
        entry
        for entry in kit.cuda13_lists(_PATH, tree.read(_PATH))
        if entry.sm100 and entry.variable != kit.MLA
    ]
    named = [entry for entry in lists if any(map(_IS_SM12X, entry.items))]
    edits = [
        kit.remove_list_items(
            entry.argument, _IS_SM12X, path=_PATH, note="SM100 kernels only"
        )
        for entry in named
    ]

    where = kit.places([entry.where for entry in named or lists])
    return kit.found(
        edits,
        now=f"{where}: SM100 lists names SM12x",
        done=f"{where}: SM100 lists does not name SM12x",
    )
