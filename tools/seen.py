"""Read what the pristine sources of one vLLM release show, as the tables keep it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patchkit.errors import DriftError
from patchkit.patching.fix import Request, State, Verdict
from patchkit.patching.plan import Plan, make_plan
from patchkit.patching.recipe import load_recipe
from patchkit.patching.workspace import open_workspace
from patchkit.recipes.vllm.archs import evaluate
from patchkit.runtime.rules.presets import load_choices
from patchkit.runtime.rules.vllm_names import read_flags
from patchkit.source.archive import unpack
from patchkit.source.fetch import fetch
from patchkit.source.releases import read_lock
from patchkit.target import targets
from tools.catalogue import SupportLevel
from tools.model_recipes import read_recipes
from tools.release_values import read_choices, read_names, read_values

MODES = ("native", "family")

Row = dict[str, str]
Entry = tuple[str, str, str, tuple[str, ...]]  # group, switches, variable, archs


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One release. ``support`` is fix → arch mode → level.

    ``taken`` is variable → the values that it takes, ``values`` is flag → those that the code lists
    for it, () where it lists none; ``models`` are the rows of tools/model_recipes.py; ``files`` is
    path → how the sha256 begins of what fixes look at, "" where it is absent.
    """

    version: str
    support: dict[str, dict[str, str]]
    variables: dict[str, str]
    taken: dict[str, str]
    flags: dict[str, str]
    values: dict[str, tuple[str, ...]]
    models: dict[str, str]
    stock: list[Entry]
    archs: list[Row]
    files: dict[str, str]


def pristine(version: str, folder: Path) -> Path:
    """Unpack a release below a folder, from the cache or the index, and return its root."""
    recipe = load_recipe("vllm")
    archive = fetch(recipe.project, version, read_lock(recipe.home / "lock.toml"))
    return unpack(archive, folder / f"vllm-{version}")


def unproved(root: Path, arch: str) -> Plan:
    """Return the plan of an untouched tree; proofs compare with the tables that come of it.

    Raises DriftError with the file of each fix that does not fit.
    """
    request = Request(target=targets()["gb10"], arch=arch)
    plan = make_plan(open_workspace(root, "vllm").tree, load_recipe("vllm"), request)
    if plan.drifted:
        wrong = (
            f"recipes/vllm/fixes/{each.fix.id}.py: {each.reason}"
            for each in plan.drifted
        )
        raise DriftError(
            "\n  ".join(
                [f"vLLM {plan.stock.version}, {arch}: fixes do not fit", *wrong]
            ),
            why="upstream moved what they are about",
            hint=f"compare {plan.stock.version} with the release before, and edit these files",
        )
    return plan


def look_at(version: str, root: Path) -> Seen:
    """Read a release. Raises DriftError where a fix does not fit it."""
    plans = {arch: unproved(root, arch) for arch in MODES}
    target, tree = targets()["gb10"], plans["native"].stock
    groups = evaluate(tree, target, target.stock, target.cuda)
    whole = open_workspace(root, "vllm").tree
    also = frozenset(
        fix.id for fix in load_recipe("vllm").fixes
    )  # the optional ones too
    for arch in MODES:
        make_plan(
            whole, load_recipe("vllm"), Request(target=target, arch=arch, also=also)
        )
    return Seen(
        version=version,
        files={path: known[:16] for path, known in whole.seen.items()},
        support=_support(plans),
        variables=read_names(root / "vllm/envs.py"),
        taken=dict(_value_rows(root / "vllm")),
        flags=dict.fromkeys(read_flags(root / "vllm"), ""),
        values={
            row.flag: read_choices(row, root / "vllm")
            for row in load_choices().values()
        },
        models=read_recipes(root),
        stock=[
            (each.name, " ".join(each.switches), each.variable, each.archs)
            for each in groups
        ],
        archs=[row for plan in plans.values() for row in arch_rows(plan)],
    )


def arch_rows(plan: Plan) -> list[Row]:
    """Return a row per kernel group: what it gets from the untouched tree, and from the plan."""
    target = plan.request.target
    stock = evaluate(plan.stock, target, target.stock, target.cuda)
    patched = evaluate(plan.patched, target, plan.request.arch_list, target.cuda)
    return [
        {
            "release": str(plan.stock.version),
            "arch": plan.request.arch,
            "group": new.name,
            "file": new.site[0],
            "variable": new.variable,
            "stock": ";".join(old.archs),
            "patched": ";".join(new.archs),
        }
        for old, new in zip(stock, patched, strict=True)
    ]


def support_of(verdict: Verdict) -> SupportLevel:
    """Return the level that a verdict on an untouched release amounts to."""
    if verdict.state in (State.UPSTREAM, State.NOT_APPLICABLE):
        return SupportLevel(verdict.state.value)
    assert verdict.severity is not None
    return SupportLevel(verdict.severity.value)


def _support(plans: dict[str, Plan]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for arch, plan in plans.items():
        for verdict in plan.verdicts:
            found.setdefault(verdict.fix.id, {})[arch] = support_of(verdict).value
    return found


def _value_rows(home: Path) -> Iterator[tuple[str, str]]:
    """Yield what ``AllowedValues.parse`` reads."""
    for name, takes in read_values(home).items():
        case = ", any case" if takes.any_case else ""
        words = f": {', '.join(takes.words)}" if takes.words else ""
        yield name, f"{takes.how}{case}{words}"
