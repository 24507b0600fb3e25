"""The golden tables, made from every supported release and then read by people.

    python tests/regenerate.py     (from a checkout, with patchkit installed in editable mode)

recipes/vllm/stock_archs.csv: what untouched releases build for 12.0. In tests/data:
states.json: release → arch mode → fix → state after an apply. archs.csv: a row per kernel group,
with what the untouched release builds for 12.0 and the patched one for the arch of the mode. Look
at the difference before you commit it: the tables are there to show what a change has changed.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from patchkit.apply import open_workspace, plan_for, prove, settled
from patchkit.cli.options import located
from patchkit.patching.fix import Request
from patchkit.patching.plan import Plan
from patchkit.patching.recipe import load_recipe
from patchkit.proof.archs import Group, evaluate
from patchkit.proof.stock import render_stock
from patchkit.target import targets

DATA = Path(__file__).with_name("data")
MODES = ("native", "family")
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


def main() -> None:
    """Look at every release, then write: a run that ends early leaves the tables as they were.

    Nothing is proved here, since proofs compare with one of these tables; the tests do that.
    """
    recipe, target = load_recipe(), targets()["gb10"]
    stock: list[tuple[str, list[Group]]] = []
    rows: list[Row] = []
    table: dict[str, dict[str, dict[str, str]]] = {}
    for version in map(str, recipe.supported):
        print(version, file=sys.stderr)  # noqa: T201
        with located(f"{recipe.project}=={version}", None, offline=False, keep=False) as root:
            plans = {arch: _unproved(root, arch) for arch in MODES}
            tree = plans["native"].stock
            stock.append((version, evaluate(tree, target, target.stock, target.cuda)))
            table[version] = {arch: states(each) for arch, each in plans.items()}
            rows += [row for each in plans.values() for row in arch_rows(each)]
    (recipe.home / "stock_archs.csv").write_text(render_stock(stock))
    (DATA / "states.json").write_text(json.dumps(table, indent=1) + "\n")
    with (DATA / "archs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
