"""Name the verbs, by group, with the module that has each, and its help."""

from __future__ import annotations

# The lines of help stand here and not in the modules, so that help imports none of them. A verb
# that is not met every day is in MORE: help names it, and `patchkit VERB --help` explains it.
GROUPS = {
    "Serve a model, on one machine or several": {
        "up": (
            "cluster.serve",
            "Start a model by systemd; return when it has answered.",
        ),
        "down": ("cluster.serve", "Stop the model on every node, and check."),
        "status": ("cluster.serve", "Show the state of every node."),
        "logs": ("cluster.serve", "Show what all ranks wrote, merged by time."),
        "switch": ("cluster.serve", "Serve another model, or the former one again."),
        "doctor": (
            "cluster.doctor",
            "Find what is wrong, on which node, why, and what cures it.",
        ),
    },
    "This machine, and several": {
        "check": ("runtime.check", "Check env files, launch scripts and what runs."),
        "env": ("runtime.env", "Write env files by role, and explain them."),
        "serve-args": (
            "runtime.serve_args",
            "Print the `vllm serve` flags that go with the env.",
        ),
        "probe": (
            "runtime.probe",
            "Show the facts: GPU, memory, network, RDMA, software.",
        ),
        "net": ("runtime.net", "Plan and verify the QSFP network."),
        "cluster": (
            "cluster.cluster",
            "Look at machines, install the same vLLM on all of them.",
        ),
        "model": (
            "cluster.model",
            "Fetch a model once, copy it to the other nodes, check it.",
        ),
    },
    "Sources": {
        "apply": ("patch.apply", "Patch a tree, prove the effect, keep a way back."),
        "revert": ("patch.sources", "Put back what upstream shipped, byte by byte."),
        "fixes": ("patch.apply", "Show every fix; of a source, the state of each."),
    },
    "Wheels": {
        "repack": ("wheel.repack", "Patch upstream's vLLM wheel, without a compiler."),
        "build": ("wheel.build", "Build a wheel for one device: libnccl or vLLM."),
        "wheelhouse": (
            "wheel.wheelhouse",
            "List, fill and prune the folder of wheels.",
        ),
    },
}
MORE = {
    "archs": (
        "patch.sources",
        "Compare kernel groups and their archs, stock beside patched.",
    ),
    "bench": (
        "cluster.bench",
        "Measure a server with vLLM's own benchmarks; compare results.",
    ),
    "completion": ("complete", "Print shell completion for bash, zsh or fish."),
    "diff": ("patch.sources", "Show what apply would change, or did."),
    "explain": (
        "patch.explain",
        "Explain a fix, a text of a log, or a claim that guides make.",
    ),
    "export": ("cluster.export", "Write a Containerfile."),
    "fetch": ("patch.sources", "Download a release, verified by its locked sha256."),
    "inspect": (
        "wheel.inspect",
        "Show what a wheel or library holds; which libnccl is loaded.",
    ),
    "native": (
        "wheel.native",
        "Show what is compiled at first use, or compile it now.",
    ),
    "proof": (
        "cluster.proof",
        "Try kernels, routing, NCCL, a server; keep it as one archive.",
    ),
    "verify": (
        "wheel.wheelhouse",
        "Check that a wheelhouse is whole, loads and fits together.",
    ),
}
VERBS = {verb: row for group in (*GROUPS.values(), MORE) for verb, row in group.items()}
# What others call a verb, and former verbs that only have another name: the words that follow stay.
MEANT = {
    "serve": "up",
    "start": "up",
    "stop": "down",
    "upgrade": "cluster install",
    "lint": "check",
    "env check": "check",
    **{f"cluster {verb}": verb for verb in ("up", "down", "status", "logs", "switch")},
}
# Former verbs that another program or a page stands for: what to do instead.
REPLACED = {
    "chat": "vllm chat --url http://localhost:8000/v1",
    "export kubernetes": "vLLM has a manifest of its own, and `patchkit env --format docker` with "
    "`patchkit serve-args MODEL` says what goes into it: docs/scale.md",
    "export lws": "vLLM has a manifest of its own: docs/scale.md",
    "net apply": "sudo install -m 600 40-patchkit.yaml /etc/netplan/ && sudo netplan try",
    "net undo": "sudo rm /etc/netplan/40-patchkit.yaml && sudo netplan apply",
    "series": "`patchkit diff SOURCE` writes what `git apply` takes",
    "tune": "`patchkit fetch vllm==0.33.0` brings the release's own tuner: docs/tune.md",
}
# What a node runs without any library but click; of inspect only --loaded, of doctor --log.
CLICK_ALONE = {
    "probe",
    "net",
    "check",
    "env",
    "serve-args",
    "completion",
    "inspect",
    "doctor",
}
