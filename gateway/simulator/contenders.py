"""The configurations that are compared, as the simulator needs them. What is wrong is said as for `serve`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gateway.config_reading import ConfigError
from gateway.keys import load_keys
from gateway.mock_backend.gpu_model import GpuPreset, find_preset
from gateway.policy.parameters import PolicyParameters
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings, load_settings

ANY_MODEL = "mock-gpu"
"""What is asked for where a configuration serves everything."""


@dataclass(frozen=True)
class Contender:
    """A configuration, or with `gateway` False the same engines without one."""

    title: str
    parameters: PolicyParameters
    presets: Mapping[str, GpuPreset]
    """By the name of the upstream."""
    gateway: bool = True

    @property
    def model(self) -> str:
        """What requests ask for that do not say so themselves: the first model that is named."""
        named = (m for upstream in self.parameters.upstreams for m in upstream.models if m != "*")
        return next(named, ANY_MODEL)

    def serves(self, model: str) -> bool:
        return any(model in u.models or "*" in u.models for u in self.parameters.upstreams)


def read_contenders(paths: Sequence[Path], preset: str | None, straight: bool) -> list[Contender]:
    """One for each file, or for the defaults; with `straight` the engines of the first one without a gateway
    before them. `preset` is for all engines; without it each upstream must be a mock one. Raises ConfigError.
    """
    files: Sequence[Path | None] = paths or [None]
    contenders = [_contender(title, path, preset) for title, path in zip(_titles(paths), files, strict=True)]
    if straight:
        first = contenders[0]
        contenders.insert(0, Contender("no gateway", first.parameters, first.presets, gateway=False))
    return contenders


def _titles(paths: Sequence[Path]) -> list[str]:
    """The names of the files, as short as they can be told apart."""
    if not paths:
        return ["defaults"]
    for parts in range(1, 20):
        titles = ["/".join((*path.resolve().parts[-parts:-1], path.stem)) for path in paths]
        if len(set(titles)) == len(titles):
            return titles
    return [f"{path.stem} ({number})" for number, path in enumerate(paths, start=1)]


def _contender(title: str, path: Path | None, preset: str | None) -> Contender:
    settings = load_settings(path)
    keys = () if settings.keys_file is None else load_keys(settings.keys_file)
    return Contender(title, policy_parameters(settings, keys), _presets(settings, path, preset))


def _presets(settings: Settings, path: Path | None, preset: str | None) -> dict[str, GpuPreset]:
    if preset is not None:
        return {upstream.name: find_preset(preset) for upstream in settings.upstreams}
    presets = {}
    problems = []
    for index, upstream in enumerate(settings.upstreams):
        parts = urlsplit(upstream.url)
        if parts.scheme == "mock":
            presets[upstream.name] = find_preset(parts.netloc)
        else:
            says = "the simulator has no engine there; give --preset to say which GPU to imitate"
            problems.append(f"{path or 'defaults'}: upstreams[{index}].url: found {upstream.url}, {says}")
    if problems:
        raise ConfigError(problems)
    return presets
