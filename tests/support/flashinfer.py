"""FlashInfer as its wheels install it, and its cache as ninja leaves it."""

from support import write_files

CACHE = ".cache/flashinfer/{version}/{archs}/cached_ops"


def install(site, project, version, *modules):
    """Install a distribution whose RECORD lists compiled modules."""
    folder = project.replace("-", "_")
    members = [f"{folder}/jit_cache/{name}/{name}.so" for name in modules]
    files = {
        "METADATA": f"Metadata-Version: 2.4\nName: {project}\nVersion: {version}\n\n",
        "RECORD": "".join(f"{member},sha256=x,1\n" for member in members),
    }
    write_files(site / f"{folder}-{version}.dist-info", files)


def compile_into(base, version, archs, *modules):
    """Put modules into FlashInfer's cache, as ninja leaves them there."""
    for name in modules:
        folder = base / CACHE.format(version=version, archs=archs) / name
        write_files(folder, {f"{name}.so": "", "build.ninja": ""})
