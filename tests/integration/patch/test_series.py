"""The series and the diff, taken by git itself."""

from __future__ import annotations

import pytest

from patchkit.apply import apply, plan_for
from patchkit.patching.workspace import open_workspace
from support.selection import MODES, WHOLE

_IN_THE_MATRIX = (
    (("0.24.0", {}, "native"), ("0.25.1", {"also": {"moe_configs"}}, "family")) if WHOLE else ()
)
pytestmark = [
    pytest.mark.releases,
    # C++ and Python beside CMake; files that are created. Modes by turns; the matrix has both.
    pytest.mark.parametrize(
        ("version", "chosen", "arch"),
        [
            (version, chosen, arch)
            for version, chosen, mode in (
                ("0.18.1", {}, "family"),
                ("0.33.0", {"also": {"moe_configs"}}, "native"),
                *_IN_THE_MATRIX,
            )
            for arch in (MODES if WHOLE else (mode,))
        ],
    ),
]
OPTIONS = {"only": "--only", "also": "--with"}


@pytest.fixture
def root(tree, version):
    return tree(version)


@pytest.fixture
def source(root, arch, chosen):
    """The tree, and what is asked for, as options."""
    options = [(OPTIONS[name], fix) for name, fixes in chosen.items() for fix in fixes]
    return ["--vllm-src", root, "--arch", arch, *(word for option in options for word in option)]


@pytest.fixture
def repository(git, tmp_path, root, recipe, ask, arch, chosen):
    """A repository that holds the files that change, untouched, and nothing else."""
    folder = tmp_path / "repository"
    folder.mkdir()
    plan = plan_for(open_workspace(root), recipe, ask(arch, **chosen))
    for path, (before, _after) in plan.texts.items():
        if before is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes((root / path).read_bytes())
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "upstream")
    return folder


def contents(folder, paths):
    return {path: (folder / path).read_bytes() for path in paths}


def test_git_am_gives_what_apply_gives(
    cli, git, root, version, arch, chosen, source, repository, recipe, ask, tmp_path
):
    mails = cli("series", *source, "-o", tmp_path / "series").stdout.split()
    outcome = apply(root, recipe, ask(arch, **chosen))

    git(repository, "am", "--quiet", *mails)

    assert contents(repository, outcome.written) == contents(root, outcome.written)
    assert git(repository, "status", "--porcelain") == ""
    fixes = [verdict.fix for verdict in outcome.verdicts if verdict.state.value == "applied"]
    log = git(
        repository, "log", "--reverse", f"-{len(mails)}", "--format=%an <%ae>%x00%s%x00%b%x01"
    )
    commits = [entry.strip("\n").split("\0") for entry in log.split("\x01")[:-1]]
    assert [(author, subject) for author, subject, _ in commits] == [
        ("patchkit <patchkit@localhost>", fix.title) for fix in fixes
    ]
    for fix, (_author, _subject, body) in zip(fixes, commits, strict=True):
        trailers = dict(line.split(": ", 1) for line in body.strip().splitlines()[-3:])
        assert trailers["Origin"].endswith(f", fix {fix.id}")
        assert trailers["Applies-To"] == f"vllm {version}"
        assert trailers["Target"] == f"gb10, {arch} {'12.1a' if arch == 'native' else '12.0f'}"
        assert " ".join(body.split()).startswith(f"Symptom: {' '.join(fix.symptom.split())}")


def test_git_apply_gives_what_apply_gives_and_nothing_depends_on_when_one_asks(
    cli, git, root, arch, chosen, source, repository, recipe, ask, tmp_path
):
    diff = cli("diff", *source).stdout
    outcome = apply(root, recipe, ask(arch, **chosen))
    git(repository, "apply", stdin=diff)
    assert ("new file mode 100644" in diff) == bool(chosen)
    assert contents(repository, outcome.written) == contents(root, outcome.written)
    assert cli("diff", "--vllm-src", root).stdout == diff
