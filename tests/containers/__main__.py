"""The image for real, without Docker: `make image-check`, or `python -m tests.containers`.

Lints the Dockerfile, builds it with buildah, and runs what came out as its user, with a read-only root and
without capabilities: by itself, and as docker-compose.yml would start it; health checks, answers, SIGTERM.
Needs root and buildah. Where the base image cannot be pulled, a Debian made with debootstrap takes its place.
Says what it could not try, and ends with status 1 where a check does not hold.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.containers.image import SUITE, Buildah, local_base, size_bytes
from tests.containers.report import Report
from tests.deployment.files import ROOT

TAG = "localhost/qos-gateway:image-check"
BASE_ARCHIVE = ROOT / "build/image-check/base.tar"
CHECK_SECONDS_MAX = 300
NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.containers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--base", metavar="IMAGE", default=_base_of_dockerfile(), help="default %(default)s")
    wanted_base = parser.parse_args().base
    report = Report()
    _lint(report)
    _compose_reads_it(report)
    missing = _what_is_missing()
    if missing:
        report.skip("build and run", missing)
        return report.end()
    with tempfile.TemporaryDirectory(prefix="image-check-") as folder:
        try:
            _build_and_run(wanted_base, Path(folder), report)
        except subprocess.CalledProcessError as error:
            said = f"\n{error.stdout or ''}\n{error.stderr or ''}"[-3000:]
            report.check(False, " ".join(map(str, error.cmd))[:200], said)
    return report.end()


def _base_of_dockerfile() -> str:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith("ARG PYTHON_IMAGE="))


def _lint(report: Report) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        report.skip("hadolint", "not installed")
        return
    ran = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    report.check(ran.returncode == 0, "hadolint", ran.stdout.strip())


def _compose_reads_it(report: Report) -> None:
    if not _works("docker", "compose", "version"):
        report.skip("docker compose config", "no docker compose here")
        return
    for profile in ((), ("--profile", "vllm"), ("--profile", "redis")):
        words = ["docker", "compose", *profile, "config", "--quiet"]
        ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        report.check(ran.returncode == 0, " ".join(words), ran.stderr.strip())


def _works(*words: str) -> bool:
    if shutil.which(words[0]) is None:
        return False
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _what_is_missing() -> str | None:
    if os.name != "posix" or os.geteuid() != 0:
        return "mounting the image's files needs root"
    absent = [tool for tool in ("buildah", "unshare", "setpriv", "curl") if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    return None if _works(*NAMESPACES, "true") else "no new namespaces may be made here"


def _build_and_run(wanted_base: str, folder: Path, report: Report) -> None:
    buildah = Buildah(folder)
    base = _base(buildah, wanted_base, report)
    if base is None:
        return
    began = time.monotonic()
    buildah.build(ROOT, base, TAG)
    report.check(True, "the image is built", f"{time.monotonic() - began:.0f} s")
    image = buildah.config(TAG)
    with buildah.mounted(TAG) as root:
        _look_into(root, report)
        words = [root, json.dumps(dataclasses.asdict(image)), folder]
        inside = [*NAMESPACES, sys.executable, "-m", "tests.containers.inside", *words]
        ran = subprocess.run(inside, cwd=ROOT, timeout=CHECK_SECONDS_MAX, check=False)
        report.failed += ran.returncode


def _base(buildah: Buildah, wanted: str, report: Report) -> str | None:
    found = buildah.pull(wanted)
    if found is not None:
        return found
    report.skip(f"the base {wanted}", "cannot be pulled from here")
    if shutil.which("debootstrap") is None:
        report.skip("build and run", "nor is there debootstrap to make another base")
        return None
    began = time.monotonic()
    made = buildah.import_base(local_base(BASE_ARCHIVE))
    print(f"base    Debian {SUITE} with its own Python instead, {time.monotonic() - began:.0f} s", flush=True)
    return made


def _look_into(root: Path, report: Report) -> None:
    own = root / "opt/qos-gateway"
    print(f"size    {size_bytes(root) / 1e6:.0f} MB, {size_bytes(own) / 1e6:.0f} MB of it on top of the base")
    packages = {path.name for path in own.glob("lib/python3*/site-packages/*")}
    report.check("gateway" in packages, "the gateway is in it")
    report.check(not packages & {"pip", "setuptools", "pytest"}, "and nothing that only builds or tests it")
    report.check({"redis", "hiredis", "opentelemetry"} <= packages, "and what shared state and traces need")
    compiled = any(own.glob("lib/python3*/site-packages/gateway/__pycache__/*.pyc"))
    report.check(compiled, "its modules are compiled, since it cannot write them down when it runs")


if __name__ == "__main__":
    sys.exit(main())
