"""Processes that run as in containers of one pod: the image's files, its user, a network of their own.

This runs inside fresh namespaces for mounts, processes and network (see `inside.py`), where the ports of the
compose file are all free, and where everything is gone once the first process ends.

The image's root file system is mounted read-only, without a writable folder anywhere. Each service is process
1 of a namespace of its own, without any capability and without the means to gain one.
"""

import fcntl
import os
import shlex
import signal
import socket
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.containers.image import ImageConfig

_SIOCSIFFLAGS, _UP = 0x8914, 0x1
_HERE = "127.0.0.1"
_NONE: Mapping[str, str] = MappingProxyType({})


def bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _UP))


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


class Pod:
    """`run` and `start` take the words that a container of `image` would be started with."""

    def __init__(self, root: Path, image: ImageConfig, config: Path, names: tuple[str, ...]) -> None:
        """`config` becomes /config; `names` are other services, all of which are found on this loopback."""
        self._root, self._image = root, image
        hosts = root / "etc/hosts"
        hosts.write_text(f"{_HERE} localhost {' '.join(names)}\n", encoding="utf-8")
        _mount("--bind", root, root)
        _mount("--bind", "-o", "ro", config, root / "config")
        for device in ("null", "zero", "random", "urandom"):
            (root / "dev" / device).touch()
            _mount("--bind", Path("/dev") / device, root / "dev" / device)
        _mount("-o", "remount,bind,ro", root)

    def _words(self, command: list[str], environment: Mapping[str, str]) -> list[str]:
        user, group = self._image.user.split(":")
        namespaces = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            f"--mount-proc={self._root}/proc",
        ]
        least = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        identity = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", *least]
        variables = {**self._image.environment, **environment}
        clean = ["env", "--ignore-environment", f"--chdir={self._image.folder}"]
        pairs = [f"{name}={value}" for name, value in variables.items()]
        return [*namespaces, "chroot", str(self._root), *identity, *clean, *pairs, *command]

    def run(self, *command: str, environment: Mapping[str, str] = _NONE) -> subprocess.CompletedProcess[str]:
        """As `docker exec`: the command by itself, to its end."""
        words = self._words(list(command), environment)
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    def start(self, log: Path, *arguments: str, environment: Mapping[str, str] = _NONE) -> "Service":
        """As `docker run`: the image's entry point with these arguments, or with its own."""
        command = [*self._image.entrypoint, *(arguments or self._image.command)]
        with log.open("wb") as output:
            words = self._words(command, environment)
            return Service(
                subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT), log, shlex.join(command)
            )


class Service:
    """A running one."""

    def __init__(self, keeper: subprocess.Popen[bytes], log: Path, command: str) -> None:
        self._keeper, self.log, self.command = keeper, log, command

    @property
    def ended(self) -> bool:
        return self._keeper.poll() is not None

    def first_process(self) -> int:
        """Its process 1, as it is numbered out here."""
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children")
        return int(children.read_text(encoding="utf-8").split()[0])

    def status(self) -> dict[str, str]:
        """Who it is and what it may, from the kernel."""
        text = Path(f"/proc/{self.first_process()}/status").read_text(encoding="utf-8")
        return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)

    def stop(self, seconds: float = 30) -> int:
        """SIGTERM, as containers are stopped; the exit status."""
        os.kill(self.first_process(), signal.SIGTERM)
        return self._keeper.wait(seconds)

    def kill(self) -> None:
        if not self.ended:
            self._keeper.kill()
            self._keeper.wait()
