"""The kernels of an installed vLLM on the present GPU, beside float64.

    python benchmarks/gpu/kernels.py [--without machete_mm …] [--out FOLDER]

The vLLM to look at is the one that Python imports. Each line calls one compiled operator and
compares with the same arithmetic in float64. An operator that the build left out must be named in
--without: a check that cannot run is a failure. Exit code 0: every check held.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from kernel_checks import CHECKS


@dataclass(frozen=True, slots=True)
class Result:
    """One comparison; ``error`` is in the unit of ``limit``."""

    operator: str
    what: str
    error: float
    limit: float
    problem: str = ""

    @property
    def held(self) -> bool:
        """Whether the error is a number within the limit."""
        return not self.problem and self.error <= self.limit


def main() -> int:
    """Run every check, print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for kernels.json")
    parser.add_argument(
        "--without", nargs="*", default=[], help="operators that were not built"
    )
    parser.add_argument("--only", nargs="*", default=list(CHECKS), choices=list(CHECKS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "no CUDA device here\n")
    import vllm
    import vllm._custom_ops

    torch.set_default_device("cuda")
    wanted = [name for name in options.only if name not in options.without]
    results = [*libraries(Path(vllm.__file__).parent)]
    results += [result for name in wanted for result in run(name)]
    device = torch.cuda.get_device_name()
    say(
        f"{device}, torch {torch.__version__}, vLLM {vllm.__version__} in {vllm.__file__}\n"
    )
    report(results)
    if options.without:
        say(f"left out: {', '.join(options.without)}")
    if options.out:
        facts = {"device": device, "vllm": vllm.__version__, "file": vllm.__file__}
        table = [{**asdict(result), "held": result.held} for result in results]
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "kernels.json").write_text(
            json.dumps({**facts, "checks": table}, indent=1)
        )
    return 0 if all(result.held for result in results) else 1


def run(name: str) -> list[Result]:
    """One check, from the same random numbers every time; what it raises is a result."""
    torch.manual_seed(0)
    try:
        return [Result(name, *measured) for measured in CHECKS[name]()]
    except Exception as error:  # noqa: BLE001 - the failure is the result
        line = (str(error).strip().splitlines() or [""])[0][:200]
        return [Result(name, "", math.nan, math.nan, f"{type(error).__name__}: {line}")]


def libraries(package: Path) -> Iterator[Result]:
    """Each extension module of the package must load."""
    for path in sorted(package.rglob("*.so")):
        parts = (
            path.relative_to(package.parent).with_name(path.name.split(".")[0]).parts
        )
        try:
            importlib.import_module(".".join(parts))
            yield Result(path.name, "loads", 0, 0)
        except ImportError as error:
            yield Result(path.name, "loads", math.nan, 0, str(error)[:200])


def report(results: list[Result]) -> None:
    """Print a row per result and the sum."""
    say("| operator | what | error | limit | |\n|---|---|---:|---:|---|")
    for result in results:
        numbers = f"{result.error:.2g} | {result.limit:.2g}"
        state = "held" if result.held else f"failed {result.problem}".strip()
        say(f"| {result.operator} | {result.what} | {numbers} | {state} |")
    failed = [result for result in results if not result.held]
    say(f"\n{len(results) - len(failed)} held, {len(failed)} failed")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
