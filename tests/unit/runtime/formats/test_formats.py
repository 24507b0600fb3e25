"""What YAML, Dockerfiles, units, env files and Python say, each with its line."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patchkit.errors import PatchkitError
from patchkit.runtime.envfile.render import render
from patchkit.runtime.envfile.syntax import EnvEntry, Format
from patchkit.runtime.files.content import FileKind
from patchkit.runtime.formats.kind import kind_of
from patchkit.runtime.formats.read import read_content
from support.said import servers, variables

SERVICE = "services:\n  a:\n    image: x/vllm-openai:v0.18.0\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            SERVICE + "    environment:\n      A_B: c  # d\n      E_F: 1\n      G_H: 'i j'\n",
            ["5 A_B=c", "6 E_F=1", "7 G_H=i j"],
        ),
        (
            SERVICE + "    environment:\n      - A_B=c\n      - 'D_E=f g'\n",
            ["5 A_B=c", "6 D_E=f g"],
        ),
        (
            SERVICE + "    environment:\n      A_B: ${A_B:-c}\n      D_E: ${X-f}${Y:-g}\n",
            ["5 A_B=c", "6 D_E=fg"],
        ),
        (
            SERVICE
            + "    environment:\n      A_B: $$X\n      D_E: ${X}\n      G_H: ${X:-${Y:-i}}\n",
            ["5 A_B?", "6 D_E?", "7 G_H=i"],
        ),
        # The caller's value, or none.
        (
            SERVICE + "    environment:\n      A_B: ${A_B:-}\n      D_E:\n      G_H: ${G_H?}\n",
            [],
        ),
        (SERVICE + "    environment:\n      - A_B\n      - D_E=${D_E:-}\n", []),
        # Anchors and merge keys: the line is that of the value.
        (
            "x-env: &e\n  A_B: c\n" + SERVICE + "    environment:\n      <<: *e\n      D_E: f\n",
            ["2 A_B=c", "8 D_E=f"],
        ),
        (
            (
                "containers:\n- image: i\n  env:\n  - name: A_B\n    value: 'c'\n  - name: D_E\n"
                "    valueFrom: {secretKeyRef: {name: s, key: k}}\n"
            ),
            ["4 A_B=c"],
        ),
        ("kind: ConfigMap\ndata:\n  A_B: c\n", ["3 A_B=c"]),
        ("env:\n  A_B: c\ndefaults:\n  D_E: f\n", ["2 A_B=c"]),
        ("A_B: c\nmodel:\n  D_E: f\n", []),
        (SERVICE + "    build:\n      args:\n        A_B: c\n", []),
        (SERVICE + "    command: bash -c 'export A_B=c; run'\n", ["4 A_B=c"]),
        ("jobs:\n  a:\n    steps:\n    - run: |\n        x\n        export A_B=c\n", ["6 A_B=c"]),
        ("steps:\n- commands:\n  - export A_B=c\n  - run\n", ["3 A_B=c"]),
        (
            "env:\n{{- if .Values.x }}\n  A_B: c\n{{- end }}\n  D_E: {{ .Values.y }}\n",
            ["3 A_B=c", "5 D_E?"],
        ),
        ("env:\n  A_B: '{{ x }}'\n", ["2 A_B?"]),
    ],
)
def test_environment_in_yaml(text, expected):
    assert variables(text, "compose.yaml") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("    command: vllm serve m --x\n", "4 vllm serve m --x"),
        ("    command: --model m --x\n", "4 vllm serve --model m --x"),
        ("    command: [vllm, serve, m, --x]\n", "4 vllm serve m --x"),
        (
            "    command:\n      - --model\n      - m\n      - --port=${P:-1}\n",
            "5 vllm serve --model m --port=1",
        ),
        (
            "    command: >\n      vllm serve m\n      --x\n      --y 1\n",
            "5 vllm serve m --x --y 1",
        ),
        ("    command: >-\n      vllm serve m \\\n      --x\n", "5 vllm serve m --x"),
        ("    command: |\n      vllm serve m\n      --x\n", "5 vllm serve m --x"),
        ("    command: |\n      vllm serve m \\\n        --x\n", "5 vllm serve m --x"),
        ("    entrypoint: vllm\n    command: serve m --x\n", "4 vllm serve m --x"),
        ("    entrypoint: [vllm, serve]\n    command: [m, --x]\n", "4 vllm serve m --x"),
        (
            (
                "    entrypoint: []\n    command:\n    - bash\n    - -lc\n    - >\n"
                "      export A=1;\n      exec vllm serve m\n      --x ${Y:-2}\n"
            ),
            "10 vllm serve m --x 2",
        ),
        ("    entrypoint: [sh, -c]\n    command: vllm serve m --x\n", "5 vllm serve m --x"),
        (
            "    environment: {M: m}\n    command: bash -c 'vllm serve $$M --x $$N'\n",
            "5 vllm serve m --x $N?",
        ),
        ("    command: vllm serve m $${X:+--y}\n", "4 vllm serve m ${X:+--y}?"),
        ("    command: sleep infinity\n", None),
    ],
)
def test_servers_in_compose_files(text, expected):
    assert servers(SERVICE + text, "compose.yaml") == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "containers:\n- image: v/vllm-openai:v1\n  args: ['--model', m]\n",
            "3 vllm serve --model m",
        ),
        (
            (
                "containers:\n- image: i\n  command: [/bin/sh, -c]\n  args:\n  - |\n"
                "    set -e\n    vllm serve m\n"
            ),
            "7 vllm serve m",
        ),
        (
            (
                "container: i\ndefaults:\n  host: 0.0.0.0\ncommand: |\n"
                "  vllm serve m \\\n    --host {host} --port {port}\n"
            ),
            "5 vllm serve m --host 0.0.0.0 --port ${port}?",
        ),
        ("- image: i\n  command: [vllm, serve, $(M), --x]\n", "2 vllm serve $(M)? --x"),
        (
            "on: x\njobs:\n  a:\n    run: vllm serve ${{ env.M }} --x\n",
            "4 vllm serve ${env_M}? --x",
        ),
        ("models:\n  m:\n    cmd: docker run image vllm serve m\n", "3 vllm serve m"),
        ("env:\n  VLLM_ARGS: --max-model-len 8\n", "2 vllm serve ? ? --max-model-len 8"),
    ],
)
def test_servers_in_other_yaml(text, expected):
    assert servers(text, "x.yml") == [expected]


@pytest.mark.parametrize(
    ("text", "environment", "commands"),
    [
        (
            "FROM a\nENV A_B c d\nENV E_F=g \\\n  # no\n  H_I='j k'\n",
            ["2 A_B=c d", "3 E_F=g", "5 H_I=j k"],
            [],
        ),
        ("ARG A_B=c\nFROM a:${A_B}\nARG X=1\nENV D_E=$X F_G=${Y}\n", ["4 D_E=1", "4 F_G?"], []),
        ("FROM a\nRUN export A_B=c && \\\n  run\nRUN echo 'export D_E=f'\n", ["2 A_B=c"], []),
        ("FROM a\nRUN <<EOF\nexport A_B=c\nEOF\nENV D_E=f\n", ["3 A_B=c", "5 D_E=f"], []),
        ("FROM a\nRUN cat > x.env <<EOF\nA_B=c\nEOF\n", ["3 A_B=c"], []),
        ("FROM a\nCOPY <<EOF /x\nENV A_B=c\nEOF\n", [], []),
        ('FROM a\nCMD ["vllm", "serve", "m", \\\n  "--x"]\n', [], ["2 vllm serve m --x"]),
        ("FROM a\nCMD vllm serve m \\\n  --x\n", [], ["2 vllm serve m --x"]),
        ('FROM v/vllm-openai:v1\nCMD ["--model", "m"]\n', [], ["2 vllm serve --model m"]),
        (
            'FROM a\nENTRYPOINT ["vllm", "serve"]\nCMD ["m"]\n',
            [],
            ["2 vllm serve", "2 vllm serve m"],
        ),
        ("FROM a\nRUN --mount=type=cache,target=/x A_B=c run\n", ["2 A_B=c"], []),
        ("FROM a\nENV A_B=c\nFROM a\nENV A_B=d\n", ["2 A_B=c", "4 A_B=d"], []),
    ],
)
def test_dockerfiles(text, environment, commands):
    assert variables(text, "Dockerfile.gb10") == environment
    assert servers(text, "Dockerfile.gb10") == commands


def test_units():
    text = (
        '[Service]\nEnvironment="A_B=c d" D_E=f\n; Environment=G_H=i\nEnvironment=\\\n  J_K=l\n'
        "PassEnvironment=M_N\nExecStartPre=-/bin/true\n"
        "ExecStart=/opt/vllm serve m --port ${D_E} \\\n  --x $$Y %h\n"
    )
    assert variables(text, "x.service") == ["2 A_B=c d", "2 D_E=f", "5 J_K=l"]
    assert servers(text, "x.service") == ["8 vllm serve m --port f --x $Y? %h"]


def test_python():
    text = (
        'import os\nos.environ["A_B"] = "c"\nos.environ.setdefault("D_E", f())\n'
        'run(["vllm", "serve", "m", "--x", y])\nenv = {"G_H": "i"}\nother = {"J_K": "l"}\n'
        'subprocess.run("ray start --head", shell=True, env={"M_N": "o"})\n'
    )
    assert variables(text, "x.py") == ["2 A_B=c", "3 D_E?", "5 G_H=i", "7 M_N=o"]
    assert servers(text, "x.py") == ["4 vllm serve m --x …?", "7 ray start --head"]


def test_functions_and_branches_of_python_are_blocks():
    text = (
        "env['A'] = '1'\ndef f():\n  env['A'] = '2'\n  if x:\n    env['A'] = '3'\n"
        "  else:\n    env['A'] = '4'\n"
    )
    content = read_content(text, "x.py")
    assert [(each.line, each.block) for each in content.assignments] == [
        *((1, 0), (3, 3), (5, 5), (7, 7)),
    ]


@pytest.mark.parametrize(
    ("where", "text", "kind"),
    [
        ("x.env.example", "# A\nA_B=c\n", FileKind.ENV),
        (".env", "export A_B=c\nD_E=$X\n", FileKind.ENV),
        ("x.conf", "A_B='c'\n", FileKind.ENV),
        ("launch", "#!/usr/bin/env bash\nA_B=c\n", FileKind.SHELL),
        ("x.sh", "A_B=c\n", FileKind.SHELL),
        ("-", "export A_B=c\nrun --it\n", FileKind.SHELL),
        ("notes.txt", "# env of the container\nsleep infinity\nA_B=c\nD_E=f\n", FileKind.ENV),
        ("docker-compose.override.yml.example", "a: b\n", FileKind.YAML),
        ("-", "# x\nservices:\n  a:\n", FileKind.YAML),
        ("-", '{"a": 1}\n', FileKind.JSON),
        ("Dockerfile.dev", "FROM a\n", FileKind.DOCKERFILE),
        ("-", "# syntax=docker/dockerfile:1\nARG A=b\nFROM a\n", FileKind.DOCKERFILE),
        ("-", "[Unit]\nDescription=x\n", FileKind.SYSTEMD),
        ("x", "#!/usr/bin/python3\n", FileKind.PYTHON),
    ],
)
def test_kinds_of_files(where, text, kind):
    assert kind_of(text, where) == kind


def test_an_env_file_with_commands_is_a_script_that_is_sourced():
    text = "A_B=c\nif x; then\n  D_E=f\nfi\nexport G_H=i\n"
    assert variables(text, "x.env") == ["1 A_B=c", "3 D_E=f", "5 G_H=i"]
    assert variables(text, "x.sh") == ["5 G_H=i"]


@pytest.mark.parametrize(
    ("where", "text", "expected"),
    [
        ("x.sh", "docker run x/vllm-openai:v0.18.0 m", ("vllm", "0.18.0", 1)),
        ("x.sh", "T=v0.18.0-cu130\ndocker run x/vllm-openai:$T m", ("vllm", "0.18.0", 2)),
        ("x.yml", "services: {a: {image: 'h:5000/my-vllm:${T:-0.14.1}'}}", ("vllm", "0.14.1", 1)),
        (
            "x.yml",
            "a:\n image:\n  repository: x/vllm-openai\n  tag: v0.18.0",
            ("vllm", "0.18.0", 3),
        ),
        ("Dockerfile", "ARG T=v0.18.1\nFROM vllm/vllm-openai:${T}", ("vllm", "0.18.1", 2)),
        ("Dockerfile", "FROM a\nARG VLLM_VERSION=0.18.1\nRUN x", ("vllm", "0.18.1", 2)),
        (
            "Dockerfile",
            "FROM a\nARG V=0.18.1\nRUN uv pip install \\\n vllm==$V",
            ("vllm", "0.18.1", 4),
        ),
        ("x.sh", "pip3 install 'vllm[x]==0.18.1+cu130' y", ("vllm", "0.18.1", 1)),
        ("x.sh", "pip install https://h/vllm-0.18.1+cu130-cp38-abi3-l.whl", ("vllm", "0.18.1", 1)),
        ("x.sh", "git clone -b v0.18.1 https://github.com/v/vllm.git", ("vllm", "0.18.1", 1)),
        ("x.sh", "pip install git+https://github.com/v/vllm@v0.18.1", ("vllm", "0.18.1", 1)),
        ("x.env", "VLLM_TAG=v0.18.1\n", ("vllm", "0.18.1", 1)),
        ("x.sh", "pip install nvidia-nccl-cu13==2.28.9", ("nccl", "2.28.9", 1)),
        ("x.sh", "docker run nvcr.io/nvidia/vllm:25.11-py3 x", None),
        ("x.sh", "docker run x/vllm-openai:nightly m", None),
        ("x.sh", "docker run x/my-vllm:0.1.1 m; docker run x/vllm-omni:v0.26.0 m", None),
        (".env", "VLLM_IMAGE=vllm/vllm-openai:v0.18.1\n", ("vllm", "0.18.1", 1)),
        ("x.sh", "IMAGE=${IMAGE:-x/vllm:v0.18.1-cu130}", ("vllm", "0.18.1", 1)),
        ("x.sh", "pip install 'vllm>=0.18.1' vllm-omni==0.20.0", None),
        ("x.sh", "VLLM_REF=main", None),
    ],
)
def test_versions_that_a_file_states(where, text, expected):
    content = read_content(text, where)
    actual = [(each.project, each.version, each.line) for each in content.versions]
    assert actual == ([expected] if expected else [])


def test_two_versions_are_none():
    content = read_content("pip install vllm==0.18.0\npip install vllm==0.18.1\n", "x.sh")
    assert content.version("vllm") is None
    assert len(content.versions) == 2


def test_addresses_of_nodes():
    text = (
        "H=10.0.0.1\nray start --address=10.0.0.2:6379 --node-ip-address 127.0.0.1\nV=1.2.3.4.5\n"
    )
    content = read_content(text, "x.sh")
    assert [(each.text, each.line) for each in content.addresses] == [
        ("10.0.0.1", 1),
        ("10.0.0.2", 2),
    ]


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("x.yaml", "a: [b\nc: }\n"),
        ("x.yaml", "[" * 5_000),
        ("x.py", "def f(:\n"),
    ],
)
def test_what_cannot_be_read_is_a_note(where, text):
    (problem, *_) = read_content(text, where).problems
    assert problem.what.startswith("not read: ")
    assert 1 <= problem.line <= text.count("\n") + 1


def test_scripts_need_their_libraries_and_env_files_none(cli, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('tree_sitter', 'tree_sitter_bash', 'yaml'):\n"
        "    sys.modules[name] = None\n"
    )
    blocked = {"PYTHONPATH": str(tmp_path)}
    for name, text, missing in (
        ("x.env", "A_B=c\n", ""),
        ("x.sh", "export A_B=c\n", "tree_sitter_bash"),
        ("x.yaml", "A_B: c\n", "yaml"),
    ):
        path = tmp_path / name
        path.write_text(text)
        done = cli("env", "check", "--elsewhere", path, env=blocked, rc=9 if missing else 0)
        assert (f"not installed: {missing}" in done.stderr) == bool(missing)
        assert bool(missing) == ("pip install" in done.stderr)


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in pairwise("abcdefghi")
)
_NAMES = ["x.env", "x.sh", "x.yaml", "Dockerfile", "x.service", "x.py", "x.json", "-"]
_SIZE = 2**17


@pytest.mark.parametrize(
    ("where", "piece"),
    [
        ("x.sh", "X=$X$X$X\n"),
        ("x.sh", 'X+="$X "\n'),
        ("x.sh", "f+=(a)\n"),
        ("x.sh", 'X+=" --max-num-seqs 1 -e A_B=c"\n'),
        ("x.sh", 'X="$X --max-num-seqs 1 -e A_B=c"\n'),
        ("x.sh", "docker run -e A=b c bash -c 'vllm serve $A'\n"),
        ("x.sh", "cat <<A\n"),
        ("x.sh", "$(" * 3),
        ("x.sh", 'bash -c "'),
        ("x.sh", "f() { f; f; }; f\n"),
        ("x.sh", "a && "),
        ("x.sh", "case x in\n"),
        ("x.sh", "if x; then "),
        ("x.sh", "${a:-"),
        ("x.yaml", "a: ${b:-"),
        ("x.yaml", "- "),
        ("x.yaml", "{a: "),
        ("x.yaml", "{{"),
        ("x.yaml", _BOMB + "\n---\n"),
        ("x.yaml", "command: >\n  a\n"),
        ("Dockerfile", "FROM ${a\n"),
        ("Dockerfile", "RUN a <<B\n"),
        ("Dockerfile", "ENV a=\\\n"),
        ("x.service", "ExecStart=a \\\n"),
        ("x.py", "(" * 50),
        ("x.py", "a.b"),
        ("x.env", "A=' \" \\"),
    ],
)
def test_hostile_texts_end(where, piece):
    """What grows with the square of such a text would take minutes."""
    text = (piece * (_SIZE // len(piece) + 1))[:_SIZE]
    content = read_content(text, where)
    assert len(content.assignments) + len(content.commands) <= _SIZE


def test_a_text_that_takes_the_grammar_minutes_is_given_up():
    content = read_content("a=(" * 30_000 + "export A_B=c\n", "x.sh")
    assert [each.what for each in content.problems] == ["not read: what takes too long to parse"]


_FRAGMENTS = [
    *("A_B=c", "export ", "$X", "${X:-", "}", "$(", ")", "`", "'", '"', "\\", "\n", "<<E", "E\n"),
    *("vllm serve ", "--x ", "docker run -e ", ": ", "- ", "[", "{", "}}", "{{", "env:", ">", "#"),
    *("command: ", "FROM a", "ENV ", "RUN ", "CMD [", "[Service]", "Environment=", "if ", "then "),
    *("fi", "case ", "esac", "function f", "&& ", "; ", "set -a\n", "bash -c ", "é", "\t", "\x00"),
]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.sampled_from(_FRAGMENTS),
        max_size=30,
    ).map("".join)
    | st.text()
)
def test_any_text_is_read(text):
    last = text.count("\n") + 1
    for where in _NAMES:
        content = read_content(text, where)
        for each in (*content.assignments, *content.own, *content.commands, *content.problems):
            assert 1 <= each.line <= last, (where, each)


_WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.from_regex(r"[A-Z]{2}_[A-Z]{1,5}", fullmatch=True), _WORDS, max_size=5),
    st.sampled_from(Format),
)
def test_env_files_of_patchkit_say_what_was_written(wanted, kind):
    entries = [EnvEntry(name, value) for name, value in wanted.items()]
    try:
        text = render(kind, ["role=head"], entries)
    except PatchkitError:
        return  # a value that the format cannot hold, a secret
    if kind is Format.DOCKER:
        # Docker knows no quotes and no comments behind a value; other readers do.
        wanted = {n: v for n, v in wanted.items() if not set(v) & set("'\"\\# ")}
    said = {each.name: each for each in read_content(text, f"head.{kind}").assignments}
    for name, value in wanted.items():
        known = said.get(name)
        assert known is not None
        assert known.value in (value, value.strip()) or not known.literal
