"""The diff, taken by git itself."""

import pytest

from patchkit.apply import apply, plan_for
from patchkit.patching.workspace import open_workspace
from support import write_files

pytestmark = pytest.mark.releases
VERSION = "0.33.0"
ALSO = "moe_configs"  # which creates files


@pytest.fixture
def root(tree):
    return tree(VERSION)


@pytest.fixture
def repository(git, tmp_path, root, recipe, ask):
    """A repository that holds the files that change, untouched, and nothing else."""
    folder = tmp_path / "repository"
    plan = plan_for(open_workspace(root), recipe, ask(also={ALSO}))
    there = [path for path, (before, _after) in plan.texts.items() if before is not None]
    write_files(folder, {path: (root / path).read_bytes() for path in there})
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "upstream")
    return folder


def test_git_takes_the_diff(cli, git, root, repository, recipe, ask):
    source = ["--vllm-src", root, "--with", ALSO]
    diff = cli("diff", *source).stdout
    outcome = apply(root, recipe, ask(also={ALSO}))
    written = {path: (root / path).read_bytes() for path in outcome.written}
    git(repository, "apply", stdin=diff)
    assert "new file mode 100644" in diff
    assert {path: (repository / path).read_bytes() for path in written} == written
    assert cli("diff", "--vllm-src", root).stdout == diff  # whenever one asks
