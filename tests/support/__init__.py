"""Share what several tests need."""

import subprocess

PACKAGES = {  # of programs that are not called as their package
    **dict.fromkeys(("unshare", "nsenter", "setpriv"), "util-linux"),
    **dict.fromkeys(("ip", "ss"), "iproute2"),
    **dict.fromkeys(("ssh", "ssh-keygen"), "openssh-client"),
    **{
        f"aarch64-linux-gnu-{name}": f"{name}-aarch64-linux-gnu"
        for name in ("g++", "gcc")
    },
    "ld": "binutils",
    "mkfs.ext4": "e2fsprogs",
    "qemu-aarch64": "qemu-user",
    "qemu-aarch64-static": "qemu-user-static",
    "systemd-nspawn": "systemd-container",
}


def write_files(root, files, mode=0o644):
    """Write texts or bytes below a folder, by path; return the folder."""
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text.encode() if isinstance(text, str) else text)
        place.chmod(mode)
    return root


def read_files(root):
    """Return the bytes of every file below a folder, by path."""
    found = (place for place in root.rglob("*") if place.is_file())
    return {place.relative_to(root).as_posix(): place.read_bytes() for place in found}


def run_program(*words, rc=0, **how):
    """Run a program to its end and check its exit code, unless that is None; its output is text."""
    how = {"capture_output": True, "text": True, **how}
    done = subprocess.run([*map(str, words)], **how)
    assert rc is None or done.returncode == rc, f"{words}\n{done.stdout}{done.stderr}"
    return done
