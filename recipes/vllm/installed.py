"""Take an optional source as it is installed, out of upstream's own wheel, in place of a build.

vLLM's CMake has a file for each such source, which fetches, compiles and installs it. In the place
of its inclusion come the same targets, which compile nothing and install the files of a folder.
setup.py builds and installs these targets as ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from patchkit.edit.text import swap_text
from patchkit.patching.plan import with_edits
from patchkit.recipes.vllm.build import Wanted
from patchkit.recipes.vllm.external import ROOT_FILE
from patchkit.source.tree import SourceTree

_CMAKE = """\
# {option}, as it is installed in upstream's own wheel of this release
foreach(_target {targets})
  add_custom_target(${{_target}})
  install(DIRECTORY "$ENV{{{variable}}}/" DESTINATION . COMPONENT ${{_target}})
endforeach()"""


def take_installed(tree: SourceTree, taken: Iterable[Wanted]) -> SourceTree:
    """Return the tree, as an overlay, with these sources installed from a folder each.

    The release's own variable names the folder, in the environment. Raises DriftError if
    ``CMakeLists.txt`` does not include a source as expected.
    """
    for part in taken:
        known = part.known
        ours = _CMAKE.format(
            option=known.option, targets=" ".join(known.targets), variable=part.external.variable
        )
        edits = swap_text(
            ROOT_FILE, tree.read(ROOT_FILE), f"include({known.file})", ours, note=known.option
        )
        tree = with_edits(tree, tuple(edits))
    return tree
