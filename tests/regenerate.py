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
from collections.abc import Iterator
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
    request = Request(target=targets()["gb10"], arch=arch)
    found = plan_for(open_workspace(root), load_recipe(), request)
    prove(found)
    return found


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


def _plans() -> Iterator[Plan]:
    recipe, target = load_recipe(), targets()["gb10"]
    stock: list[tuple[str, list[Group]]] = []
    for version in recipe.supported:
        print(version, file=sys.stderr)  # noqa: T201
        source = f"{recipe.project}=={version}"
        with located(source, None, offline=False, keep=False) as root:
            tree = open_workspace(root).tree
            stock.append((str(version), evaluate(tree, target, target.stock, target.cuda)))
            # The proofs below compare with this table, so it comes first.
            (recipe.home / "stock_archs.csv").write_text(render_stock(stock))
            yield from [plan(root, arch) for arch in MODES]


def main() -> None:
    table: dict[str, dict[str, dict[str, str]]] = {}
    with (DATA / "archs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for each in _plans():
            table.setdefault(str(each.stock.version), {})[each.request.arch] = states(each)
            # CMake runs in the tree, so before the next one takes its place.
            writer.writerows(arch_rows(each))
    (DATA / "states.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
