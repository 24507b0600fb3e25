"""Decide the environment variables of a node, compare them with its head's, and write the text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from patchkit.errors import DriftError, UsageError
from patchkit.finding import Level
from patchkit.runtime.envfile.env_file import EnvFile
from patchkit.runtime.envfile.header import render_env_file
from patchkit.runtime.envfile.syntax import EnvEntry, Format
from patchkit.runtime.host.advice import remarks
from patchkit.runtime.host.host import Host, plain
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.refusals import refusal
from patchkit.runtime.rules.releases import release
from patchkit.runtime.rules.rule import holding
from patchkit.runtime.rules.secret_texts import is_secret, runs_code
from patchkit.runtime.rules.spelling import nearest_hint
from patchkit.runtime.rules.variable_rules import (
    VariableRule,
    VariableRules,
    cache_folders,
    load_variable_rules,
)
from patchkit.runtime.rules.variable_values import Takes, vllm_values
from patchkit.runtime.rules.variables import (
    nccl_variables,
    variable_table,
    vllm_variables,
)
from patchkit.target import DEFAULT_TARGET

_HCAS = "NCCL_IB_HCA"
_BARE = ("bare", "bare-first")  # states of a twin that has no IPv4 address
_NO_DEVICE = "the GPU is no GB10 or Thor, so their rules are left out; --target gb10 puts them in"
_NO_GPU = "no GPU is found here, so this is for a GB10; --target names another device"
_GATE = "HF_TOKEN"  # a secret: its value is in no file


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One variable; ``rule`` is what set it, ``scope`` ``shared`` or ``host``."""

    name: str
    value: str
    scope: str = "shared"
    reason: str
    rule: str
    source: str = ""

    @property
    def comment(self) -> str:
        """Return whose it is, why, and who says so."""
        nodes = "all nodes" if self.scope == "shared" else "this node"
        source = f"; {self.source}" if self.source else ""
        return f"[{nodes}] {self.reason} ({self.rule}{source})"


@dataclass(frozen=True, slots=True)
class Beware:
    """A problem that no variable solves, and what does."""

    says: str
    instead: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterEnv:
    """The environment of a node, shared settings first; ``--with`` turns on what is ``off``."""

    node: Node
    settings: tuple[Setting, ...]
    advice: tuple[Beware, ...]
    off: tuple[VariableRule, ...]
    notes: tuple[str, ...]

    @property
    def where(self) -> str:
        """Return ``: 192.168.100.10 on enp1s0f0np0``, empty for a node alone."""
        attachment = self.node.attachment
        return (
            f": {attachment.address} on {attachment.netdev}"
            if attachment.address
            else ""
        )


def cluster_env(
    node: Node,
    host: Host,
    rules: VariableRules,
    *,
    nccl: str = "",
    ptxas: str = "",
    caches: str = "",
    model: str = "",
) -> ClusterEnv:
    """Return the environment of a node.

    ``nccl`` is the release whose variables may be set, by default any; ``caches`` the folder on the
    node that a rule may keep caches in, for ``model`` or else the preset's. Raises UsageError for
    a rule or a variable of the user's that does not exist, or a value that it does not take,
    HostError for a fact that this host lacks, DriftError if a rule sets what this vLLM does not
    read or take.
    """
    node.choice.check(rules.rules, "`patchkit env explain` lists them")
    on, off = node.choice.divide(holding(rules.rules, node.situation))
    replaced = {rule.replaces for rule in on}
    model = model or (node.preset.id if node.preset else "")
    more = {
        "ptxas": ptxas,
        **(cache_folders(caches, node.vllm, model) if caches else {}),
    }
    settings = [
        *_choose_settings([rule for rule in on if rule.id not in replaced], node, more)
    ]
    known, values = (
        vllm_variables(node.vllm, host.vllm_home(node.vllm)),
        vllm_values(node.vllm),
    )
    setters: dict[str, str] = {}
    for setting in settings:
        before = setters.setdefault(setting.name, setting.rule)
        if before != setting.rule:
            raise refusal(
                "set-twice", name=setting.name, first=before, rule=setting.rule
            )
        _check_setting(setting, node.vllm, nccl, known, values.get(setting.name))
    # A stable sort: the rules keep their order, which is that of the data.
    settings.sort(key=lambda setting: setting.scope != "shared")
    used = {"", *(f"cage {number}" for number in node.attachment.cages)}
    found = remarks(host, "env") if node.role != "single" else ()
    own = {setting.name: setting.value for setting in settings}
    advice, notes = [], [*node.attachment.notes]
    for remark in (remark for remark in found if remark.where in used):
        # A grave one says what will fail, and what to do instead.
        if remark.level in (Level.ERROR, Level.WARNING) and remark.hint:
            advice.append(Beware(remark.what, remark.hint))
        else:
            notes.append("; ".join(filter(None, (remark.what, remark.hint))))
    rows = (row for row in holding(rules.advice, node.situation) if not row.solved(own))
    advice += (Beware(row.says, row.instead) for row in rows)
    attachment = node.attachment
    if own.get(_HCAS) == attachment.half != attachment.hcas:
        other = set(attachment.hcas.strip("=").split(",")) - {
            attachment.half.strip("=")
        }
        notes.append(
            f"{', '.join(other)}, the other half of the cable, is left out of {_HCAS}"
        )
    if node.target == "other":
        notes.append(_NO_DEVICE)
    elif node.target == DEFAULT_TARGET and not host.gpus:
        notes.append(_NO_GPU)
    # Rules about NCCL are for several nodes.
    asked = ("triton",) if node.role == "single" else ("triton", "nccl")
    if missing := [name for name in asked if not node.versions[name]]:
        options = " and ".join(f"--{name}" for name in missing)
        versions = f"the version of {' and '.join(missing)} is unknown ({options})"
        notes.append(f"{versions}: no rule about it")
    return ClusterEnv(
        node=node,
        settings=tuple(settings),
        advice=tuple(advice),
        off=off,
        notes=tuple(notes),
    )


def _choose_settings(
    rules: Sequence[VariableRule], node: Node, facts: Mapping[str, str]
) -> Iterator[Setting]:
    """Return what sets a variable: the user before the preset, and both before the rules."""
    attachment, preset = node.attachment, node.preset
    own = {
        name: getattr(attachment, name)
        for name in ("address", "netdev", "data", "hcas", "half")
    }
    facts = {**facts, **own, "netdevs": ",".join(attachment.netdevs)}
    # Empty facts are left out, so that a rule that needs one of them raises KeyError.
    facts = {name: fact for name, fact in facts.items() if fact}
    taken = {*node.extra}
    if preset:
        # What a model needs beside its flags; a token is only referred to.
        of_model = {**preset.variables, **({_GATE: ""} if preset.needs_token else {})}
        for name, value in of_model.items():
            reason = f"{preset.name} is {'served so' if value else 'gated'}"
            if name not in taken:
                yield Setting(
                    name=name,
                    value=value,
                    reason=reason,
                    rule="preset",
                    source=preset.source,
                )
        taken |= of_model.keys()
    pairs = ((rule, name, value) for rule in rules for name, value in rule.set.items())
    for rule, name, value in (row for row in pairs if row[1] not in taken):
        try:
            filled = value.format_map(facts)
        except KeyError as error:
            words = {"name": name, "fact": error.args[0], "rule": rule.id}
            raise refusal("no-fact", **words, reason=rule.reason) from None
        words = {"reason": rule.reason, "rule": rule.id, "source": rule.source}
        yield Setting(name=name, value=filled, scope=rule.scope, **words)
    for name, value in node.extra.items():
        yield Setting(name=name, value=value, reason="asked for", rule="--set")


def _check_setting(
    setting: Setting,
    vllm: str,
    nccl: str,
    known: Mapping[str, str],
    takes: Takes | None,
) -> None:
    """Raise for a name that vLLM or NCCL does not read, and a value at which vLLM stops."""
    # Other programs have no full list of names, nor has the table those of a newer NCCL.
    name, kind = setting.name, UsageError if setting.rule == "--set" else DriftError
    names, reader = known, f"vLLM {vllm}"
    if not name.startswith("VLLM_"):
        newest = variable_table("nccl").newest
        if not name.startswith("NCCL_") or (nccl and release(nccl) > release(newest)):
            return
        names, reader = nccl_variables(nccl), "NCCL"
    if name not in names:
        raise kind(
            f"{reader} does not read {name} (set by {setting.rule})",
            hint=nearest_hint(
                name, names, "`patchkit env explain` lists what it reads"
            ),
        )
    if reader != "NCCL" and takes and not takes.has(setting.value):
        raise kind(
            f"{reader} does not take {name}={setting.value} (set by {setting.rule})",
            why="it reads this variable when it starts, and stops with a ValueError",
            hint=f"it takes {takes.in_words}",
        )


def agree(env: ClusterEnv, head: EnvFile, here: Collection[str] = ()) -> ClusterEnv:
    """Return the worker's environment with what its head shares.

    What the worker's own rules do not set, such as what a user added on the head, is taken over;
    ``check_transfer`` has said that it may be. ``here`` are the names that the user sets on this
    node. Raises HostError if the two contradict each other.
    """
    of_host = load_variable_rules().of_host
    _check_overwritten(env, head)
    scopes = {setting.name: setting.scope for setting in env.settings}
    mine = {
        setting.name: setting.value
        for setting in env.settings
        if setting.scope == "shared" and not is_secret(setting.name)
    }
    # A name that some rule sets per host is the host's, unless it is shared in this very case.
    theirs = {
        name: value
        for name, value in head.variables.items()
        if scopes.get(name, "host" if name in of_host else "shared") == "shared"
    }
    # Of names that this node does not set, one that runs code is a rule's that it does not have.
    compared = [
        *mine,
        *(name for name in theirs if name not in mine and runs_code(name)),
    ]
    problems = [
        f"{name} is {mine.get(name, 'not set')} here and {theirs.get(name, 'not set')} there"
        for name in compared
        if mine.get(name) != theirs.get(name)
    ]
    if problems:
        raise refusal("against-head", file=head.where, problems="; ".join(problems))
    taken = [
        Setting(name=name, value=value, reason="as on the head", rule="--from")
        for name, value in theirs.items()
        if name not in mine
    ]
    notes = [*env.notes]
    if head.edited:
        added = [
            *taken,
            *(setting for setting in env.settings if setting.rule == "--set"),
        ]
        names = ", ".join(
            f"{setting.name}={setting.value} (line {head.lines.get(setting.name, 1)})"
            for setting in added
            if setting.name not in here
        )
        # A digest cannot say what was edited.
        what = "every shared variable is as this node's rules set it"
        what = f"not from this node's rules: {names}" if names else what
        edited = f"{head.where} was edited after patchkit wrote it, and --accept-edited was given"
        notes.append(f"{edited}; {what}")
    twins = env.node.attachment.twin, head.facts.get("twin", "")
    lists = [row.value for row in env.settings if row.name == _HCAS]
    both = all("," in names for names in (*lists, head.variables.get(_HCAS, "")))
    if all(twins) and both and (twins[0] in _BARE) is not (twins[1] in _BARE):
        has, lacks = (
            ("the head", "this node")
            if twins[0] in _BARE
            else ("this node", "the head")
        )
        notes.append(
            f"the other half of the cable has an IPv4 address on {has} and none on {lacks}: "
            "`ibv_modify_qp` fails so; give it one on both nodes, or on none"
        )
    return replace(env, settings=(*taken, *env.settings), notes=tuple(notes))


def _check_overwritten(env: ClusterEnv, head: EnvFile) -> None:
    """Raise HostError where the head's values would replace other ones that the worker owns."""
    executor = env.node.executor
    if executor.copies != "overwrites":
        return
    lost = [
        f"{row.name} is {row.value} here and {head.variables[row.name]} there"
        for row in env.settings
        if row.scope == "host" and row.name.startswith(executor.prefixes)
        # The one variable with such a prefix that Ray's executor does not copy.
        if row.name != "VLLM_HOST_IP"
        and head.variables.get(row.name, row.value) != row.value
    ]
    if lost:
        raise refusal("overwritten", values="; ".join(lost), reason=executor.reason)


def file_text(env: ClusterEnv, kind: Format, *, hostname: str, target: str = "") -> str:
    """Return the text of the env file; ``target`` is the one asked for. Raises UsageError."""
    node = env.node
    same = ("role", "topology", "twin", "executor", "vllm", "nodes")
    facts = {
        **{name: node.situation[name] for name in same},
        "head": node.head,
        "nccl": plain(node.versions["nccl"]),
        "target": target,
        "quantization": node.quantization,
        "model": node.preset.id if node.preset else "",
        "set": ",".join(sorted(node.extra)),
        "with": ",".join(sorted(node.choice.wanted)),
        "without": ",".join(sorted(node.choice.unwanted)),
    }
    when = "before `ray start` and" if node.executor.name == "ray" else "before"
    header = [
        " ".join(f"{name}={value}" for name, value in facts.items() if value),
        f"For {hostname or 'this node'}{env.where}. Load it {when} `vllm serve`.",
        *(f"Note: {note}." for note in env.notes),
        *(f"Beware: {row.says}. Instead: {row.instead}." for row in env.advice),
    ]
    entries, stated = [], set()
    for setting in env.settings:
        # A reason stands above the first variable of its rule.
        again = setting.rule in stated and not setting.rule.startswith("--")
        comment = f"as above ({setting.rule})" if again else setting.comment
        stated.add(setting.rule)
        entries.append(EnvEntry(setting.name, setting.value, comment))
    return render_env_file(kind, header, entries)
