"""What a wheelhouse tells pip and uv, taken by real ones; overridden pins; the command line."""

import json
import shlex

import pytest
from click.testing import CliRunner

from patchkit.cli import group
from patchkit.errors import SourceError, UsageError
from patchkit.wheel.wheelhouse.overrides import default_version
from patchkit.wheel.wheelhouse.storage import add_wheel
from support.filling import THIS, TORCH, installed, locked
from support.wheels import ELSEWHERE, HERE, OTHER_CPU, write_wheel

STOCK, OURS = "2.29.7", "2.29.7+gb10.abc123"
LIBRARY = "nvidia/nccl/lib/libnccl.so.2"
LOCKED = ["--require-hashes", "--no-deps", "--find-links", "wheelhouse"]
LOCKED += ["-r", "wheelhouse/requirements.txt"]


@pytest.mark.e2e
def test_ours_takes_the_place_of_stock(node, house, made, tmp_path):
    torch = made("2.13.0", project="torch", requires=["nvidia-nccl-cu13==2.29.7"])
    node("install", made(STOCK), torch)
    add_wheel(house, made(OURS), {})
    (library,) = (tmp_path / "node/lib").glob(f"python*/site-packages/{LIBRARY}")
    assert library.read_text() == f"{STOCK} {HERE}"

    node("install", *LOCKED)
    assert installed(node) == [f"nvidia-nccl-cu13=={OURS}", "torch==2.13.0"]
    assert library.read_text() == f"{OURS} {HERE}"
    assert "No broken requirements found" in node("check")
    assert "already satisfied" in node("install", "torch")
    node("uninstall", "--yes", "nvidia-nccl-cu13")
    assert installed(node) == ["torch==2.13.0"]

    write_wheel(house, OURS, files={LIBRARY: b"changed"})
    assert "DO NOT MATCH THE HASHES" in node("install", *LOCKED, rc=1)


def test_wheels_for_two_cpus(node, house, made):
    for tag in (HERE, ELSEWHERE):
        add_wheel(house, made(OURS, tag=tag), {})
    add_wheel(house, made("1.0", project="anywhere", tag="py3-none-any"), {})
    said = node("install", *LOCKED)
    assert (
        f"Ignoring nvidia-nccl-cu13: markers 'platform_machine == \"{OTHER_CPU}\"'"
        in said
    )
    assert installed(node) == ["anywhere==1.0", f"nvidia-nccl-cu13=={OURS}"]


# The command line


def test_list_verify_prune(cli, house, made):
    facts = {"target": "gb10", "archs": ["12.1a"]}
    place = add_wheel(house, made(OURS), facts)
    add_wheel(house, made("0.25.1", project="vllm"), {})

    _head, *rows, fill = map(str.split, cli("wheelhouse", "list").stdout.splitlines())
    assert [(*row[:3], row[5]) for row in rows] == [
        ("nvidia-nccl-cu13", OURS, "built", HERE),
        ("vllm", "0.25.1", "built", HERE),
    ]
    assert fill[-4:] == ["wheelhouse", "fill", "--dir", "wheelhouse"]
    listed = json.loads(cli("wheelhouse", "list", "--json").stdout)["wheels"]
    assert (listed[0]["filename"], listed[0]["facts"]) == (place.name, facts)
    assert "2 wheels, all as listed" in cli("verify").stdout
    assert "nothing to remove" in cli("wheelhouse", "prune").stdout

    write_wheel(house, STOCK)
    found = cli("verify", house, rc=2).stdout
    stock = f"nvidia_nccl_cu13-{STOCK}-{HERE}.whl"
    assert f"✗ {stock}  is not in manifest.json\n" in found
    assert "nothing was changed" in cli("wheelhouse", "prune", "--dry-run").stdout
    changes = json.loads(cli("wheelhouse", "prune", "--drop", "vllm", "--json").stdout)[
        "changes"
    ]
    assert [change["reason"] for change in changes][:2] == [
        "dropped",
        "not in manifest.json",
    ]
    place.write_bytes(place.read_bytes()[:-1])
    assert "it was changed or cut short" in cli("verify", rc=8).stdout


LATER = "2.30.7+gb10.abc123"
PIN = "nvidia-nccl-cu13==2.30.7"
BUG = "NCCL 2.28.9 deadlocks across nodes with CUDA graphs"
NCCL = "nvidia-nccl-cu13==2.28.9; sys_platform == 'linux'"


@pytest.fixture
def world(built, offered):
    """A vLLM that leads to torch 2.11 and with it to NCCL 2.28.9; stock's 2.30.7 is to be had."""
    built("0.25.1", project="vllm", requires=["torch==2.11.0", "leaf"])
    offered("torch", "2.11.0", HERE, requires=["nvidia-cudnn-cu13", NCCL], files=TORCH)
    for project in ("leaf", "nvidia-cudnn-cu13"):
        offered(project, "1.0")
    for version in ("2.28.9", "2.30.7"):
        offered("nvidia-nccl-cu13", version, HERE)


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Run patchkit in this process: ``call("verify", rc=2)``; its own errors are raised."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, rc=0, env=None):
        done = CliRunner().invoke(group, [str(each) for each in arguments], env=env)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == rc, done.output
        return done

    return run


def line_of(said, word):
    """The one line of an output that holds a word."""
    (line,) = (line.strip() for line in said.splitlines() if word in line)
    return line


@pytest.mark.e2e
def test_the_whole_way_around_a_pin(world, built, fill, call, house, node):
    """The circle of 0.25.1: the pinned release has a bug, and is built again."""
    offer = call("verify", house).stdout
    assert f"beware {BUG} (known bug: vllm issue 52504, cured by 2.30.4" in offer
    assert str(default_version(house)[0]) == "2.28.9"

    override = line_of(offer, "next, ").removeprefix(
        "next, to take another one: patchkit "
    )
    assert override == f"wheelhouse override --dir {house} {PIN}"
    said = call(*shlex.split(override)).stdout
    assert (
        f"{PIN} in the place of 2.28.9, which torch 2.11.0 pins: {BUG} (the user)"
        in said
    )
    assert line_of(said, "next:") == f"next: patchkit build nccl --dir {house}"
    version, why = default_version(house)
    assert (str(version), why.partition(",")[0]) == (
        "2.30.7",
        f"{PIN} in the place of 2.28.9",
    )

    built(LATER)
    line = line_of(fill("--python-version", THIS).stdout, "pip install")
    install = shlex.split(line.partition("pip ")[2])
    assert f"nvidia-nccl-cu13=={LATER}" in locked(house)
    verified = call("verify").stdout
    assert "override nvidia-nccl-cu13==2.30.7 in the place of 2.28.9" in verified
    assert "2 wheels and 3 dependencies, all as listed" in verified
    assert "beware" not in verified

    # No resolver takes the lock as it is: the printed line says --no-deps, and that it takes.
    resolving = [word for word in install if word != "--no-deps"]
    for by, options in (("uv", []), ("pip", ["--yes"])):
        assert "2.28.9" in node(*resolving, by=by, rc=1)
        assert LATER in node(*install, by=by)
        node("uninstall", "nvidia-nccl-cu13", *options, by=by)
    node(*install)
    (complaint,) = (line for line in node("check", rc=1).splitlines() if line)
    assert complaint.startswith(
        f"torch 2.11.0 has requirement {NCCL.partition(';')[0]}"
    )
    assert complaint.endswith(f"but you have nvidia-nccl-cu13 {LATER}.")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["numpy==2.0"], "pinned are torch==2.11.0, nvidia-nccl-cu13==2.28.9"),
        (
            ["nvidia-nccl-cu13==2.28.9"],
            "is no release later than 2.28.9, which torch 2.11.0 pins",
        ),
        ([f"nvidia-nccl-cu13=={LATER}"], "is no release later than 2.28.9"),
        (["nvidia-nccl-cu13>=2.30"], "is not a pin, PROJECT==VERSION"),
        (["torch==2.14.0"], "was compiled against torch==2.11.0"),
        ([PIN, "--remove", "torch"], "exclude each other"),
        ([], "name a pin: PROJECT==VERSION\n  next: `patchkit verify wheelhouse`"),
        (["--remove", "nvidia-nccl-cu13"], "there is no override of nvidia-nccl-cu13"),
        ([PIN, "--dir", "elsewhere"], "elsewhere: no such folder"),
    ],
)
def test_refusals(arguments, says, world, house, call):
    before = {path.name: path.read_bytes() for path in house.iterdir()}
    with pytest.raises(UsageError) as caught:
        call("wheelhouse", "override", *arguments)
    assert says in str(caught.value)
    assert {path.name: path.read_bytes() for path in house.iterdir()} == before


def test_a_record_that_was_edited(world, call, house):
    call("wheelhouse", "override", PIN)
    place = house / "manifest.json"
    text = place.read_text()
    place.write_text(text.replace("2.30.7", "2.31.2"))
    found = json.loads(call("verify", "--json", rc=8).stdout)["findings"]
    assert {each["where"] for each in found} == {"requirements.txt", "SHA256SUMS"}
    for old, new in (
        ('"reason"', '"reasons"'),
        ("2.30.7", "2.27.7"),
        ('"the user"', '"the\\nuser"'),
        ("torch 2.11.0", "torch"),
    ):
        assert old in text
        place.write_text(text.replace(old, new))
        with pytest.raises(SourceError, match=r"cannot be read: overrides\[1\]"):
            call("verify")
