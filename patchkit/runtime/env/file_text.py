"""Write the text of a node's env file: its facts, notes, and each variable with its reason."""

from __future__ import annotations

from collections.abc import Iterator

from patchkit.runtime.env.cluster_env import ClusterEnv
from patchkit.runtime.envfile.header import render_env_file
from patchkit.runtime.envfile.syntax import EnvEntry, Format
from patchkit.runtime.host.host import plain


def file_text(env: ClusterEnv, kind: Format, *, hostname: str, target: str = "") -> str:
    """Return the text. ``target`` is the one that a user asked for, empty for the probed one.

    Raises UsageError for what the format cannot hold.
    """
    return render_env_file(
        kind, [_header_facts(env, target), *_header_notes(env, hostname)], list(_env_entries(env))
    )


def where(env: ClusterEnv) -> str:
    """Return ``: 192.168.100.10 on enp1s0f0np0``, empty for a node alone."""
    attachment = env.node.attachment
    return f": {attachment.address} on {attachment.netdev}" if attachment.address else ""


def _header_facts(env: ClusterEnv, target: str) -> str:
    node = env.node
    facts = {
        "role": node.role,
        "topology": node.topology,
        "twin": node.attachment.twin,
        "executor": node.executor.name,
        "vllm": node.vllm,
        "nodes": str(node.nodes),
        "head": node.head,
        "nccl": plain(node.versions["nccl"]),
        "target": target,
        "quantization": node.quantization,
        "model": node.preset.id if node.preset else "",
        "set": ",".join(sorted(node.extra)),
        "with": ",".join(sorted(node.choice.wanted)),
        "without": ",".join(sorted(node.choice.unwanted)),
    }
    return " ".join(f"{name}={value}" for name, value in facts.items() if value)


def _header_notes(env: ClusterEnv, hostname: str) -> Iterator[str]:
    when = "before `ray start` and" if env.node.executor.name == "ray" else "before"
    yield f"For {hostname or 'this node'}{where(env)}. Load it {when} `vllm serve`."
    yield from (f"Note: {note}." for note in env.notes)
    yield from (f"Beware: {each.says}. Instead: {each.instead}." for each in env.advice)


def _env_entries(env: ClusterEnv) -> Iterator[EnvEntry]:
    """Return the variables; a reason stands above the first one of its rule."""
    seen: set[str] = set()
    for each in env.settings:
        again = each.rule in seen and not each.rule.startswith("--")
        seen.add(each.rule)
        yield EnvEntry(each.name, each.value, f"as above ({each.rule})" if again else each.comment)
