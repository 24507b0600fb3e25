"""Decide the variables of a node, compare them with those of its head, and write the env file."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace

from patchkit.errors import DriftError, PatchkitError, UsageError
from patchkit.finding import Level
from patchkit.frozen import Texts, Values, frozen, positional
from patchkit.runtime.envfile.env_file import EnvEntry, EnvFile, Format, render_env_file
from patchkit.runtime.host.advice import find_remarks
from patchkit.runtime.host.host import Host, plain_version
from patchkit.runtime.node.decision import Node
from patchkit.runtime.rules.presets import Preset
from patchkit.runtime.rules.releases import (
    nccl_variables,
    refusal,
    release,
    variable_table,
    vllm_variables,
)
from patchkit.runtime.rules.rule import (
    VariableRule,
    VariableRules,
    cache_folders,
    load_variable_rules,
    select_entries,
)
from patchkit.runtime.rules.secret_texts import find_code_risk, is_secret
from patchkit.runtime.rules.spelling import nearest_hint
from patchkit.runtime.rules.variable_values import AllowedValues, vllm_values
from patchkit.target import DEFAULT_TARGET


@frozen
class Setting:
    """One variable with its value.

    ``scope`` is ``shared`` if all nodes need the same value, else ``host``. ``rule`` is the id of
    the rule that set it, ``preset``, or an option: ``--set``, ``--from``. ``source`` names who
    recommends it.
    """

    name: str
    value: str
    scope: str = "shared"
    reason: str
    rule: str
    source: str = ""

    @property
    def comment(self) -> str:
        """Return ``[all nodes] REASON (RULE; SOURCE)``, the comment in the env file."""
        nodes = "all nodes" if self.scope == "shared" else "this node"
        source = f"; {self.source}" if self.source else ""
        return f"[{nodes}] {self.reason} ({self.rule}{source})"

    @property
    def error_kind(self) -> type[PatchkitError]:
        """Return the class of error for a wrong setting: UsageError for one that the user set."""
        return UsageError if self.rule == "--set" else DriftError


@positional
class Caveat:
    """A problem that no variable solves, and what to do ``instead``."""

    says: str
    instead: str


@frozen
class ClusterEnv:
    """The environment of a node.

    ``settings`` has the shared variables first. ``off`` are rules that fit this node and are not in
    use; ``--with`` turns them on.
    """

    node: Node
    settings: tuple[Setting, ...]
    advice: tuple[Caveat, ...]
    off: tuple[VariableRule, ...]
    notes: Texts

    @property
    def where(self) -> str:
        """Return ``: 192.168.100.10 on enp1s0f0np0``, "" for a node alone."""
        attachment = self.node.attachment
        if not attachment.address:
            return ""
        return f": {attachment.address} on {attachment.netdev}"


def make_cluster_env(
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

    ``nccl`` is the release whose variables may be set; "" allows any. ``ptxas`` is the path of a
    ptxas on the node. ``caches`` is the folder on the node for caches of ``model``, by default the
    model of the preset. Raises UsageError if the user names a rule or a variable that does not
    exist, or a value that vLLM does not take; HostError for a fact that this host lacks; DriftError
    if a rule sets a variable or a value that this vLLM does not know.
    """
    node.choice.check(rules.rules, "`patchkit env explain` lists them")
    holding = select_entries(rules.rules, node.situation)
    chosen, off = node.choice.divide(holding)
    replaced = {rule.replaces for rule in chosen}
    active = [rule for rule in chosen if rule.id not in replaced]

    facts = {"ptxas": ptxas}
    if caches:
        if node.preset and not model:
            model = node.preset.id
        facts |= cache_folders(caches, node.vllm, model)
    settings = list(_choose_settings(active, node, facts))
    _check_settings(settings, node, host, nccl)
    # A stable sort: the rules keep the order of the data.
    settings.sort(key=lambda setting: setting.scope != "shared")

    values = {setting.name: setting.value for setting in settings}
    caveats, notes = _divide_remarks(node, host)
    for row in select_entries(rules.advice, node.situation):
        if not row.solved(values):
            caveats.append(Caveat(row.says, row.instead))
    notes += _note_gaps(node, host)
    return ClusterEnv(
        node=node,
        settings=tuple(settings),
        advice=tuple(caveats),
        off=off,
        notes=(*node.attachment.notes, *notes),
    )


def _divide_remarks(node: Node, host: Host) -> tuple[list[Caveat], list[str]]:
    """Return the remarks about the machine and the cages that carry the data.

    Errors and warnings with a hint become caveats, all other remarks become notes.
    """
    caveats: list[Caveat] = []
    notes: list[str] = []
    if node.role == "single":
        return caveats, notes

    for remark in find_remarks(host, "env", node.attachment.cages):
        if remark.hint and remark.level in (Level.ERROR, Level.WARNING):
            caveats.append(Caveat(remark.what, remark.hint))
        else:
            notes.append("; ".join(filter(None, (remark.what, remark.hint))))
    return caveats, notes


def _note_gaps(node: Node, host: Host) -> Iterator[str]:
    """Yield that no GPU is found for the target, and the versions that are unknown."""
    if node.target == DEFAULT_TARGET and not host.gpus:
        yield "no GPU is found here, so this is for a GB10; `target` names another"

    # Only clusters have rules about NCCL.
    ruled = ["triton"] if node.role == "single" else ["triton", "nccl"]
    missing = [name for name in ruled if not node.versions[name]]
    if missing:
        names = " and ".join(missing)
        yield f"the version of {names} is unknown (--lock tells it): no rule about it"


def _choose_settings(
    rules: Sequence[VariableRule],
    node: Node,
    facts: Values,
) -> Iterator[Setting]:
    """Yield the settings of the preset, the rules and the user.

    A variable of the user replaces those of the preset and the rules, and a variable of the preset
    those of the rules. Two rules may set one variable: ``_check_settings`` refuses that. Raises
    HostError for a missing fact.
    """
    taken_names = {*node.extra}
    if node.preset:
        for setting in _read_preset(node.preset):
            if setting.name not in taken_names:
                yield setting
                taken_names.add(setting.name)

    attachment = node.attachment
    netdevs = ",".join(attachment.netdevs)
    facts = {**facts, **asdict(attachment), "netdevs": netdevs}
    # Without empty facts, so that a rule that needs one raises KeyError, not an empty value.
    facts = {name: fact for name, fact in facts.items() if fact}
    for rule in rules:
        for name in (name for name in rule.set if name not in taken_names):
            yield _apply_rule(rule, name, facts)

    for name, value in node.extra.items():
        yield Setting(name=name, value=value, reason="asked for", rule="--set")


def _read_preset(preset: Preset) -> Iterator[Setting]:
    """Yield the variables that a model needs. HF_TOKEN is yielded without its value."""
    variables = dict(preset.variables)
    if preset.needs_token:
        variables["HF_TOKEN"] = ""  # a secret: patchkit writes its value to no file
    for name, value in variables.items():
        yield Setting(
            name=name,
            value=value,
            reason=f"{preset.name} is {'served so' if value else 'gated'}",
            rule="preset",
            source=preset.source,
        )


def _apply_rule(rule: VariableRule, name: str, facts: Values) -> Setting:
    """Return the setting of a rule for one variable, with facts filled into its value.

    Raises HostError for a missing fact.
    """
    try:
        value = rule.set[name].format_map(facts)
    except KeyError as error:
        raise refusal(
            "no-fact",
            name=name,
            fact=error.args[0],
            rule=rule.id,
            reason=rule.reason,
        ) from None

    return Setting(
        name=name,
        value=value,
        scope=rule.scope,
        reason=rule.reason,
        rule=rule.id,
        source=rule.source,
    )


def _check_settings(
    settings: Sequence[Setting],
    node: Node,
    host: Host,
    nccl: str,
) -> None:
    """Raise if two rules set one variable, if nothing reads it, or if vLLM refuses its value.

    Raises UsageError for a setting of the user, DriftError for one of a rule.
    """
    of_vllm = vllm_variables(node.vllm, host.vllm_home(node.vllm))
    values = vllm_values(node.vllm)
    is_in_table = not nccl or release(nccl) <= release(variable_table("nccl").newest)
    setters: dict[str, str] = {}
    for setting in settings:
        name = setting.name
        setter = setters.setdefault(name, setting.rule)
        if setter != setting.rule:
            raise refusal("set-twice", name=name, first=setter, rule=setting.rule)

        # Only vLLM and NCCL have a full list of their variables.
        if name.startswith("VLLM_"):
            _check_name(setting, f"vLLM {node.vllm}", of_vllm)
            _check_value(setting, node.vllm, values.get(name))
        elif name.startswith("NCCL_") and is_in_table:
            _check_name(setting, "NCCL", nccl_variables(nccl))


def _check_name(setting: Setting, reader: str, names: Values) -> None:
    if setting.name not in names:
        hint = "`patchkit env explain` lists what it reads"
        raise setting.error_kind(
            f"{reader} does not read {setting.name} (set by {setting.rule})",
            hint=nearest_hint(setting.name, names, hint),
        )


def _check_value(setting: Setting, vllm: str, takes: AllowedValues | None) -> None:
    if takes and not takes.allows(setting.value):
        assignment = f"{setting.name}={setting.value}"
        raise setting.error_kind(
            f"vLLM {vllm} does not take {assignment} (set by {setting.rule})",
            why="it reads this variable when it starts, and stops with a ValueError",
            hint=f"it takes {takes.description}",
        )


def adopt_shared_settings(env: ClusterEnv, head: EnvFile) -> ClusterEnv:
    """Return the worker's environment with the variables that its head shares.

    A variable that no rule of the worker sets, such as one that a user added on the head, is taken
    over; the caller has checked by ``check_transfer`` that this is allowed. Raises
    HostError if a shared variable differs.
    """
    _check_overwritten(env, head)
    own_values = {
        setting.name: setting.value
        for setting in env.settings
        if setting.scope == "shared" and not is_secret(setting.name)
    }
    # A variable is per host if any rule sets it so, unless a setting of this node shares it.
    scopes = dict.fromkeys(load_variable_rules().of_host, "host")
    scopes |= {setting.name: setting.scope for setting in env.settings}
    shared = {
        name: value
        for name, value in head.variables.items()
        if scopes.get(name, "shared") == "shared"
    }
    missing = {name: value for name, value in shared.items() if name not in own_values}
    # A variable that can make vLLM run code is never taken over: it must be set on this node, too.
    compared = [*own_values, *filter(find_code_risk, missing)]
    problems = []
    for name in compared:
        if own_values.get(name) != shared.get(name):
            value = own_values.get(name, "not set")
            head_value = shared.get(name, "not set")
            problems.append(f"{name} is {value} here and {head_value} there")
    if problems:
        raise refusal("against-head", file=head.where, problems="; ".join(problems))

    adopted = [
        Setting(name=name, value=value, reason="as on the head", rule="--from")
        for name, value in missing.items()
    ]

    return replace(env, settings=(*adopted, *env.settings))


def _check_overwritten(env: ClusterEnv, head: EnvFile) -> None:
    """Raise HostError if the executor would overwrite per-host variables with other values.

    Some releases copy the head's variables to the workers.
    """
    executor = env.node.executor
    if executor.copies != "overwrites":
        return

    lost = []
    for setting in env.settings:
        name = setting.name
        if setting.scope != "host" or not name.startswith(executor.prefixes):
            continue

        # Ray's executor copies all variables with its prefixes but this one.
        is_copied = name != "VLLM_HOST_IP"
        head_value = head.variables.get(name, setting.value)
        if is_copied and head_value != setting.value:
            lost.append(f"{name} is {setting.value} here and {head_value} there")
    if lost:
        raise refusal("overwritten", values="; ".join(lost), reason=executor.reason)


def file_text(env: ClusterEnv, kind: Format, *, hostname: str, target: str) -> str:
    """Return the text of the env file.

    ``target`` is the user's option, "" if not given: only then is it written into the file's
    header. Raises UsageError for a value that the format cannot hold.
    """
    node = env.node
    situation = node.situation
    names = ("role", "topology", "twin", "executor", "vllm", "nodes")
    facts = {
        **{name: situation[name] for name in names},
        "head": node.head,
        "nccl": plain_version(node.versions["nccl"]),
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
    return render_env_file(kind, header, list(_list_entries(env.settings)))


def _list_entries(settings: Iterable[Setting]) -> Iterator[EnvEntry]:
    """Yield the lines of an env file. A rule is explained at its first variable only."""
    explained = set()
    for setting in settings:
        comment = setting.comment
        if setting.rule in explained:
            comment = f"as above ({setting.rule})"
        elif not setting.rule.startswith("--"):
            explained.add(setting.rule)
        yield EnvEntry(setting.name, setting.value, comment)
