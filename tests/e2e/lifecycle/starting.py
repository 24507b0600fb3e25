"""Ask what `init`, `up` and `switch` make of what they find: edits, odd words, models that fail."""

from __future__ import annotations

import json
import time

from e2e.lifecycle import fake_venv, wiring
from e2e.lifecycle.cluster import MODEL, OTHER_MODEL, URL, LifecycleLab, insist, wait
from e2e.lifecycle.launcher import PATCHKIT
from patchkit.errors import HostError

UNIT = "patchkit-vllm.service"
GIVES_UP_SECONDS = 240
LIE_SECONDS = 12
ERROR = "RuntimeError: CUDA error: an illegal memory access was encountered"
MASTER_PORT = 29501
# What shells, systemd, its specifiers, its env files or C might read otherwise than it stands.
ODD = (
    *("two words", "", "'", '"', 'it\'s "so"', "%h %% %n", "$HOME ${HOME} $$", "\\", "a\\nb\\\\"),
    *("#no comment", ";", "\\;", "a;b", "-", "@", "~/x", "*", "{'a': [1, 2]}", '{"a": "$b %i"}'),
    *("größer 日本 🙂", "`id` $(id)", "a=b", "|&<>!?", "\\x41\\u0041\\101", " both "),
)
BLANK = ("tab\tand\nline", "\x07\x1b[0m")


def init_in_the_lab(lab: LifecycleLab) -> str:
    """`init` writes the file that serves; an edit stays; a name that the head does not know."""
    with lab.prepared("init_in_the_lab") as cluster:
        file = cluster.home / "cluster.toml"
        file.unlink()
        config = cluster.home / ".ssh/config"
        alias = f"Host second\n  HostName {wiring.lan_ip(2)}\n  User spark\n"
        config.write_text(config.read_text() + alias)
        words = ("--topology", "socket", "--target", "gb10", "--head-ip", wiring.qsfp_ip(1))
        said = cluster.patchkit("init", "spark1", "second", *words)
        insist(file.is_file(), f"init: {said.trouble}")
        text = file.read_text()
        insist(f'peer = "{wiring.qsfp_ip(2)}"' in text, f"no peer: {text}")
        cluster.up()
        cluster.down()
        edited = text.replace("port = 8000", "port = 8000  # mine")
        file.write_text(edited)
        again = cluster.patchkit("init", "spark1", "second", *words)
        insist(again.status != 0 and file.read_text() == edited, "init overwrote an edit")
        forced = cluster.patchkit("init", "spark1", "second", *words, "--force")
        insist(file.read_text() == text, f"--force: {forced.trouble}")
    return f"serves; `init` again exits with {again.status}, the edit stays"


def odd_words(lab: LifecycleLab) -> str:
    """Arguments and variables with blanks, quotes, %, $, backslashes and more in cluster.toml."""
    with lab.prepared("odd_words") as cluster:
        variables = {f"ODD_{number}": word for number, word in enumerate(ODD)}
        words = ["--odd", *ODD, *BLANK]
        cluster.describe(args=words, set=variables)
        cluster.up()
        for name, node in cluster.rack.nodes.items():
            (pid,) = cluster.processes(name)["main"]
            argv = node.file(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
            insist(argv[-len(words) :] == words, f"{name} got {argv[-len(words) :]}")
            environ = node.file(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            got = dict(each.split("=", 1) for each in environ if each.startswith("ODD_"))
            insist(got == variables, f"{name} got {got}")
        cluster.down()
    return f"{len(words)} words and {len(variables)} variables arrive unchanged on both nodes"


def gives_up(lab: LifecycleLab) -> str:
    """A model that fails on the worker while loading, each time."""
    with lab.prepared("gives_up") as cluster:
        head = cluster.rack["spark1"]
        cluster.change(FAIL=ERROR, FAIL_RANK=1)
        failed = cluster.patchkit("up", MODEL)
        insist(failed.status == HostError.exit_code, f"up: status {failed.status}")
        insist("spark2" in failed.errors and ERROR in failed.errors, f"up says: {failed.errors}")

        def gave_up() -> bool:
            return head.user("systemctl", "--user", "is-failed", UNIT).output == "failed\n"

        wait(gave_up, GIVES_UP_SECONDS, "systemd tries on")
        status = json.loads(cluster.patchkit("status", "--json").output)
        starts = status["nodes"][0]["starts"]
        insist(starts == 4, f"{starts} starts")
        said = cluster.patchkit("status").output
        insist("systemd gave up" in " ".join(said.split()), f"status does not say so: {said}")
        cluster.insist_on_nothing(failed=True)
        cluster.change()
        cluster.up()
        cluster.down()
    return f"`up` exits with {failed.status} and that rank's error; {starts} starts, then failed"


def wrong_token(lab: LifecycleLab) -> str:
    """`/health` says 200 long before anything is answered."""
    with lab.prepared("wrong_token") as cluster:
        head, laptop = cluster.rack["spark1"], cluster.rack.laptop
        cluster.change(LIE=LIE_SECONDS)
        began = laptop.start(*PATCHKIT, "up", MODEL, log="up")
        healthy = ("curl", "--silent", "--fail", "--max-time", "2", f"{URL}/health")
        wait(lambda: not head.user(*healthy).trouble, 60, "no /health")
        time.sleep(LIE_SECONDS / 2)
        state = head.user("systemctl", "--user", "is-active", UNIT).output.strip()
        insist(state == "activating", f"the unit is {state} before a token came")
        insist(began.poll() is None, "up returned before a token came")
        insist(began.wait() == 0, laptop.node.log("up").read_text())
        insist(cluster.answers(), "up returned, and it does not answer")
        cluster.down()
    return "activating until a token came; then `up` returns"


def port_taken(lab: LifecycleLab) -> str:
    """Something listens on the rendezvous' port of the head."""
    with lab.prepared("port_taken") as cluster:
        head = cluster.rack["spark1"]
        own = ("python3", "-m", "http.server", "--bind", wiring.qsfp_ip(1), str(MASTER_PORT))
        head.user("systemd-run", "--user", "--unit=other", *own)
        busy = f"ss -Hltn 'sport = :{MASTER_PORT}' | grep -q ."
        wait(lambda: not head.user("sh", "-c", busy).trouble, 20, "nobody listens")
        failed = cluster.patchkit("up", MODEL)
        insist(failed.status == HostError.exit_code, f"up: status {failed.status}")
        insist(f"{MASTER_PORT}" in failed.errors, f"up does not name it: {failed.errors}")
        cluster.insist_on_nothing()
        head.user("systemctl", "--user", "stop", "other")
        cluster.up()
        cluster.down()
    return f"`up` exits with {failed.status} and names the port; nothing is started"


def switch_back(lab: LifecycleLab) -> str:
    """`switch` to a model that fails while loading."""
    with lab.serving("switch_back") as cluster:
        for node in cluster.rack.nodes.values():
            fake_venv.change(node, FAIL=ERROR, FAIL_MODEL=OTHER_MODEL[1:])
        failed = cluster.patchkit("switch", OTHER_MODEL)
        insist(failed.status == HostError.exit_code, f"switch: status {failed.status}")
        insist(ERROR in failed.errors, f"switch says: {failed.errors}")
        insist(cluster.answers(), "the former does not answer")
        models = cluster.rack["spark1"].user("curl", "--silent", f"{URL}/v1/models").output
        insist(json.loads(models)["data"][0]["id"] == MODEL, f"serves {models}")
    return f"`switch` exits with {failed.status} and the error; the former answers again"
