"""List the verbs by group, with the help line and the module of each verb."""

from typing import Any

from patchkit.records import RECIPES, read_toml

_TABLES = read_toml(dict[str, dict[str, Any]], RECIPES / "cli/verbs.toml")
GROUPS = _TABLES["group"]
MORE = _TABLES["more"]
MODULES = {verb: module for module, row in _TABLES["module"].items() for verb in row}
VERBS = {
    verb: text for group in (*GROUPS.values(), MORE) for verb, text in group.items()
}
SYNONYMS = _TABLES["synonym"]
CLICK_ALONE = _TABLES["library"]["none"]
