"""Record the manifests that `patchkit export` writes, in tests/data/manifests.

    python -m tools.golden_manifests        writes them anew (tools/regenerate.py does so, too)

Look at the difference before you commit it.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

from patchkit.measure.kubernetes import kubernetes_manifest
from support.manifests import OPTIONS, planned

DATA = Path(__file__).parents[1] / "tests" / "data" / "manifests"
LARGE = "openai/gpt-oss-120b"
# Case → number of nodes, choices of cluster.toml, model.
CASES = {
    "lws-2": (2, {}, LARGE),
    "lws-4": (4, {"topology": "socket"}, "Qwen/Qwen3-32B"),
}


def manifest(case: str, folder: Path) -> str:
    """Return the text of a case; ``folder`` takes the machine."""
    count, choices, model = CASES[case]
    plan = planned(folder, model, count, **choices)
    options = OPTIONS
    if choices.get("topology") == "socket":
        options = replace(options, rdma="")
    return kubernetes_manifest(*plan, options)


def short(text: str) -> str:
    """Return a manifest without its scripts, which have tests of their own, and their digest."""
    bare = re.sub(r"(?m)^(  (?:group|pod)\.py: \|)\n(?:(?:    .*)?\n)+", r"\1 …\n", text)
    return re.sub(r"(-scripts-)[0-9a-f]{8}", r"\1…", bare)


def golden() -> dict[Path, str]:
    """Return the text of every file."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        return {DATA / f"{case}.yaml": short(manifest(case, place)) for case in CASES}


def main() -> None:
    """Write the file of every case."""
    DATA.mkdir(exist_ok=True)
    for path, content in golden().items():
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
