"""Install the peers: `make bench-peers`. Each Python one gets an environment of its own under build/peers.

What is there already stays as it is; `rm -r build/peers` and another run take the newest. nginx and wrk are
Debian packages: as root they are installed too, otherwise it is said what to type.
"""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence

from tests.benchmarks.proxy_cost.contenders import CONTENDERS, PEERS, find_nginx, peer_python

REQUIREMENTS: Mapping[str, str] = {
    "vllm-router": "vllm-router",  # the Rust router; production-stack's, in Python, is not published
    "sglang-router": "sglang-router",
    "litellm": "litellm[proxy]==1.106.12",  # the extra of a later release cannot be installed
}
DEBIAN_PACKAGES: Mapping[str, str] = {"nginx": "nginx-light", "wrk": "wrk"}


def install(name: str, requirement: str) -> None:
    """Raises CalledProcessError; a peer half installed is none."""
    venv.create(PEERS / name, with_pip=True, clear=True)
    pip = [str(peer_python(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--only-binary", ":all:", requirement], check=True)


def install_debian(packages: Sequence[str]) -> None:
    """Raises CalledProcessError."""
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"missing, and not for this user to install: {' '.join(command)}", file=sys.stderr)
        return
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for each in (["apt-get", "update"], command):
        subprocess.run([*each, "--quiet", "--quiet"], check=True, env=environ)


def main() -> int:
    versions = {contender.name: contender.version for contender in CONTENDERS}
    failed = False
    for name, requirement in REQUIREMENTS.items():
        if versions[name]() is None:
            print(f"installing {requirement}", flush=True)
            try:
                install(name, requirement)
            except subprocess.CalledProcessError:
                failed = True
        print(f"{name}: {versions[name]() or 'not installed'}")
    found = {"nginx": find_nginx(), "wrk": shutil.which("wrk")}
    if missing := [DEBIAN_PACKAGES[name] for name, path in found.items() if path is None]:
        try:
            install_debian(missing)
        except subprocess.CalledProcessError:
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
