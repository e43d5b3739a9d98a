"""Models: who may use which, whether one is served here, and one list from those of several engines."""

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.api.access import Caller
from gateway.api.errors import Problem
from gateway.policy.admission import Admission
from gateway.policy.outcome import Outcome


def check_may_use(caller: Caller, model: str) -> None:
    """Raises Problem (403)."""
    if not caller.may_use(model):
        message = f"this API key may not use the model '{model[:100]}'"
        raise Problem(Outcome.FORBIDDEN, message, param="model", code="model_not_allowed")


def check_is_served(model: str, admission: Admission) -> None:
    """Raises Problem (404)."""
    if not admission.serves(model):
        message = f"the model '{model[:100]}' is not served here"
        raise Problem(Outcome.NOT_FOUND, message, param="model", code="model_not_found")


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
