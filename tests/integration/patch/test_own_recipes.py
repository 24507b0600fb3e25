"""Projects and fixes in a folder of recipes: all verbs take them as they take patchkit's own."""

import json
import re
import subprocess
import sys
import zipfile

import pytest

from patchkit.source.fetch import cache_dir
from patchkit.wheel.file.wheelfile import find_faults
from support import run_program, write_files
from support.wheels import write_wheel

# A fix that adds a line to a file, of a tree or of an installed package.
FIX = """\
from patchkit.recipes import kit

PATHS = {paths!r}
BEFORE = {before!r}


def look(tree: kit.SourceTree, request: kit.Request) -> kit.Observation:
    path = kit.first_existing(tree, PATHS)
    text = tree.read(path)
    edits = kit.swap_text(path, text, BEFORE, BEFORE + "# a line\\n", note="one line")
    return kit.found(edits, now=f"{{path}}: lacks the line", done=f"{{path}}: has it")


FIX = kit.Fix(
    id={fix!r},
    title="One line more",
    symptom="The line is not there.",
    why="A line shows that the fix was applied.",
    needs=(kit.recommended(">=0.1", "it is only a line"),),
    upstream="open",
    look=look,
)
"""
# Names of project, distribution and package are the same, or all different.
SGLANG = {
    "sglang/recipe.toml": """\
fixes = ["sglang_line"]
[project]
title = "SGLang"
distribution = "sglang"
package = "sglang"
markers = ["pyproject.toml", "sglang/launch_server.py"]
""",
    "sglang/fixes/sglang_line.py": FIX.format(
        fix="sglang_line",
        paths=("sglang/launch_server.py",),
        before='"""Launch the inference server."""\n',
    ),
}
TENSORS = {
    "tensors/recipe.toml": """\
fixes = ["tensors_line"]
[project]
title = "Compressed Tensors"
distribution = "compressed-tensors"
package = "compressed_tensors"
markers = ["pyproject.toml", "src/compressed_tensors/__init__.py"]
""",
    "tensors/fixes/tensors_line.py": FIX.format(
        fix="tensors_line",
        paths=("src/compressed_tensors/base.py", "compressed_tensors/base.py"),
        before="# SPDX-License-Identifier: Apache-2.0\n",
    ),
}
# release, sha256 of its sdist, file of the sdist that the fix changes
PROJECTS = [
    (
        SGLANG,
        "sglang==0.5.5",
        "ab12bdec43aa4b1022a909dc3da1e4a2069edfdc397a5d5cd74bf5b88f6f22e0",
        "sglang/launch_server.py",
    ),
    (
        TENSORS,
        "tensors==0.17.0",
        "15c20d06bdbcf35b51fc99fd125e7b9be1e1855567c33b7a46dfac26ad6fb126",
        "src/compressed_tensors/base.py",
    ),
]


@pytest.fixture
def patchkit(environment, tmp_path):
    """Run patchkit with the folder of recipes, in a process that knows no other recipes yet."""

    def run(*arguments, rc=0):
        done = subprocess.run(
            [sys.executable, "-m", "patchkit", *map(str, arguments)],
            env={**environment, "PATCHKIT_RECIPES": str(tmp_path / "recipes")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == rc, done.stdout + done.stderr
        return done

    return run


def lock(patchkit, release):
    """Have a release locked and fetched; skip if no index can be had."""
    try:
        patchkit("fetch", release, "--lock")
    except AssertionError as error:
        if "does not offer" in str(error) or "connection" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.parametrize(("recipe", "release", "sha256", "path"), PROJECTS)
def test_all_verbs_take_a_project_of_a_user(
    recipe, release, sha256, path, tmp_path, patchkit, git
):
    home = write_files(tmp_path / "recipes", recipe)
    project, _, version = release.partition("==")
    fix = f"{project}_line"
    fetched = patchkit("fetch", release, rc=3)
    assert f"fetch {release} --lock" in fetched.stderr
    lock(patchkit, release)
    assert sha256 in (home / project / "lock.toml").read_text()

    assert fix in patchkit("fixes").stdout
    assert "One line more" in patchkit("explain", fix).stdout
    assert f"recommended: {fix}" in patchkit("fixes", release).stdout

    applied = patchkit("apply", release, "--json")
    verdicts = json.loads(applied.stdout)["fixes"]
    assert [(each["id"], each["state"]) for each in verdicts] == [(fix, "applied")]
    root = tmp_path / "build" / f"{project}-{version}"
    assert "# a line\n" in (root / path).read_text()
    assert "+# a line" in patchkit("diff", root).stdout
    assert "nothing to do" in patchkit("apply", f"--{project}-src", root).stdout

    patchkit("revert", release)
    stock = (root / path).read_text()
    assert "# a line" not in stock

    # A diff of the user's own, and the same files as a git checkout and as a commit.
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "one")
    (root / path).write_text(f"{stock}# mine\n")
    patch = write_files(tmp_path, {"mine.patch": git(root, "diff")}) / "mine.patch"
    git(root, "checkout", "--quiet", ".")
    patchkit("apply", root, "--patch", patch)
    assert (root / path).read_text().endswith("# mine\n")
    patchkit("revert", root)
    commit = git(root, "rev-parse", "HEAD").strip()
    name = f"git+file://{root}@{commit}"
    shown = patchkit("diff", f"--{project}-src", name, "--source-version", version)
    assert "+# a line" in shown.stdout


# A project without sdists: its releases are commits, and a file tells the version.
TINY = {
    "tiny/recipe.toml": """\
fixes = ["tiny_line"]
[project]
title = "Tiny"
markers = ["tiny/main.py", "tiny/version.py"]
[project.version]
path = "tiny/version.py"
numbers = ['= "(.*)"']
[upstream]
git = "file://{root}"
[[release]]
version = "1.2"
tag = "v1.2"
commit = "{commit}"
""",
    "tiny/fixes/tiny_line.py": FIX.format(
        fix="tiny_line", paths=("tiny/main.py",), before="import sys\n"
    ),
}


def test_a_project_whose_releases_are_commits(tmp_path, patchkit, git):
    files = {"tiny/main.py": "import sys\n", "tiny/version.py": 'VERSION = "1.2"\n'}
    root = write_files(tmp_path / "upstream", files)
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "one")
    commit = git(root, "rev-parse", "HEAD").strip()
    place = "tiny/recipe.toml"
    recipe = TINY[place].format(root=root, commit=commit)
    write_files(tmp_path / "recipes", TINY | {place: recipe})

    assert f"tiny-{commit}.tar" in patchkit("fetch", "tiny==1.2").stdout
    assert "applied" in patchkit("apply", "tiny==1.2").stdout
    assert "+# a line" in patchkit("diff", "tiny==1.2").stdout
    patchkit("revert", "tiny==1.2")
    assert (tmp_path / "build/tiny-1.2/tiny/main.py").read_text() == "import sys\n"

    # A commit and an archive need no entry in the recipe; the archive needs its sha256.
    named = f"git+file://{root}@{commit}"
    assert "+# a line" in patchkit("diff", "--tiny-src", named).stdout
    archive = tmp_path / "tiny-1.2.tar"
    git(root, "archive", "--prefix=tiny-1.2/", "--output", archive, "HEAD")
    refused = patchkit("diff", archive, rc=3).stderr
    (sha256,) = re.findall(r"add --sha256 (\w+)", refused)
    assert f"git+file://{root}@COMMIT" in refused
    assert "+# a line" in patchkit("diff", archive, "--sha256", sha256).stdout
    other = patchkit("archs", root, rc=2).stderr
    assert f"{root}: this verb takes one source, of vllm" in " ".join(other.split())
    unknown = patchkit("apply", "tiny==1.3", rc=3).stderr
    assert "known are 1.2; others" in unknown
    assert f"from git+file://{root}@COMMIT" in unknown

    # Without releases and a distribution, nothing can be locked.
    short = recipe.partition("[upstream]")[0]
    write_files(tmp_path / "recipes", {place: short})
    told = patchkit("fetch", "tiny==1.2", "--lock", rc=2).stderr
    assert "tiny: its recipe names no distribution" in told


def test_an_installed_package_of_a_project_of_a_user(tmp_path, patchkit):
    write_files(tmp_path / "recipes", TENSORS)
    site = tmp_path / "site"
    words = ["pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    done = subprocess.run(
        [sys.executable, "-m", *words, "compressed-tensors==0.17.0"],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(done.stderr)

    package = site / "compressed_tensors"
    patchkit("apply", package)
    assert "# a line\n" in (package / "base.py").read_text()
    record = next(site.glob("compressed_tensors-*.dist-info/RECORD")).read_text()
    assert "compressed_tensors/.patchkit/ledger.json" in record
    patchkit("revert", package)
    assert "# a line\n" not in (package / "base.py").read_text()


# Its wheels hold libraries for seven releases of CUDA.
BITSANDBYTES = {
    "bnb/recipe.toml": """\
fixes = ["bnb_line"]
[project]
title = "bitsandbytes"
distribution = "bitsandbytes"
package = "bitsandbytes"
markers = ["pyproject.toml", "bitsandbytes/__init__.py"]
""",
    "bnb/fixes/bnb_line.py": FIX.format(
        fix="bnb_line",
        paths=("bitsandbytes/__main__.py",),
        before='if __name__ == "__main__":\n',
    ),
}


@pytest.mark.parametrize(
    ("recipe", "release", "upstream", "changed"),
    [
        (
            SGLANG,
            "sglang==0.5.5",
            "sglang-0.5.5-py3-none-any.whl",
            "sglang/launch_server.py",
        ),
        (
            TENSORS,
            "compressed-tensors==0.17.0",
            "compressed_tensors-0.17.0-py3-none-any.whl",
            "compressed_tensors/base.py",
        ),
        (
            BITSANDBYTES,
            "bnb==0.50.2",
            "bitsandbytes-0.50.2-py3-none-manylinux_2_24_aarch64.whl",
            "bitsandbytes/__main__.py",
        ),
    ],
)
def test_a_wheel_of_a_project_of_a_user(
    recipe, release, upstream, changed, tmp_path, patchkit
):
    home = write_files(tmp_path / "recipes", recipe)
    refused = patchkit("repack", release, rc=3)
    assert f"fetch {release} --lock" in refused.stderr
    lock(patchkit, release)
    lock(patchkit, release)  # once more: what is locked stays
    for file in home.glob("*/*.toml"):
        assert file.read_text().count("[[") <= 2, file
    (wheels,) = home.glob("*/wheels.toml")
    assert f'filename = "{upstream}"' in wheels.read_text()

    made = json.loads(patchkit("repack", release, "--json").stdout)
    again = json.loads(patchkit("repack", release, "--dir", "again", "--json").stdout)
    assert (made["source"]["file"], made["source"]["upstream"]) == (upstream, True)
    assert (made["fresh"], made["sha256"]) == (True, again["sha256"])
    wheel = tmp_path / made["wheel"]
    name, version, *tag = upstream.split("-")
    assert wheel.name.startswith(f"{name}-{version}+gb10.")
    assert wheel.name.endswith("-".join(["", *tag]))
    assert list(find_faults(wheel)) == []
    assert "1 wheel, all as listed" in patchkit("verify").stdout
    assert "made it already" in patchkit("repack", wheel, rc=2).stderr
    with zipfile.ZipFile(wheel) as bundle:
        files = bundle.namelist()
        assert f"{name}/.patchkit/ledger.json" in files
        (place,) = (file for file in files if file.endswith("/patchkit.json"))
        facts = json.loads(bundle.read(place))
        assert (facts["wheel"], facts["project"]) == (
            wheel.name.split("-")[1],
            name.replace("_", "-"),
        )

    # Installed and reverted, its package is upstream's, byte by byte.
    site = tmp_path / "site"
    words = ["pip", "install", "--quiet", "--no-deps", "--no-compile", "--target"]
    options = [] if "any.whl" in upstream else ["--platform", "manylinux_2_24_aarch64"]
    options += ["--only-binary=:all:"] if options else []
    run_program(sys.executable, "-m", *words, site, *options, wheel)
    with zipfile.ZipFile(cache_dir() / "sdists" / upstream) as bundle:
        stock = {file: bundle.read(file) for file in bundle.namelist()}
    assert (site / changed).read_bytes() != stock[changed]
    assert "nothing to do" in patchkit("apply", site / name).stdout
    patchkit("revert", site / name)
    for file, data in stock.items():
        if ".dist-info/" not in file and not file.endswith("/"):
            assert (site / file).read_bytes() == data, file


def test_what_has_no_wheel_or_no_recipe(tmp_path, patchkit):
    write_files(tmp_path / "recipes", TENSORS)
    assert "names no package" in patchkit("repack", "nccl==2.30.7", rc=2).stderr
    wheel = write_wheel(tmp_path, "1.0", project="other")
    told = patchkit("repack", wheel, rc=3).stderr
    assert "is a wheel of other, not of vllm" in " ".join(told.split())


VLLM = {
    "vllm/recipe.toml": 'fixes = ["a_line"]\n',
    "vllm/fixes/a_line.py": FIX.format(
        fix="a_line",
        paths=("vllm/version.py",),
        before="# SPDX-License-Identifier: Apache-2.0\n",
    ),
}


def test_a_fix_of_a_user_is_one_of_vllms(tmp_path, patchkit, tree):
    home = write_files(tmp_path / "recipes", VLLM)
    root = tree("0.33.0")
    done = json.loads(patchkit("apply", "--vllm-src", root, "--json").stdout)
    verdicts = {fix["id"]: fix["state"] for fix in done["fixes"]}
    assert (verdicts["a_line"], verdicts["arch_lists"]) == ("applied", "applied")
    assert done["added_recipes"] == [str(home / "vllm")]

    # The ledger names the recipe by its digest, so another fix is another recipe.
    ledger = json.loads((root / ".patchkit/ledger.json").read_text())
    assert ledger["recipe"] == done["recipe"]
    former = (home / "vllm/fixes/a_line.py").read_text()
    write_files(home, {"vllm/fixes/a_line.py": former.replace("a line", "my line")})
    patchkit("apply", "--vllm-src", root)
    assert "# my line\n" in (root / "vllm/version.py").read_text()


@pytest.mark.parametrize(
    ("files", "rc", "message"),
    [
        ({}, 2, "holds no recipe"),
        ({"x/recipe.toml": "fixes = []\n"}, 11, "x/recipe.toml: project: is missing"),
        ({"My-X/recipe.toml": "fixes = []\n"}, 11, "My-X: no name for a project"),
        ({"x/recipe.toml": "fixes = [\n"}, 11, "x/recipe.toml: is not TOML"),
        (VLLM | {"vllm/recipe.toml": 'fixes = ["b"]'}, 11, "vllm/fixes/b.py:1"),
        (
            {
                "vllm/recipe.toml": 'fixes = ["mine"]',
                "vllm/fixes/mine.py": FIX.format(fix="shm_spin", paths=(), before=""),
            },
            11,
            "the fix shm_spin is there already",
        ),
    ],
)
def test_a_mistake_in_a_folder_of_recipes(files, rc, message, tmp_path, patchkit):
    (tmp_path / "recipes").mkdir()
    write_files(tmp_path / "recipes", files)
    refused = patchkit("fixes", rc=rc)
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_missing_folder_of_recipes_is_an_error_of_every_verb(patchkit):
    for verb in ("fixes", "check"):
        refused = patchkit(verb, rc=2)
        assert refused.stderr.startswith("error: ")
        assert "Traceback" not in refused.stderr


def test_the_folder_may_be_named_after_the_verb(tmp_path, environment):
    first = write_files(tmp_path / "first", SGLANG)
    second = write_files(tmp_path / "second", TENSORS)
    words = [
        "--recipes",
        str(first),
        "explain",
        "sglang_lin",
        f"--recipes={second}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "patchkit", *words],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert f"patchkit --recipes {first}:{second} explain sglang_line" in done.stderr
