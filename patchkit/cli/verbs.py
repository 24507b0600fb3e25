"""List the verbs by group, with the help line and the module of each verb."""

from __future__ import annotations

# The help lines stand here and not in the modules, so that `patchkit --help` imports none of them.
# Verbs of MORE are rarely needed: `patchkit --help` only names them.
GROUPS = {
    "Serve a model, on one machine or several": {
        "up": "Start a model by systemd; return when it has answered.",
        "down": "Stop the model on every node, and check.",
        "status": "Show the state of every node.",
        "logs": "Show what all ranks wrote, merged by time.",
        "switch": "Serve another model, or the former one again.",
        "doctor": "Find what is wrong, on which node, why, and what cures it.",
    },
    "This machine, and several": {
        "check": "Check env files, launch scripts and what runs.",
        "env": "Write env files by role, and explain them.",
        "serve-args": "Print the `vllm serve` flags that go with the env.",
        "probe": "Show the facts: GPU, memory, network, RDMA, software.",
        "net": "Plan and verify the QSFP network.",
        "cluster": "Look at machines, install the same vLLM on all of them.",
        "model": "Fetch a model once, copy it to the other nodes, check it.",
    },
    "Sources": {
        "apply": "Patch a tree, prove the effect, keep a way back.",
        "revert": "Put back what upstream shipped, byte by byte.",
        "fixes": "Show every fix; of a source, the state of each.",
    },
    "Wheels": {
        "repack": "Patch upstream's wheel, without a compiler.",
        "build": "Build a wheel for one device: libnccl or vLLM.",
        "wheelhouse": "List, fill and prune the folder of wheels.",
    },
}
MORE = {
    "archs": "Compare kernel groups and their archs, stock beside patched.",
    "bench": "Measure a server with vLLM's own benchmarks; compare results.",
    "diff": "Show what apply would change, or did.",
    "explain": "Explain a fix, a text of a log, or a claim that guides make.",
    "export": "Write a Containerfile.",
    "fetch": "Download a release, verified by its locked sha256.",
    "inspect": "Show what a wheel or library holds; which libnccl is loaded.",
    "native": "Show what is compiled at first use, or compile it now.",
    "proof": "Try kernels, routing, NCCL, a server; keep it as one archive.",
    "verify": "Check that a wheelhouse is whole, loads and fits together.",
}
_MODULES = {
    "cluster.serve": "up down status logs switch",
    "cluster.doctor": "doctor proof",
    "runtime.check": "check",
    "runtime.env": "env",
    "runtime.serve_args": "serve-args",
    "runtime.probe": "probe",
    "runtime.net": "net",
    "cluster.cluster": "cluster",
    "cluster.model": "model",
    "patch.apply": "apply revert fixes archs diff fetch",
    "wheel.build": "build",
    "wheel.repack": "repack",
    "wheel.native": "native",
    "wheel.wheelhouse": "wheelhouse export verify",
    "cluster.bench": "bench",
    "patch.explain": "explain",
    "wheel.inspect": "inspect",
}
MODULES = {verb: module for module, row in _MODULES.items() for verb in row.split()}
VERBS = {
    verb: text for group in (*GROUPS.values(), MORE) for verb, text in group.items()
}
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
