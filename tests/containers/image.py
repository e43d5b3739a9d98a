"""Building the image with buildah: no daemon, no registry, nothing left behind."""

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILD_SECONDS_MAX = 900
PULL_SECONDS_MAX = 300
DEBOOTSTRAP_SECONDS_MAX = 900
SUITE = "bookworm"
LOCAL_BASE = "localhost/debian-python"
CERTIFICATES = Path("/etc/ssl/certs")
PIP_CONFIG = Path("/etc/pip.conf")


@dataclass(frozen=True)
class ImageConfig:
    """What an image says about itself."""

    user: str
    environment: dict[str, str]
    entrypoint: list[str]
    command: list[str]
    folder: str
    health: list[str]

    @classmethod
    def of(cls, inspected: dict[str, Any]) -> "ImageConfig":
        config = inspected["Docker"]["config"]
        return cls(
            user=config["User"],
            environment=dict(entry.split("=", 1) for entry in config["Env"]),
            entrypoint=config["Entrypoint"],
            command=config["Cmd"],
            folder=config["WorkingDir"],
            health=config["Healthcheck"]["Test"],
        )


class Buildah:
    """Images in a store of their own, with the driver and the isolation that need least from the machine."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._roots = ["--root", str(store / "root"), "--runroot", str(store / "run")]
        self._environment = {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot", **os.environ}

    def __call__(self, *words: str, seconds: float = 60) -> str:
        """What it prints; raises CalledProcessError with what went wrong in `stderr`."""
        ran = subprocess.run(
            ["buildah", *self._roots, *words],
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        return ran.stdout.strip()

    def import_base(self, archive: Path) -> str:
        """The image of a root file system in a tar file."""
        with tempfile.TemporaryDirectory(dir=self._store) as context:
            os.link(archive, Path(context) / "base.tar")
            (Path(context) / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n", encoding="utf-8")
            self("build", "--tag", LOCAL_BASE, context, seconds=BUILD_SECONDS_MAX)
        return LOCAL_BASE

    def pull(self, image: str) -> str | None:
        """Its full name; None where it cannot be had."""
        name = image if "/" in image else f"docker.io/library/{image}"
        try:
            self("pull", "--quiet", name, seconds=PULL_SECONDS_MAX)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
        return name

    def build(self, context: Path, base: str, tag: str) -> None:
        """The project's image. Only while it is built, pip sees this machine's certificates and index."""
        words = ["build", "--format", "docker", "--tag", tag, "--build-arg", f"PYTHON_IMAGE={base}"]
        if CERTIFICATES.is_dir():
            words += ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
        if PIP_CONFIG.is_file():
            words += ["--secret", f"id=pip_conf,src={PIP_CONFIG}"]
        self(*words, str(context), seconds=BUILD_SECONDS_MAX)

    def config(self, image: str) -> ImageConfig:
        return ImageConfig.of(json.loads(self("inspect", "--type", "image", image)))

    @contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """A root file system with the image's files."""
        container = self("from", "--pull-never", image)
        try:
            yield Path(self("mount", container))
        finally:
            self("umount", container)
            self("rm", container)


def local_base(archive: Path) -> Path:
    """A Debian with nothing but Python in it, made with debootstrap and kept at `archive`."""
    if archive.is_file():
        return archive
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        root, unfinished = Path(folder) / "root", Path(folder) / "base.tar"
        subprocess.run(
            ["debootstrap", "--variant=minbase", "--include=python3,python3-venv", SUITE, root],
            check=True,
            capture_output=True,
            text=True,
            timeout=DEBOOTSTRAP_SECONDS_MAX,
        )
        shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
        with tarfile.open(unfinished, "w") as tar:
            tar.add(root, arcname=".")
        unfinished.rename(archive)
    return archive


def size_bytes(folder: Path) -> int:
    """Of the files in it, links not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
