"""Pack what was compiled into a wheel: files, metadata from a template, licences, facts, SBOM."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from string import Template

from patchkit.patching.recipe import load_recipe
from patchkit.wheel.build.machine import emptied
from patchkit.wheel.build.make import platform_tag
from patchkit.wheel.file.sbom import as_text, compiled_sbom
from patchkit.wheel.file.wheelfile import FACTS, Facts
from patchkit.wheel.file.write import seal_wheel


def fill_template(facts: Facts, name: str, **values: str) -> str:
    """Return a template of the project's recipe with its facts, and some other values, in it."""
    project = facts["project"]
    template = (load_recipe(project).home / f"{name}.template").read_text("utf-8")
    terms = facts["license"][project]
    return Template(template).substitute(facts, terms=terms, **values)


def pack_wheel(
    root: Path,
    facts: Facts,
    metadata: str,
    files: Mapping[str, bytes],
    licenses: Iterable[Path],
    provided: Collection[str] = (),
) -> Path:
    """Return a sealed wheel in ``root`` of ``files``, path → content.

    ``metadata`` begins with the version of its format and the name of the distribution.
    ``provided`` are libraries of other packages, as ``platform_tag`` takes them, which raises
    ProofError.
    """
    distribution = metadata.splitlines()[1].removeprefix("Name: ")
    stem = f"{distribution.replace('-', '_')}-{facts['wheel']}"
    tag = f"py3-none-linux_{facts['machine']}"
    home = f"{stem}.dist-info"
    wheel = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n"
    members = {
        **files,
        f"{home}/METADATA": metadata.encode(),
        f"{home}/WHEEL": wheel.encode(),
    }
    # For auditwheel; digests come when the wheel is sealed.
    record = "".join(f"{path},,\n" for path in members)
    members[f"{home}/RECORD"] = record.encode()

    raw = emptied(root / "raw") / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(raw, "w") as archive:
        for path, content in members.items():
            archive.writestr(zipfile.ZipInfo(path), content)

    texts = {f"licenses/{path.name}": path.read_text("utf-8") for path in licenses}
    texts[FACTS] = as_text(facts)
    texts[f"sboms/{facts['project']}.cdx.json"] = as_text(compiled_sbom(facts))
    platform = platform_tag(raw, provided)
    return seal_wheel(raw, emptied(root / "sealed"), platform, texts, {})
