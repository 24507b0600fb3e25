"""Build kube-apiserver of Debian's sources, and put etcd beside it: `nox -s manifests` runs it.

    python -m e2e.kube PLACE        the programs land in PLACE/bin; once, some ten minutes
    python -m e2e.kube --obstacle   what is in the way on this machine, or nothing

Debian 12 ships Kubernetes 1.20.2 as a source, with all that it needs, for kubectl alone; Go 1.19
and etcd are packages. Everything comes through apt, with its signatures, and nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

_PACKAGES = (
    "etcd-server",
    "golang-1.19-go",
    "golang-1.19-src",
    "golang-github-modern-go-reflect2-dev",
)
_REFLECT = (
    "github.com/modern-go/reflect2"  # the one that Kubernetes 1.20 has ends with Go 1.18 and later
)
_OPENAPI = "k8s.io/kubernetes/pkg/generated/openapi"
_TAGGED = ("pkg", "staging/src/k8s.io")  # where sources say what the API's description holds
_SUITE = "bookworm"
EXPAND = Path(__file__).with_name("expand.go")


def obstacle() -> str:
    """Return what is in the way, "" for nothing."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-source"):
        return "apt-get and dpkg-source are needed: apt install dpkg-dev, on Debian"
    command = ["apt-get", "indextargets", "--format", "$(RELEASE)"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if _SUITE not in said.stdout.split():
        return f"Debian's {_SUITE} is not among the sources of apt"
    return ""


def build(place: Path) -> None:
    """Make PLACE/bin: etcd, kube-apiserver and kube-expand."""
    programs = place / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    root, sources = place / "root", place / "sources"
    _fetch(place, root, sources)
    shutil.copy2(root / "usr/bin/etcd", programs)
    (tree,) = sources.glob("kubernetes-*/")
    go = _Go(place, root, tree)
    _newer_reflect(root, tree)
    _describe_api(go, place, tree)
    shutil.copy2(EXPAND, tree / "cmd" / "kube-expand.go")
    go.run("build", "-o", programs / "kube-expand", "./cmd/kube-expand.go")
    go.run("build", "-o", programs / "kube-apiserver", "./cmd/kube-apiserver")


def _fetch(place: Path, root: Path, sources: Path) -> None:
    """Unpack Debian's packages and the source, by an apt with folders of its own."""
    if list(sources.glob("kubernetes-*/")):
        return
    shutil.rmtree(sources, ignore_errors=True)
    for each in ("lists/partial", "cache/archives/partial", "sources"):
        (place / each).mkdir(parents=True, exist_ok=True)
    said = _run("apt-get", "indextargets", "--format", "$(REPO_URI)|$(RELEASE)|$(COMPONENT)")
    rows = {tuple(line.split("|")) for line in said.splitlines()}
    lines = [f"deb-src {uri} {release} {part}\n" for uri, release, part in sorted(rows)]
    (place / "sources.list").write_text("".join(lines).replace("deb-src", "deb") + "".join(lines))
    (place / "apt.conf").write_text(
        f'Dir::State::lists "{place}/lists";\nDir::Cache "{place}/cache";\n'
        f'Dir::Etc::sourcelist "{place}/sources.list";\nDir::Etc::sourceparts "-";\n'
    )
    env = {**os.environ, "APT_CONFIG": str(place / "apt.conf")}
    _run("apt-get", "update", "--quiet", env=env)
    _run("apt-get", "download", *_PACKAGES, cwd=place / "cache", env=env)
    for package in (place / "cache").glob("*.deb"):
        _run("dpkg", "-x", package, root)
    _run("apt-get", "source", "--quiet", "kubernetes", cwd=sources, env=env)


def _newer_reflect(root: Path, tree: Path) -> None:
    theirs, own = tree / "vendor" / _REFLECT, root / "usr/share/gocode/src" / _REFLECT
    for each in (*theirs.glob("*.go"), *theirs.glob("*.s")):
        each.unlink()
    for each in (*own.glob("*.go"), *own.glob("*.s")):
        shutil.copy2(each, theirs)


def _describe_api(go: _Go, place: Path, tree: Path) -> None:
    """Write the API's description in Go, which upstream's makefiles make, too."""
    if (tree / "pkg/generated/openapi/zz_generated.openapi.go").exists():
        return
    generator = place / "openapi-gen"
    go.run("build", "-o", generator, "./vendor/k8s.io/kube-openapi/cmd/openapi-gen")
    words = ("--include=*.go", "--recursive", "--files-with-matches", "+k8s:openapi-gen=")
    files = _run("grep", *words, *_TAGGED, cwd=tree).split()
    folders = {
        str(Path(each).parent)
        for each in files
        if not {"_examples", "testdata"} & set(Path(each).parts)
    }
    inputs = [
        f"k8s.io/kubernetes/vendor/{each.removeprefix('staging/src/')}"
        if each.startswith("staging/")
        else f"k8s.io/kubernetes/{each}"
        for each in sorted(folders)
        if "sample-" not in each and "/code-generator/" not in each
    ]
    _run(
        *(generator, "-i", ",".join(inputs), "-O", "zz_generated.openapi", "-p", _OPENAPI),
        *("--go-header-file", "hack/boilerplate/boilerplate.generatego.txt"),
        *("-r", place / "violations"),
        cwd=go.tree,
        env=go.env,
    )


class _Go:
    """Debian's Go, unpacked, on a tree with its own dependencies; no module is fetched."""

    def __init__(self, place: Path, root: Path, tree: Path) -> None:
        home, path = root / "usr/lib/go-1.19", tree / ".go"
        self.tree = path / "src/k8s.io/kubernetes"
        if not self.tree.is_symlink():
            self.tree.parent.mkdir(parents=True, exist_ok=True)
            self.tree.symlink_to(tree)
        self.program = home / "bin/go"
        self.env = {
            **os.environ,
            "GOROOT": str(home),
            "GOPATH": str(path),
            "GOCACHE": str(place / "gocache"),
            "GO111MODULE": "off",
            "CGO_ENABLED": "0",
            "PATH": f"{home}/bin:{os.environ['PATH']}",
            "PWD": str(self.tree),  # Go goes by the name of the folder, not by what it leads to
        }

    def run(self, *words: str | Path) -> None:
        _run(self.program, *words, cwd=self.tree, env=self.env)


def _run(*words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    print("+", *(str(each)[:60] for each in words[:4]), flush=True, file=sys.stderr)
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=env, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def main(arguments: list[str]) -> None:
    """Do what the arguments say."""
    if arguments == ["--obstacle"]:
        print(obstacle(), end="")
        return
    build(Path(arguments[0]).resolve())


if __name__ == "__main__":
    main(sys.argv[1:])
