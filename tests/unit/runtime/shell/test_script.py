"""Read shell scripts: which assignments are environment, and which programs run how."""

from __future__ import annotations

import pytest

from patchkit.runtime.formats.read import read_content
from support.said import servers, variables


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # What makes an environment.
        ("export A_B=c D_E='f g'", ["1 A_B=c", "1 D_E=f g"]),
        ("A_B=c\nexport A_B", ["1 A_B=c"]),
        ("export A_B\nA_B=c", ["2 A_B=c"]),
        ("export A_B=1\nA_B=2", ["1 A_B=1", "2 A_B=2"]),
        ("declare -x A_B=c; typeset -x D_E=f", ["1 A_B=c", "1 D_E=f"]),
        ('export "A_B=c d"', ["1 A_B=c d"]),
        ("A_B=c D_E=f run --it", ["1 A_B=c", "1 D_E=f"]),
        ("env -u X A_B=c nice -n 5 run", ["1 A_B=c"]),
        ("sudo -E A_B=c run", ["1 A_B=c"]),
        ("set -a\nA_B=c\nset +a\nD_E=f", ["2 A_B=c"]),
        ("set -o allexport; A_B=c; set +o allexport; D_E=f", ["1 A_B=c"]),
        (
            "docker run -it -e A_B=c --env D_E=f --env=G_H=i image",
            ["1 A_B=c", "1 D_E=f", "1 G_H=i"],
        ),
        ("podman exec -e A_B=c box run", ["1 A_B=c"]),
        # Scripts that start containers take -e as docker does.
        ("bash ./run_cluster.sh image -e A_B=c --env D_E=f", ["1 A_B=c", "1 D_E=f"]),
        ("./launch.sh -e A_B=$X -e other", ["1 A_B?"]),
        ("nohup python3 launch.py recipe -e A_B=c &", ["1 A_B=c"]),
        ("perl -e A_B=c; docker manifest create -e A_B=c i", []),
        ('f=(-e "A_B=c"\n -e D_E=f)\ndocker run "${f[@]}" image', ["1 A_B=c", "2 D_E=f"]),
        ('f=()\n[ "$X" ] && f+=(-e A_B=c)\nprintf "%q " "${f[@]}"', ["2 A_B=c"]),
        ("MORE_ENV=(A_B=c\n D_E=f)\n. x.sh", ["1 A_B=c", "2 D_E=f"]),
        ("MORE=(A_B=c)", []),
        ("f() { printf -- '-e %s ' A_B=c \\\n D_E=$X; }\nrun $(f)", ["1 A_B=c", "2 D_E?"]),
        ('f="-v a:b -e A_B=c"\non docker "$f"', ["1 A_B=c"]),
        ('f="-e A_B=c"\nf="$f -e D_E=$X"\ndocker run $f image', ["1 A_B=c", "2 D_E?"]),
        ("mpirun -np 2 -x A_B=c -x PATH run", ["1 A_B=c"]),
        ("if x; then\n export A_B=1\nelse\n export A_B=2\nfi", ["2 A_B=1", "4 A_B=2"]),
        ("f() {\n export A_B=c\n}\nf", ["2 A_B=c"]),
        ('eval "export A_B=c"', ["1 A_B=c"]),
        ('docker exec x bash -c "\nexport A_B=c\nrun\n"', ["2 A_B=c"]),
        ("ssh -p 22 host 'export A_B=c; run'", ["1 A_B=c"]),
        ("ssh host bash -s <<'E'\nexport A_B=c\nE\nD_E=f", ["2 A_B=c"]),
        ('on() { ssh "$1" "$2"; }\non host "export A_B=c"', ["2 A_B=c"]),
        # What does not.
        ("A_B=c", []),
        ("f() { local A_B=c; }\nf", []),
        ('echo "export A_B=c"\nprintf "A_B=c"\nlog A_B=c', []),
        ("cat <<E\nexport A_B=c\nE", []),
        ("while [ $# ]; do case $1 in\n --x) A_B=$2; shift;;\nesac; done", []),
        (': "${A_B:=c}"', []),
        ("# export A_B=c", []),
        ("export -n A_B=c; export -f run; unset A_B", []),
        ("command -v A_B=c; test A_B=c", []),
        # What is written to a file is what that file says.
        ("cat > x.env <<E\nA_B=c\nE", ["2 A_B=c"]),
        ("cat <<-E | sudo tee /etc/environment\n\tA_B=c\nE", ["2 A_B=c"]),
        ("cat > run <<'E'\n#!/bin/sh\nexport A_B=c\nD_E=f\nE", ["3 A_B=c"]),
        ("cat > x.service <<E\n[Service]\nEnvironment=A_B=c\nE", ["3 A_B=c"]),
        ("echo A_B=c >> /etc/environment", ["1 A_B=c"]),
        ("cat > notes.txt <<E\nA_B=c\nE", []),
        # Values that a reader without a shell knows, and those that it does not.
        ("X=c\nexport A_B=$X", ["2 A_B=c"]),
        ("export A_B=${X:-c} D_E=${Y-f}", ["1 A_B=c", "1 D_E=f"]),
        ('X=c\nexport A_B="$X $X  ${X}\n$X"', ["2 A_B=c c  c\nc"]),
        ('X=c\nexport A_B="${Y:-$X $X d} e"', ["2 A_B=c c d e"]),
        ("X=\nexport A_B=${X:-c}", ["2 A_B=c"]),
        ("export A_B=$1 D_E=${X}", ["1 A_B?", "1 D_E?"]),
        ("export A_B=$(run) D_E=`run` G_H=$((1 + 1))", ["1 A_B?", "1 D_E?", "1 G_H?"]),
        ("export A_B=\\$X D_E='$X'", ["1 A_B?", "1 D_E?"]),
        ("export A_B=${X%/*} D_E=${#X} G_H=${!X}", ["1 A_B?", "1 D_E?", "1 G_H?"]),
        ("X=1\nif x; then X=2; fi\nexport A_B=$X", ["3 A_B?"]),
        ("X=1\nif x; then X=1; fi\nexport A_B=$X", ["3 A_B=1"]),
        ("X=1\n[ x ] && X=$2\nexport A_B=$X", ["3 A_B=1"]),
        ("for X in 1 2; do export A_B=$X; done", ["1 A_B?"]),
        ("read -r X; export A_B=$X", ["1 A_B?"]),
        ("f() { X=c; }\nf\nexport A_B=$X", ["3 A_B=c"]),
        ("f() { local X=c; }\nf\nexport A_B=$X", ["3 A_B?"]),
        ("(X=c)\nexport A_B=$X", ["2 A_B?"]),
        ("X=c; unset X; export A_B=$X", ["1 A_B?"]),
        ("export A_B=$'c\\td'", ["1 A_B=c\td"]),
        ('export A_B="c\\\nd"', ["1 A_B=cd"]),
        # The caller's value, or none.
        ("export A_B=${A_B:-} D_E=$D_E G_H=${G_H:?} I_J", []),
        ("docker run -e A_B -e D_E=${D_E:-} image", []),
    ],
)
def test_which_assignments_make_an_environment(text, expected):
    assert variables(text, "x.sh") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("vllm serve m \\\n  --host 0.0.0.0", "1 vllm serve m --host 0.0.0.0"),
        ('exec "$VENV/bin/vllm" serve m', "1 vllm serve m"),
        ("nohup ./bin/vllm serve m >log 2>&1 &", "1 vllm serve m"),
        ("timeout -k 5 10m nice -n 3 vllm serve m", "1 vllm serve m"),
        ("srun -n 2 bash -lc 'vllm serve m'", "1 vllm serve m"),
        ("A='m --x'\n[ $Y ] && A=\"$A --y\"\nvllm serve $A", "3 vllm serve m --x --y"),
        ("A=m\n[ $Y ] && A=n\nvllm serve $A", "3 vllm serve $A?"),
        ("numactl --membind 0 vllm serve m", "1 vllm serve m"),
        ("uv run --with x vllm serve m", "1 vllm serve m"),
        ("python3 -u -m vllm.entrypoints.openai.api_server --model m", "1 vllm serve --model m"),
        ("$PYTHON -m vllm.entrypoints.cli.main serve m", "1 vllm serve m"),
        ("python /opt/bin/vllm serve m", "1 vllm serve m"),
        ("H=0.0.0.0\nvllm serve m --host=$H", "2 vllm serve m --host=0.0.0.0"),
        ("vllm serve m --host ${H:-0.0.0.0} --port $P", "1 vllm serve m --host 0.0.0.0 --port $P?"),
        ('a=(vllm serve m)\na+=(--x)\n"${a[@]}" --y', "1 vllm serve m --x --y"),
        ('a=(--x 1)\nvllm serve m "${a[@]}" "${b[@]}"', "2 vllm serve m --x 1 ${b[@]}?"),
        ('C="vllm serve $M --x"\neval $C', "1 vllm serve $M? --x"),
        ('C="vllm serve $M \\\n --x"\nexec ${C}', "1 vllm serve $M? --x"),
        ("docker run --gpus all v/vllm-openai:v1 --model m", "1 vllm serve --model m"),
        ("docker run --rm v/vllm-openai m --port 1", "1 vllm serve m --port 1"),
        ("docker run -v a:b $IMAGE --max-model-len 1", "1 vllm serve --max-model-len 1"),
        ('docker run "$@" "$IMAGE" vllm serve m', "1 vllm serve m"),
        ('O="-d $X $Y $IMAGE"\ndocker run $Z $O vllm serve m', "2 vllm serve m"),
        ('X=\nwhile y; do X=$1; done\nvllm serve m --x="$X"', "3 vllm serve m --x=$X?"),
        ("docker run $OPTIONS --name n $IMAGE vllm serve m", "1 vllm serve m"),
        ("docker run --entrypoint vllm image serve m", "1 vllm serve m"),
        ("docker run v/spark-vllm:1 serve m --x", "1 vllm serve m --x"),
        ("docker run ollama/ollama serve", ""),
        ("docker manifest create v/vllm-openai:v1 v/vllm-openai:v1-arm --amend", ""),
        ("docker run --entrypoint= image vllm serve m", "1 vllm serve m"),
        ("docker run --entrypoint python3 i@sha256:0 /bin/vllm serve m", "1 vllm serve m"),
        ("docker --context c container run i vllm serve m", "1 vllm serve m"),
        ("docker compose -f x run -e A=b s vllm serve m", "1 vllm serve m"),
        ("docker exec -d box bash -lc 'cd x && vllm serve m'", "1 vllm serve m"),
        ("ssh -o A=b host vllm serve m", "1 vllm serve m"),
        ("docker exec -e M=m -e N=1 c bash -c 'vllm serve $M --x $O'", "1 vllm serve m --x $O?"),
        ("tmux new -d -s n 'vllm serve m'", "1 vllm serve m"),
        ('on() { "$@"; }\non vllm serve m', "2 vllm serve m"),
        ("x=$(docker run -d image vllm serve m)", "1 vllm serve m"),
        ("until ray start --head; do sleep 1; done", "1 ray start --head"),
        ("ray start --address=$H:6379", "1 ray start --address=$H:6379?"),
        # Arguments that are kept for a server which something else starts.
        ("A=(--max-model-len 8)\n. other.sh", "1 vllm serve ? ? --max-model-len 8"),
        ("A='--max-model-len 8 -x'\n", "1 vllm serve ? ? --max-model-len 8 -x"),
        # No servers.
        ('echo "vllm serve m"; pgrep -f vllm serve; command -v vllm', None),
        ("docker run sglang --model-path m", None),
        ("docker manifest create x/vllm-openai:a x/vllm-openai:b --amend", None),
        ("docker compose -f x up vllm serve", None),
        ("A=(--port 8)", None),
    ],
)
def test_which_servers_run(text, expected):
    assert servers(text, "x.sh") == ([expected] if expected else [])


def test_flags_are_found_with_their_values_and_lines():
    (command,) = read_content(
        "vllm serve m --a 1 --b=2 \\\n --c -x --d $D \\\n --e -- --no", "x.sh"
    ).commands
    flags = [(each.line, each.name, each.value, each.literal) for each in command.flags]
    assert flags == [
        *((1, "--a", "1", True), (1, "--b", "2", True), (2, "--c", "", True)),
        *((2, "-x", "", True), (2, "--d", "$D", False), (3, "--e", "", True)),
    ]
    assert command.is_whole
    assert command.flag("--b").value == "2"
    assert command.flag("--no") is None


def test_a_command_has_the_variables_of_its_block_and_of_those_around_it():
    text = (
        "export A_A=1\nif x; then\n  export B_B=2\n  C_C=3 vllm serve m\nelse\n  export D_D=4\nfi\n"
    )
    content = read_content(text, "x.sh")
    command = next(each for each in content.commands if each.program == "vllm serve")
    assert sorted(content.environment(command)) == ["A_A", "B_B", "C_C"]


def test_why_a_value_is_not_known_is_told():
    content = read_content("export A_A=$X B_B=$(run) C_C=$1\n", "x.sh")
    assert [each.why_unknown for each in content.assignments] == [
        "X is not set in this file",
        "it is the output of a command",
        "it is an argument",
    ]


def test_own_variables_and_defaults_are_kept_apart():
    content = read_content("X_Y=1\nvllm serve m --api-key ${K_K:-secret}\n", "x.sh")
    assert [(each.line, each.name, each.value) for each in content.own] == [(1, "X_Y", "1")]
    assert [(each.line, each.name, each.value) for each in content.defaults] == [
        (2, "K_K", "secret")
    ]
