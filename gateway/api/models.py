"""One list of models from those of several engines."""

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.api.access import Caller


def merged_models(pages: Iterable[bytes], caller: Caller) -> bytes:
    """The models that the caller may use, each once, in the order of the engines. A page that is no list
    of models counts as empty."""
    models: dict[str, Any] = {}
    for page in pages:
        for model in _models(page):
            if isinstance(model, dict) and isinstance(name := model.get("id"), str) and caller.may_use(name):
                models.setdefault(name, model)
    return msgspec.json.encode({"object": "list", "data": list(models.values())})


def _models(page: bytes) -> list[Any]:
    try:
        answer = msgspec.json.decode(page)
    except msgspec.DecodeError:
        return []
    data = answer.get("data") if isinstance(answer, dict) else None
    return data if isinstance(data, list) else []
