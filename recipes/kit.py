"""Collect the names that a fix of any project imports."""

from patchkit.edit.cmake import add_list_item, commands, remove_list_items
from patchkit.edit.python import swap, wrap
from patchkit.edit.splice import Edit, Edits, together
from patchkit.edit.text import (
    absent,
    altered,
    new_file,
    region,
    swap_text,
)
from patchkit.errors import DriftError, ProofError
from patchkit.finding import Established
from patchkit.patching.fix import (
    Case,
    Evidence,
    Example,
    Fix,
    Observation,
    Request,
    found,
    optional,
    places,
    recommended,
    required,
    upstream,
)
from patchkit.patching.recipe import load_recipe
from patchkit.proof.questions import ask
from patchkit.proof.upstream_code import Anything, Code, execute
from patchkit.source.releases import foreign_file
from patchkit.source.tree import SourceTree, first_existing
from patchkit.target import Load, Target, best_load, parse_arch
