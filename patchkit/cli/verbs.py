"""List the verbs by group, with the module and the help line of each verb."""

from __future__ import annotations

# The help lines stand here and not in the modules, so that `patchkit --help` imports none of them.
# Verbs of MORE are rarely needed: `patchkit --help` only names them.
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
        "revert": ("patch.apply", "Put back what upstream shipped, byte by byte."),
        "fixes": ("patch.apply", "Show every fix; of a source, the state of each."),
    },
    "Wheels": {
        "repack": ("wheel.build", "Patch upstream's vLLM wheel, without a compiler."),
        "build": ("wheel.build", "Build a wheel for one device: libnccl or vLLM."),
        "wheelhouse": (
            "wheel.wheelhouse",
            "List, fill and prune the folder of wheels.",
        ),
    },
}
MORE = {
    "archs": (
        "patch.apply",
        "Compare kernel groups and their archs, stock beside patched.",
    ),
    "bench": (
        "cluster.bench",
        "Measure a server with vLLM's own benchmarks; compare results.",
    ),
    "diff": ("patch.apply", "Show what apply would change, or did."),
    "explain": (
        "patch.explain",
        "Explain a fix, a text of a log, or a claim that guides make.",
    ),
    "export": ("cluster.export", "Write a Containerfile."),
    "fetch": ("patch.apply", "Download a release, verified by its locked sha256."),
    "inspect": (
        "wheel.inspect",
        "Show what a wheel or library holds; which libnccl is loaded.",
    ),
    "native": (
        "wheel.native",
        "Show what is compiled at first use, or compile it now.",
    ),
    "proof": (
        "cluster.doctor",
        "Try kernels, routing, NCCL, a server; keep it as one archive.",
    ),
    "verify": (
        "wheel.wheelhouse",
        "Check that a wheelhouse is whole, loads and fits together.",
    ),
}
VERBS = {verb: row for group in (*GROUPS.values(), MORE) for verb, row in group.items()}
# How other programs call a verb.
SYNONYMS = {"serve": "up", "start": "up", "stop": "down"}
# Verbs that need no library but click; `inspect` only with --loaded, `doctor` only with --log.
CLICK_ALONE = {
    "probe",
    "net",
    "check",
    "env",
    "serve-args",
    "inspect",
    "doctor",
}
