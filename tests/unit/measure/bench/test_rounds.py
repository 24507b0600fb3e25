"""Which rounds are left, as `bench --dry-run` shows them and `bench` goes through them."""

from __future__ import annotations

from patchkit.measure.bench.digest import redactor_of
from patchkit.measure.bench.planned import PlannedVariant
from patchkit.measure.bench.results import place_of
from patchkit.measure.bench.run import BenchPlan, rounds_left
from patchkit.measure.bench.variants import Variant, loads


def test_what_was_measured_is_not_left(tmp_path):
    ways = [
        PlannedVariant(variant=Variant(name=name), words=(), variables={}, reports=(), python="")
        for name in ("a", "b")
    ]
    plan = BenchPlan(
        model="x",
        variants=ways,
        loads=loads((1024,), (128,), (1, 8), 4),
        rounds=2,
        folder=tmp_path,
        digest={},
        redactor=redactor_of([]),
    )
    for number, name, load in ((0, "a", 0), (0, "a", 1), (1, "b", 0)):
        place = place_of(tmp_path, name, plan.loads[load].name, number)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    left = {
        (number, v.name): [each.prompts for each in own] for number, v, own in rounds_left(plan)
    }
    assert left == {(0, "b"): [4, 32], (1, "a"): [4, 32], (1, "b"): [32]}
