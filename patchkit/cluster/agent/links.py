"""Say how a head reaches its workers by ssh: over the cable, with the host key that it knows.

Runs on the head, with the head's own ssh configuration.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from patchkit.cluster.ssh.failure import error_fields
from patchkit.cluster.ssh.ssh import BATCH, check_destination, ssh_error
from patchkit.process import attempt

_STANDARD_PORT = "22"
# The first word about an option counts: these stand before BATCH. A link's own connection: one that
# others share may hang behind a cable that was out, and what it forwards is not needed.
_OF_A_LINK = (
    *("-o", "ConnectTimeout=5"),
    *("-o", "ControlMaster=no"),
    *("-o", "ControlPath=none"),
    *("-o", "ClearAllForwardings=yes"),
    *("-o", "ForwardAgent=no"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLink:
    """``words`` lead from the head to a worker; ``error`` holds the fields of one, {} for none."""

    words: tuple[str, ...]
    error: dict[str, str]


def try_links(peers: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the link to each peer, ``(DESTINATION, ADDRESS ON THE CABLE)``, tried as a unit would.

    A unit has no agent of a login: the key must work without one.
    """
    environment = {key: value for key, value in os.environ.items() if key != "SSH_AUTH_SOCK"}
    found = []
    for destination, address in peers:
        words = link_words(destination, address)
        done = attempt(*words, "true", env=environment, timeout=30)
        error = ssh_error(done, destination) if done.trouble else None
        found.append(asdict(PeerLink(words=words, error=error_fields(error) if error else {})))
    return found


def link_words(destination: str, address: str) -> tuple[str, ...]:
    """Return the words up to the remote command; without an address ssh's own way is taken.

    The host key is looked for where ssh has it for the destination, whatever the address.
    """
    check_destination(destination)
    here = dict(
        line.partition(" ")[::2]
        for line in attempt("ssh", "-G", "--", destination).output.split("\n")
    )
    name, port = here.get("hostname", destination), here.get("port", _STANDARD_PORT)
    over_cable: tuple[str, ...] = ()
    if address and address != name:
        known = name if port == _STANDARD_PORT else f"[{name}]:{port}"
        over_cable = (
            *("-o", f"HostName={address}"),
            *("-o", f"HostKeyAlias={here.get('hostkeyalias') or known}"),
            *("-o", "CheckHostIP=no"),
            # Of a jump host the cable has no need.
            *("-o", "ProxyJump=none"),
            *("-o", "ProxyCommand=none"),
        )
    return ("ssh", "-T", *_OF_A_LINK, *over_cable, *BATCH, "--", destination)
