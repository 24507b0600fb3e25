"""Name the verbs, by wing, with their lines of help."""

from __future__ import annotations

WINGS = {
    "patch": "Sources",
    "wheel": "Wheels",
    "runtime": "This machine",
    "cluster": "Serving, on one machine or several",
}  # folder → help's title
# The lines of help stand here and not in the modules, so that help imports none of them.
VERBS = {
    "patch": {
        "apply": "Patch a tree, prove the effect, keep a way back.",
        "status": "Show every fix and its state; write nothing.",
        "diff": "Show what apply would change, or did.",
        "revert": "Put back what upstream shipped, byte by byte.",
        "series": "Write the fixes as a series that git am takes.",
        "archs": "Compare kernel groups and their archs, stock beside patched.",
        "fixes": "List the fixes; how much a release needs each.",
        "explain": "Explain a fix, or a claim that guides make, with evidence.",
        "fetch": "Download a release, verified by its locked sha256.",
    },
    "wheel": {
        "build": "Build a wheel for one device: libnccl or vLLM.",
        "repack": "Patch upstream's vLLM wheel, in seconds and without a compiler.",
        "wheelhouse": "List, fill, sign, prune and serve the folder of finished wheels.",
        "verify": "Check that its wheels are whole, load, and fit together.",
        "inspect": "Show what a wheel or library holds; which libnccl is loaded.",
    },
    "runtime": {
        "tune": "Tune the fused-MoE kernel on the present GPU.",
        "probe": "Show the facts: GPU, memory, network, RDMA, cables, software.",
        "net": "Plan, apply, verify and undo the QSFP network between Sparks.",
        "check": "Check env files, launch scripts and what runs.",
        "env": "Write env files by role; explain and check them.",
        "serve-args": "Print the `vllm serve` flags that go with the env.",
        "completion": "Print shell completion for bash, zsh or fish.",
    },
    "cluster": {
        "doctor": "Find what is wrong, on which node, why, and what cures it.",
        "cluster": "Serve a model on several machines: start, watch, stop, switch.",
        "up": "Serve a model on this machine, by systemd.",
        "model": "Fetch a model once, copy it to the other nodes, check it.",
        "chat": "Talk to a server; show what it thinks apart from what it says.",
        "bench": "Measure a server with vLLM's own benchmarks; compare results.",
        "export": "Write an image's Containerfile, manifests for Kubernetes, Ray jobs.",
    },
}
# What others call a verb.
MEANT = {
    "serve": "up",
    "down": "cluster down",
    "logs": "cluster logs",
    "lint": "check",
    "upgrade": "cluster install",
}
# What a node runs without any library but click; of inspect only --loaded.
CLICK_ALONE = {"probe", "net", "check", "env", "serve-args", "completion", "inspect"}
# What writes to the terminal by itself, piece by piece, or asks there.
TALKING = {"chat", "completion", "net", "tune"}
WING_OF = {verb: wing for wing, verbs in VERBS.items() for verb in verbs}
