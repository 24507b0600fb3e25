"""Read what files say literally, each thing with its line; what is not literal is not followed."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.runtime.check.content import DOCKERFILE, ENV, PYTHON, SHELL, UNIT, YAML
from patchkit.runtime.check.formats import kind_of, read_content
from patchkit.runtime.envfile.env_file import EnvEntry, Format, render_env_file
from support.checked import check_text, servers, variables

SERVICE = "services:\n  a:\n    image: x/vllm-openai:v0.18.0\n"
SHELL_VARIABLES = [
    ("export A_B=c D_E='f g'", ["1 A_B=c", "1 D_E=f g"]),
    ("A_B=c\nexport A_B", ["1 A_B=c"]),
    ("export A_B\nA_B=c", ["2 A_B=c"]),
    ("A_B=c D_E=f vllm serve m", ["1 A_B=c", "1 D_E=f"]),
    (
        "docker run -it -e A_B=c --env D_E=f --env=G_H=i image",
        ["1 A_B=c", "1 D_E=f", "1 G_H=i"],
    ),
    ('f=(-e "A_B=c"\n -e D_E=f)', ["1 A_B=c", "2 D_E=f"]),
    ("if x; then\n export A_B=1\nelse\n export A_B=2\nfi", ["2 A_B=1", "4 A_B=2"]),
    ('docker exec x bash -c "\nexport A_B=c\nrun\n"', ["2 A_B=c"]),
    (
        "export A_B=$X D_E=`x` G_H=$(y) I_J=${K:-l}",
        ["1 A_B?", "1 D_E?", "1 G_H?", "1 I_J?"],
    ),
    # No environment: own variables, what is only said, and what a here-document holds.
    ("A_B=c", []),
    ("f() { local A_B=c; }\nf", []),
    ('echo "export A_B=c"\nprintf "A_B=c"\nlog A_B=c', []),
    ("cat <<E\nexport A_B='c\nE\nexport D_E=f", ["4 D_E=f"]),
    ("docker run -e A_B -e D_E= image", ["1 D_E="]),
]
SHELL_SERVERS = [
    ("vllm serve m \\\n  --host 0.0.0.0", "1 vllm serve m --host 0.0.0.0"),
    ('exec "$VENV/bin/vllm" serve m', "1 vllm serve m"),
    (
        "python3 -u -m vllm.entrypoints.openai.api_server --model m",
        "1 vllm serve --model m",
    ),
    ("a=(vllm serve m # the model\n --x)", "1 vllm serve m --x"),
    (
        "docker run --gpus all -p8:8 v/vllm-openai:v1 --model m",
        "1 vllm serve --model m",
    ),
    ("docker run -v a:b $IMAGE --max-model-len 1", "1 vllm serve --max-model-len 1"),
    ('docker run "$@" --cap-add X "$IMAGE" vllm serve m', "1 vllm serve m"),
    ("srun -n 2 bash -lc 'vllm serve m'", "1 vllm serve m"),
    ("until ray start --head; do sleep 1; done", "1 ray start --head"),
    ('echo "vllm serve m"; pgrep -f vllm serve; command -v vllm', None),
    ("docker run v/vllm-openai:v1 bash -c ls", None),
]
YAML_VARIABLES = [
    (
        SERVICE + "    environment:\n      A_B: c  # d\n      G_H: 'i j'\n",
        ["5 A_B=c", "6 G_H=i j"],
    ),
    (
        SERVICE + "    environment:\n      - A_B=c\n      - 'D_E=f g'\n",
        ["5 A_B=c", "6 D_E=f g"],
    ),
    (
        SERVICE + "    environment: {A_B: $$X, D_E: '${X:-y}', G_H: , I_J: null}\n",
        ["4 A_B?", "4 D_E?"],
    ),
    (
        "x-env: &e\n  A_B: c\n"
        + SERVICE
        + "    environment:\n      <<: *e\n      D_E: f\n",
        [
            "2 A_B=c",
            "2 A_B=c",
            "8 D_E=f",
        ],  # where it is written, and where it is merged
    ),
    (
        (
            "spec:\n  containers:\n  - image: i\n    env:\n    - name: A_B\n      value: 'c'\n"
            "    - name: D_E\n      valueFrom: {secretKeyRef: {name: s, key: k}}\n"
        ),
        ["6 A_B=c"],
    ),
    (
        "x-a: &a\n  A_B: c\nenv:\n  <<: [*a, {D_E: f}]\n",
        ["2 A_B=c", "4 D_E=f"],
    ),
    ("A_B: c\nmodel:\n  D_E: f\n", []),
    (SERVICE + "    command: bash -c 'export A_B=c; run'\n", ["4 A_B=c"]),
]
YAML_SERVERS = [
    (SERVICE + "    command: --model m --x\n", "4 vllm serve --model m --x"),
    (SERVICE + "    command: [vllm, serve, m, --x]\n", "4 vllm serve m --x"),
    (SERVICE + "    command:\n      - --model\n      - m\n", "5 vllm serve --model m"),
    (
        SERVICE + "    command: >\n      vllm serve m\n      --x\n      --y 1\n",
        "5 vllm serve m --x --y 1",
    ),
    (
        SERVICE + "    command: |\n      vllm serve m \\\n        --x\n",
        "5 vllm serve m --x",
    ),
    (
        SERVICE + "    entrypoint: vllm\n    command: serve m --x\n",
        "5 vllm serve m --x",
    ),
    (
        SERVICE + "    command:\n    - bash\n    - -lc\n    - >\n      export A=1;\n"
        "      exec vllm serve m\n      --x 2\n",
        "8 vllm serve m --x 2",
    ),
    (
        "containers:\n- image: v/vllm-openai:v1\n  args: ['--model', m]\n",
        "3 vllm serve --model m",
    ),
    (
        (
            "containers:\n- image: i\n  command: [/bin/sh, -c]\n  args:\n  - |\n    set -e\n"
            "    vllm serve m\n"
        ),
        "7 vllm serve m",
    ),
    (
        "container: i\ncommand: |\n  vllm serve m \\\n    --host 1\n",
        "3 vllm serve m --host 1",
    ),
]
DOCKERFILES = [
    (
        "FROM a\nENV A_B c d\nENV E_F=g \\ \n  # no\n  H_I='j k'\n",
        ["3 E_F=g", "5 H_I=j k"],
    ),
    ("FROM a\nARG X=1\nENV D_E=$X\nRUN echo 'export D_E=f'\n", ["3 D_E?"]),
    (
        "FROM a\nRUN --mount=type=cache,target=/x export A_B=c && \\\n  run\n",
        ["2 A_B=c"],
    ),
    ('FROM a\nCMD ["vllm", "serve", "m", \\\n  "--x"]\n', ["2 vllm serve m --x"]),
    ('FROM v/vllm-openai:v1\nCMD ["--model", "m"]\n', ["2 vllm serve --model m"]),
    (
        'FROM a\nENTRYPOINT ["vllm", "serve"]\nCMD ["m"]\n',
        ["2 vllm serve", "3 vllm serve m"],
    ),
    ('FROM a\nCMD ["vllm","serve","m","--x","a b"]\n', ["2 vllm serve m --x a b"]),
    (
        'FROM a\nENTRYPOINT ["vllm","serve"]\nCMD ["m"]\n',
        ["2 vllm serve", "3 vllm serve m"],
    ),
    (
        'FROM a\ncmd ["vllm","serve",\\\n  # no\n"m\\\nn","it\'s"]\nRUN vllm serve x\n',
        ["4 vllm serve mn it's", "6 vllm serve x"],
    ),
    ('FROM a\nCMD ["bash","-c","cd x\\nvllm serve \\"m\\""]\n', ["2 vllm serve m"]),
    ("FROM a\nCMD [vllm,serve,m]\n", []),
]
UNIT_TEXT = (
    '[Service]\nEnvironment="A_B=c d" D_E=f\n; Environment=G_H=i\nEnvironment=\\\n  J_K=l\n'
    "PassEnvironment=M_N\nExecStartPre=-/bin/true\n"
    "ExecStart=/opt/vllm serve m \\\n  --x %h\n"
)


def test_which_variables_are_set():
    for where, text, expected in (
        *(("x.sh", *row) for row in SHELL_VARIABLES),
        *(("compose.yaml", *row) for row in YAML_VARIABLES),
        ("x.service", UNIT_TEXT, ["2 A_B=c d", "2 D_E=f", "5 J_K=l"]),
        ("x.env", "A_B=c d\n\n# A_B=e\nD_E='f'  # g\nH_I\n", ["1 A_B=c d", "4 D_E=f"]),
        (
            "x.env",
            "A_B=c\nif x; then\n  D_E=f\nfi\nexport G_H=i\n",
            ["1 A_B=c", "3 D_E=f", "5 G_H=i"],
        ),
        ("x.json", '{"env":\n\t{"A_B": "c"}}', ["2 A_B=c"]),
        *(("Dockerfile", *row) for row in DOCKERFILES[:3]),
    ):
        assert variables(text, where) == expected


def test_which_servers_run():
    for text, expected in DOCKERFILES[3:]:
        assert servers(text, "Dockerfile.gb10") == expected
    for where, text, expected in (
        *(("x.sh", *row) for row in SHELL_SERVERS),
        *(("compose.yaml", *row) for row in YAML_SERVERS),
        ("x.service", UNIT_TEXT, "8 vllm serve m --x %h"),
    ):
        assert servers(text, where) == ([expected] if expected else [])


def test_flags_are_found_with_their_values_and_lines():
    text = "vllm serve m --a 1 --b=2 \\\n --c -q x --d $D \\\n --e -- --no"
    (command,) = read_content(text, "x.sh").commands
    flags = [(flag.line, flag.name, flag.value) for flag in command.flags]
    assert flags == [
        *((1, "--a", "1"), (1, "--b", "2"), (2, "--c", "")),
        *((2, "--quantization", "x"), (2, "--d", ""), (3, "--e", "")),
    ]


def test_kinds_of_files():
    for where, text, kind in (
        ("x.env.example", "# A\nA_B=c\n", ENV),
        (".env", "export A_B=c\nD_E=$X\n", ENV),
        ("-", "export A_B=c\nrun --it\n", SHELL),
        ("docker-compose.override.yml.example", "a: b\n", YAML),
        ("-", '{"a": 1}\n', YAML),
        ("Dockerfile.dev", "FROM a\n", DOCKERFILE),
        ("-", "# syntax=docker/dockerfile:1\nARG A=b\nFROM a\n", DOCKERFILE),
        ("-", "[Unit]\nDescription=x\n", UNIT),
        ("x", "#!/usr/bin/python3\n", PYTHON),
    ):
        assert kind_of(text, where) == kind


def test_our_own_files_are_read_in_every_format():
    for kind in Format:
        entries = [
            EnvEntry("NCCL_IB_TIMEOUT", "23", 'A "reason": NCCL_DEBUG=no'),
            EnvEntry("HF_TOKEN", ""),
        ]
        text = render_env_file(kind, ["role=head", "NCCL_WRONG=1"], entries)
        (finding,) = check_text(text, f"head.{kind}")
        assert finding.what == "NCCL_IB_TIMEOUT=23: it takes 1 to 22"
        assert "NCCL_IB_TIMEOUT" in text.splitlines()[finding.line - 1]


@pytest.mark.parametrize(
    ("where", "text", "line", "level", "key"),
    [
        ("x.yaml", "a: [b\nc: }\n", 2, "error", "not-yaml"),
        ("x.json", '{"env": {\n"A": 1\n', 3, "error", "not-yaml"),
        ("x.yaml", "[" * 100_000, 1, "error", "not-yaml"),
        ("x.yaml", "a: &a\n  b: *a\n", 2, "error", "not-yaml"),
        ("x.yaml", "a: b\n\x01", 2, "error", "not-yaml"),
        ("x.yaml", "a: 1\n{{- if .Values.b }}\nc: 2\n", 3, "note", "template"),
        ("x.py", "def f(:\n", 1, "note", "not-read"),
        ("x.sh", "A='1'\nexport B=\"2\n", 2, "error", "open-quote"),
        ("x.sh", "vllm serve m --host 'a\n", 1, "error", "open-quote"),
        ("x.env", "", 1, "warning", "empty"),
        ("x.yaml", " \n\n", 1, "warning", "empty"),
        ("x.sh", "A=1\nvllm serve" + " --a" * 5001, 2, "note", "not-read"),
        ("x.sh", f"vllm serve{' --a' * 5000}\nvllm serve m", 2, "note", "not-read"),
        (
            "x.yaml",
            f"image: vllm-openai\nargs: [{'--a, ' * 6000}]",
            2,
            "note",
            "not-read",
        ),
    ],
)
def test_what_cannot_be_read_is_told(where, text, line, level, key):
    (problem,) = read_content(text, where).problems
    assert (problem.id, problem.level.value, problem.line) == (key, level, line)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in pairwise("abcdefghi")
)
MERGES = "a: &a {A_B: c}\n" + "".join(
    f"{new}: &{new} {{env: [{', '.join([f'*{old}'] * 9)}]}}\n"
    for old, new in pairwise("abcdefghi")
)
SIZE = 2**17


HOSTILE = {
    "x.sh": (
        *(
            "X=$X$X$X\n",
            "docker run -e A=b c bash -c 'vllm serve $A'\n",
            "cat <<A\n",
            "$(" * 3,
        ),
        *(
            'bash -c "',
            "a && ",
            "if x; then ",
            "${a:-",
            "docker ",
            "docker run ",
            "vllm serve ",
        ),
        *("a=(", "`", ' a="\\"', "A_:" + " " * 20_000, '0"\x80', "\\\n", "'", "${"),
    ),
    "x.yaml": (
        *("a: ${b:-", "- ", "{a: ", "{{", BOMB + "\n---\n", MERGES),
        *("command: >\n  a\n", "env: ["),
    ),
    "Dockerfile": (
        *("FROM ${a\n", "RUN a <<B\n", "ENV a=\\\n", "RUN [\n", "CMD [\\\n"),
        *('CMD ["a\\\n', "CMD --", 'CMD ["a",', 'CMD ["a"]'),
    ),
    "x.service": ("ExecStart=a \\\n", ";\n"),
    "x.env": ("A=' \" \\", "a", "MASTER_ADDR=ip-", "NCCL_IB_HCA=rocep1s0f0,"),
}


def test_hostile_texts_end():
    """What grows with the square of such a text would take minutes."""
    for where, pieces in HOSTILE.items():
        for piece in pieces:
            text = (piece * (SIZE // len(piece) + 1))[:SIZE]
            assert all(1 <= finding.line <= SIZE for finding in check_text(text, where))


def test_a_command_of_many_flags_ends():
    """Of 200,000 words the first ones are checked; looking at all took more than a minute."""
    for flag in ("--own", "--gpu-memory-utilization 0.95", "--tool-call-parser mine"):
        findings = check_text(f"vllm serve m {f'{flag} ' * 100_000}", "x.sh")
        told = sorted(finding.what for finding in findings)
        assert len(told) == 2
        assert told[1] == "not read: the words of servers beyond 5,000"


def test_words_before_a_server_are_looked_at_once():
    command = ", ".join(["--a"] * 150_000)
    began = time.process_time()
    content = read_content(f"image: vllm-openai\ncommand: [{command}]\n", "x.yaml")
    assert [problem.id for problem in content.problems] == ["not-read"]
    assert (
        time.process_time() - began < 8
    )  # seconds; 2 here, 20 with the square of them


@settings(deadline=None)
@given(st.text(st.sampled_from("NCCL_IB=0 'a\"\\\n#$-:{}<>,^")) | st.text())
def test_any_text_is_read_and_told_by_its_lines(text):
    for where in ("x.env", "x.sh", "compose.yaml", "Dockerfile", "x.service", "-"):
        for finding in check_text(text, where):
            assert 1 <= finding.line <= text.count("\n") + 1
