"""What people wrote by hand: links that lead somewhere, and facts that a recipe may change.

README's blocks run, as far as they do without a Spark: on machines of the tests.
"""

import json
import re
import shlex
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.version import Version

from patchkit.cli import group
from patchkit.durable.signals import SIGNALS
from patchkit.errors import PatchkitError
from patchkit.patching.recipe import load_recipe
from patchkit.recipes.vllm.build import recorded_needs
from patchkit.source.releases import load_facts
from support import hosts, readme

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
STARTS = ("README.md", "docs/install.md")
LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#]*)(?:#(?P<anchor>[^)]*))?\)")
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.skipif(
    not (ROOT / "recipes").exists(), reason="an sdist has recipes/ in patchkit/"
)
def test_links_lead_somewhere():
    wrong = []
    for page in PAGES:
        for link in LINK.finditer(page.read_text(encoding="utf-8")):
            place = page.parent / link["path"] if link["path"] else page
            if not place.exists() or (
                link["anchor"] and link["anchor"] not in anchors(place)
            ):
                wrong.append((page.name, link[0]))
    assert wrong == []


def test_every_page_is_reached_from_the_readme():
    reached, ahead = set(), {ROOT / "README.md"}
    while ahead:
        page = ahead.pop()
        reached.add(page)
        paths = [
            link["path"] for link in LINK.finditer(page.read_text(encoding="utf-8"))
        ]
        linked = {
            (page.parent / path).resolve() for path in paths if path.endswith(".md")
        }
        ahead |= linked - reached
    assert {*PAGES} - reached == {ROOT / "CHANGELOG.md"}


def test_pages_name_the_oldest_python_and_what_a_node_compiles_with():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    oldest = needed["requires-python"].removeprefix(">=")
    pages = {
        name: (ROOT / name).read_text("utf-8") for name in (*STARTS, "docs/cluster.md")
    }
    assert [
        name for name in STARTS if f"Python {oldest} or later" not in pages[name]
    ] == []
    # A node that serves compiles Triton's launcher, whichever page says so.
    for name in ("README.md", "docs/cluster.md"):
        assert re.search(r"to serve,[^.]*`gcc` and `python3-dev`", pages[name]), name
    assert "no compiler" not in pages["docs/cluster.md"]


def test_exit_codes_are_those_of_the_errors():
    rows = re.findall(
        r"^\| ([\d, ]+) \|",
        (ROOT / "docs/commands.md").read_text("utf-8"),
        re.MULTILINE,
    )
    ahead, codes = [PatchkitError], {0}
    while ahead:
        kind = ahead.pop()
        codes.add(kind.exit_code)
        ahead += kind.__subclasses__()
    interrupted = {128 + each for each in (*SIGNALS, signal.SIGPIPE)}
    assert {int(code) for row in rows for code in row.split(",")} == codes | interrupted


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a block's steps of patchkit; what serve-args printed, by machine."""
    for name, node in (*readme.MACHINES.values(), (readme.BARE, 0), (readme.BARE, 1)):
        hosts.build(tmp_path, name, node=node)
    monkeypatch.chdir(tmp_path)

    def block(title):
        lines = {}
        for step in readme.steps(title, tmp_path):
            program, *words = shlex.split(step.runs) or [""]
            if not program.endswith("patchkit") or words[0] == "repack":
                continue
            done = CliRunner().invoke(group, words, standalone_mode=False)
            assert done.exception is None, (step, done.exception)
            if words[0] == "serve-args":
                lines[step.machine] = shlex.split(done.stdout)
        return lines

    return block


def after(flag, words):
    return words[words.index(flag) + 1]


def curls(title, tmp_path):
    """Machine, address and model of each question that a block asks at its end."""
    for step in readme.steps(title, tmp_path):
        if found := re.match(
            r"curl localhost:(\d+)/v1/chat/completions .*-d '(.*)'", step.text
        ):
            yield step.machine, found[1], json.loads(found[2])["model"]


@pytest.mark.parametrize("failing", ["sudo", "python3", "pip", "patchkit"])
def test_a_step_of_one_spark_that_fails_is_the_last_one(failing, tmp_path):
    """Pasted into a shell that goes on after errors, as every interactive one does."""
    tell = 'echo "${0##*/} $1" >> steps\n'
    made = (
        "mkdir -p .venv/bin; cp pip patchkit .venv/bin; "
        "echo 'echo activated >> steps' > .venv/bin/"
    )
    scripts = {
        "sudo": tell,
        "python3": f"{tell}{made}activate\n",
        "pip": tell,
        "patchkit": tell,
        "curl": "exit 7\n",
        "sleep": "",
    }
    for name, script in scripts.items():
        place = tmp_path / name
        place.write_text(f"#!/bin/sh\n{script}{'exit 1' if name == failing else ''}\n")
        place.chmod(0o755)
    (tmp_path / "spark.env").write_text("echo sourced >> steps\n")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    pasted = readme.block(readme.README, readme.ONE)
    subprocess.run(
        ["bash", "-c", f"{pasted}wait"], cwd=tmp_path, env=env, capture_output=True
    )
    steps = (tmp_path / "steps").read_text().splitlines()
    # What begins the server is a line of its own, and says that there is no file.
    chain = [step for step in steps if step != "patchkit serve-args"]
    assert chain[-1].split()[0] == failing
    assert "sourced" not in chain


def test_one_spark_ends_in_a_server_that_is_asked(run, tmp_path):
    ((machine, port, model),) = curls(readme.ONE, tmp_path)
    line = run(readme.ONE)[machine]
    assert line[:3] == ["vllm", "serve", model]
    assert (after("--host", line), after("--port", line)) == ("127.0.0.1", port)


def test_two_sparks_get_a_rank_each_and_one_head(run, tmp_path):
    ((asked, port, model),) = curls(readme.BY_HAND, tmp_path)
    lines = run(readme.BY_HAND)
    assert [*lines] == ["spark-2", "spark-1"], "the worker starts first"
    head, worker = lines[asked], lines["spark-2"]
    assert head[:3] == worker[:3] == ["vllm", "serve", model]
    assert (
        after("--master-addr", head)
        == after("--master-addr", worker)
        == "192.168.100.10"
    )
    assert (after("--node-rank", head), after("--node-rank", worker)) == ("0", "1")
    assert after("--port", head) == port
    assert "--headless" in worker


def test_the_release_that_it_takes_has_no_known_trouble_with_nccl():
    torch = recorded_needs(Version(readme.release())).torch
    pinned = load_facts("nccl").torch[torch.rpartition(".")[0]]
    bugs = load_recipe("nccl").bugs_of(pinned.version)
    assert {bug.instead for bug in bugs} == {"the same NCCL on every node"}
