"""Check for values that are still to be filled in, where a launch needs the real ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from patchkit.finding import Finding, Level
from patchkit.runtime.files.content import FileContent, short
from patchkit.runtime.rules.sensitive_names import is_secret

# What nobody has as a value: CHANGEME…, <address>, your-ip, xxx.
_ANY = re.compile(
    r"<[^<>]+>|[x*?]{2,}|\.{3}|…|.*(?<![a-z])(change[-_ ]?(me|this)|replace[-_ ]?(me|this|with)"
    r"|fill[-_ ]?(me|in)|place[-_]?holder|your|todo|fixme|tbd|insert|choose[-_ ]an?)(?![a-z]).*",
    re.IGNORECASE,
)
_ADDRESS = re.compile(
    r"([\dx*?]+\.){3}\d*[x*?]+|(\d+\.)+[x*?](\.[x*?])*"  # 192.168.x.x, 10.0.0.X
    # head-roce-ip, HEAD_IP; but not ip-10-0-0-1, which is the name of a host
    r"|([a-z\d]+[-_])*(ip|addr|address)([-_][a-z]+)*"
    r"|(192\.0\.2|198\.51\.100|203\.0\.113)\.\d+",  # the networks of documentation, RFC 5737
    re.IGNORECASE,
)
# rocepXsYfZ: the names of interfaces and RDMA devices have no capitals but P and N.
_DEVICE = re.compile(r"[\^=]?[a-z]\w*[XYZ]\w*(:\d+)?")
_ADDRESSES = re.compile(r"MASTER_ADDR|.*_(IP|HOST|ADDR|ADDRESS)|(HEAD|MASTER|NODE|WORKER|LOCAL)IP")
_DEVICES = re.compile(r".*_(IFNAME|NET_DEVICES|IB_HCA|if_include)")
_READ = re.compile(r"(NCCL|VLLM|GLOO|TP|UCX|RAY|MASTER)_\w+")
# No process group is set up without these; without the others it only goes another way.
_NEEDED = re.compile(r"VLLM_HOST_IP|MASTER_ADDR|RAY_\w*ADDRESS|(NCCL|GLOO|TP)_SOCKET_IFNAME")
_FLAGS = ("--master-addr", "--node-ip-address", "--address")
_LONGEST = 200  # characters; a placeholder is short, and the patterns go over a text many times
_TEMPLATE = re.compile(r"(?i)(^|[._-])(example|sample|template|tmpl|tpl|dist|j2)([._-]|$)")


def is_placeholder(name: str, value: str) -> bool:
    """Return whether the value of a variable is still to be filled in."""
    if len(value) > _LONGEST:
        return False
    if _ADDRESSES.fullmatch(name) and _ADDRESS.fullmatch(value.rpartition(":")[0] or value):
        return True
    if _DEVICES.fullmatch(name) and any(map(_DEVICE.fullmatch, value.split(","))):
        return True
    return _ANY.fullmatch(value) is not None


def check_placeholders(content: FileContent, where: str) -> Iterator[Finding]:
    """Return variables and flags of the launch whose values are still to be filled in."""
    example = _TEMPLATE.search(PurePath(where).name) is not None
    for each in content.assignments:
        read = _READ.fullmatch(each.name) or _ADDRESSES.fullmatch(each.name)
        # A secret that is not there yet is how a file should be.
        if (
            read
            and each.literal
            and is_placeholder(each.name, each.value)
            and not is_secret(each.name)
        ):
            needed = _NEEDED.fullmatch(each.name) and not example
            yield _open(each.line, each.name, each.shown, error=bool(needed))
    for command in content.commands:
        for flag in command.flags:
            address = flag.value.rpartition(":")[0] or flag.value
            if flag.name in _FLAGS and flag.literal and is_placeholder("_IP", address):
                yield _open(flag.line, "", f"{flag.name} {short(flag.value)}", error=not example)


def _open(line: int, name: str, shown: str, *, error: bool) -> Finding:
    return Finding(
        line=line,
        about=name,
        level=Level.ERROR if error else Level.WARNING,
        what=f"{shown}: still to be filled in",
        why="Nothing here has this name or address.",
        hint="write this machine's own: `patchkit probe` shows them, `patchkit env` writes them",
    )
