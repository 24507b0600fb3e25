"""Record the units that `patchkit up` writes, in tests/data/units.

    python -m tools.golden_units           writes them anew (tools/regenerate.py does so, too)

Look at the difference before you commit it.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from patchkit.cluster.launch.units import SCRIPTS, GroupUnits
from support.clusters import cluster, image_facts, node_facts, units_of

DATA = Path(__file__).parents[1] / "tests" / "data" / "units"
LARGE = "openai/gpt-oss-120b"
IMAGE = f"vllm/vllm-openai:v0.25.1@sha256:{'0123456789abcdef' * 4}"
_DIGEST = re.compile('"[0-9a-f]{16,64}",?$')
# Case → number of nodes, choices of cluster.toml, model.
CASES = {
    "single": (1, {}, "openai/gpt-oss-20b"),
    "pair": (2, {"listen": "cable", "args": ("--max-model-len", "32768")}, LARGE),
    "pair-podman": (2, {"image": IMAGE, "engine": "podman"}, "~/models/" + LARGE),
    "pair-docker": (2, {"image": IMAGE}, LARGE),
}


def units(case: str, folder: Path) -> GroupUnits:
    """Return the units of a case; ``folder`` takes the machines."""
    count, choices, model = CASES[case]
    names = [f"spark-{number + 1}" for number in range(count)]
    image = image_facts(choices.get("engine", "docker")) if "image" in choices else None
    facts = [node_facts(folder, node=number, image=image) for number in range(count)]
    return units_of(cluster(*names, **choices), facts, model)


def text(made: GroupUnits) -> str:
    """Return all files of all nodes but scripts and env files, which have tests of their own.

    The id of the start and the digests are left out: they change with both.
    """
    parts = []
    for number, files in enumerate(made.node_files()):
        for name, content in files.items():
            if name not in ("node.env", *SCRIPTS):
                lines = [
                    line for line in content.splitlines() if not _DIGEST.search(line)
                ]
                parts.append("\n".join([f"=== rank {number}: {name}", *lines, ""]))
    return "\n".join(parts)


def golden() -> dict[Path, str]:
    """Return the text of every file."""
    with tempfile.TemporaryDirectory() as folder:
        return {DATA / f"{case}.txt": text(units(case, Path(folder))) for case in CASES}


def main() -> None:
    """Write the file of every case."""
    DATA.mkdir(exist_ok=True)
    for path, content in golden().items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
