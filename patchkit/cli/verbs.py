"""Name the verbs, by group, with the folder of its module, or the module, and its help."""

from __future__ import annotations

# The lines of help stand here and not in the modules, so that help imports none of them. A verb
# that is not met every day is in MORE: help names it, and `patchkit VERB --help` explains it.
GROUPS = {
    "Serve a model, on one machine or several": {
        "up": ("cluster", "Start a model by systemd; return when it has answered."),
        "down": ("cluster", "Stop the model on every node, and check."),
        "status": ("cluster", "Show the state of every node."),
        "logs": ("cluster", "Show what all ranks wrote, merged by time."),
        "switch": ("cluster", "Serve another model, or the former one again."),
        "doctor": ("cluster", "Find what is wrong, on which node, why, and what cures it."),
        "chat": ("cluster", "Talk to a server; show what it thinks beside what it says."),
        "model": ("cluster", "Fetch a model once, copy it to the other nodes, check it."),
        "cluster": ("cluster", "Look at machines, install the same vLLM on all of them."),
    },
    "This machine": {
        "check": ("runtime", "Check env files, launch scripts and what runs."),
        "env": ("runtime", "Write env files by role, and explain them."),
        "serve-args": ("runtime", "Print the `vllm serve` flags that go with the env."),
        "probe": ("runtime", "Show the facts: GPU, memory, network, RDMA, software."),
        "net": ("runtime", "Plan, apply, verify and undo the QSFP network."),
    },
    "Sources": {
        "apply": ("patch", "Patch a tree, prove the effect, keep a way back."),
        "revert": ("patch.sources", "Put back what upstream shipped, byte by byte."),
        "fixes": ("patch", "Show every fix; of a source, the state of each."),
    },
    "Wheels": {
        "repack": ("wheel", "Patch upstream's vLLM wheel, without a compiler."),
        "build": ("wheel", "Build a wheel for one device: libnccl or vLLM."),
        "wheelhouse": ("wheel", "List, fill and prune the folder of wheels."),
    },
}
MORE = {
    "archs": ("patch", "Compare kernel groups and their archs, stock beside patched."),
    "bench": ("cluster", "Measure a server with vLLM's own benchmarks; compare results."),
    "completion": ("runtime", "Print shell completion for bash, zsh or fish."),
    "diff": ("patch.sources", "Show what apply would change, or did."),
    "explain": ("patch", "Explain a fix, a text of a log, or a claim that guides make."),
    "export": ("cluster", "Write a Containerfile, a manifest for Kubernetes."),
    "fetch": ("patch.sources", "Download a release, verified by its locked sha256."),
    "inspect": ("wheel", "Show what a wheel or library holds; which libnccl is loaded."),
    "series": ("patch.sources", "Write the fixes as patches that git am takes."),
    "tune": ("runtime", "Tune the fused-MoE kernel on the present GPU."),
    "verify": ("wheel", "Check that a wheelhouse is whole, loads and fits together."),
}
VERBS = {verb: row for group in (*GROUPS.values(), MORE) for verb, row in group.items()}
# What others call a verb.
MEANT = {
    "serve": "up",
    "start": "up",
    "stop": "down",
    "lint": "check",
    "upgrade": "cluster install",
}
# Former spellings of two words; they go on working for one release.
FORMER: dict[tuple[str, ...], list[str]] = {
    **{("cluster", verb): [verb] for verb in ("up", "down", "status", "logs", "switch")},
    ("env", "check"): ["check"],
    ("export", "lws"): ["export", "kubernetes"],
}
# What a node runs without any library but click; of inspect only --loaded.
CLICK_ALONE = {"probe", "net", "check", "env", "serve-args", "completion", "inspect"}


def is_of_source(arguments: list[str]) -> bool:
    """Return whether the words after `status` name a source: `fixes SOURCE`, as it was called."""
    words = [
        word for last, word in zip(["", *arguments], arguments, strict=False) if last != "--file"
    ]
    return any(not word.startswith("-") or word.endswith("-src") for word in words)
