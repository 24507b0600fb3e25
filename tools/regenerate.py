"""The golden tables and the catalogue, made from every supported release and then read by people.

    python -m tools.regenerate             (from a checkout)
    python -m tools.regenerate --check     ends with 1, and says what is stale, if anything changed

In recipes/env: vllm_variables.tsv and vllm_flags.tsv, the names in each release's own files. In
recipes/vllm: stock_archs.csv, what untouched releases build for 12.0; support.json, fix → arch mode
→ release → how much it needs the fix. In tests/data: states.json: release → arch mode → fix → state
after an apply; archs.csv: a row per kernel group, with what the untouched release builds for 12.0
and the patched one for the arch of the mode. In docs: support-matrix.md and a page per fix; of
NCCL, whose releases are on no index, nccl-releases.md and the same; env-rules.md, serve-flags.md.
And what tools/golden_env.py writes.
Look at the difference before you commit it: they are there to show what a change has changed.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from patchkit.apply import plan_for
from patchkit.cli.options import SourceOptions, located
from patchkit.patching.commit import settled
from patchkit.patching.fix import Request
from patchkit.patching.plan import Plan
from patchkit.patching.recipe import load_recipe, load_recipes
from patchkit.patching.support import load_support, support_of
from patchkit.patching.workspace import open_workspace
from patchkit.paths import RECIPES
from patchkit.proof.prove import prove
from patchkit.recipes.vllm.archs import Group, evaluate
from patchkit.recipes.vllm.stock import render_stock
from patchkit.runtime.rules.flag_rules import load_flag_rules
from patchkit.runtime.rules.flags import read_flags
from patchkit.runtime.rules.lifetimes import render
from patchkit.runtime.rules.presets import load_presets
from patchkit.runtime.rules.variable_rules import load_rules
from patchkit.runtime.rules.vllm_names import read_names
from patchkit.target import targets
from tools import env_pages, golden_env, serve_pages
from tools.catalogue import catalogue

DATA = Path(__file__).parents[1] / "tests" / "data"
DOCS = Path(__file__).parents[1] / "docs"
MODES = ("native", "family")
VARIABLES = (
    "name, first release, last release, default: the environment variables in envs.py of each",
    "supported release of vLLM. Made by tools/regenerate.py. An empty default: not set; some are",
    "computed, and stand here as the code has them.",
)
FLAGS = (
    "flag, first release, last release: what `vllm serve` takes in each supported release. Made by",
    "tools/regenerate.py.",
)
COLUMNS = ("release", "arch", "group", "file", "variable", "stock", "patched")

Row = dict[str, str]


def plan(root: Path, arch: str) -> Plan:
    """The proved plan of an untouched tree."""
    found = _unproved(root, arch)
    prove(found)
    return found


def _unproved(root: Path, arch: str) -> Plan:
    request = Request(target=targets()["gb10"], arch=arch)
    return plan_for(open_workspace(root), load_recipe(), request)


def states(plan: Plan) -> dict[str, str]:
    return {verdict.fix.id: settled(verdict).state.value for verdict in plan.verdicts}


def arch_rows(plan: Plan) -> list[Row]:
    target = plan.request.target
    stock = evaluate(plan.stock, target, target.stock, target.cuda)
    patched = evaluate(plan.patched, target, plan.request.arch_list, target.cuda)
    return [
        {
            "release": str(plan.stock.version),
            "arch": plan.request.arch,
            "group": new.name,
            "file": new.place[0],
            "variable": new.variable,
            "stock": ";".join(old.archs),
            "patched": ";".join(new.archs),
        }
        for old, new in zip(stock, patched, strict=True)
    ]


def read_states() -> dict[str, dict[str, dict[str, str]]]:
    return json.loads((DATA / "states.json").read_text())


def read_archs() -> list[Row]:
    return read_table("archs.csv")


def read_table(name: str) -> list[Row]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


def support(plan: Plan) -> dict[str, str]:
    """fix → how much the release needs it."""
    return {verdict.fix.id: support_of(verdict).value for verdict in plan.verdicts}


def look_at_all() -> dict[Path, str]:
    """Path → text of every table, from every release.

    Nothing is proved here, since proofs compare with one of these tables; the tests do that.
    """
    recipe, target = load_recipe(), targets()["gb10"]
    stock: list[tuple[str, list[Group]]] = []
    rows: list[Row] = []
    table: dict[str, dict[str, dict[str, str]]] = {}
    needed: dict[str, dict[str, dict[str, str]]] = {}
    variables: dict[str, dict[str, str]] = {}
    flags: dict[str, dict[str, str]] = {}
    for version in map(str, recipe.supported):
        print(version, file=sys.stderr)  # noqa: T201
        source = SourceOptions(recipe.project, f"{recipe.project}=={version}")
        with located(source, keep=False) as (root, _sandboxed):
            plans = {arch: _unproved(root, arch) for arch in MODES}
            tree = plans["native"].stock
            variables[version] = read_names(root / "vllm/envs.py")
            flags[version] = dict.fromkeys(read_flags(root / "vllm"), "")
            stock.append((version, evaluate(tree, target, target.stock, target.cuda)))
            table[version] = {arch: states(each) for arch, each in plans.items()}
            rows += [row for each in plans.values() for row in arch_rows(each)]
            for arch, each in plans.items():
                for fix, level in support(each).items():
                    needed.setdefault(fix, {}).setdefault(arch, {})[version] = level
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return {
        recipe.home / "stock_archs.csv": render_stock(stock),
        recipe.home / "support.json": json.dumps(needed, indent=1) + "\n",
        RECIPES / "env/vllm_variables.tsv": render(variables, VARIABLES),
        RECIPES / "env/vllm_flags.tsv": render(flags, FLAGS),
        DATA / "states.json": json.dumps(table, indent=1) + "\n",
        DATA / "archs.csv": file.getvalue(),
    }


def pages() -> dict[Path, str]:
    """Path → text of the catalogue, from the tables as they are."""
    found = {
        DOCS / name: text
        for recipe in load_recipes()
        for name, text in catalogue(recipe, load_support(recipe.project)).items()
    }
    return {
        **found,
        DOCS / "env-rules.md": env_pages.page(load_rules()),
        DOCS / "serve-flags.md": serve_pages.page(load_flag_rules(), load_presets()),
    }


def main() -> int:
    """Write what has changed, all at the end: a run that ends early leaves everything as it was."""
    texts = look_at_all()
    stale = write(texts)
    # The pages show what has just been written.
    stale += write({**pages(), **golden_env.golden()})
    for path in stale:
        print(f"was stale: {path}", file=sys.stderr)  # noqa: T201
    return 1 if stale and "--check" in sys.argv else 0


def write(texts: Mapping[Path, str]) -> list[Path]:
    """The files that had another text."""
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[path])
    return stale


if __name__ == "__main__":
    sys.exit(main())
