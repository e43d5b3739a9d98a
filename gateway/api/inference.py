"""The tenants' port: inference paths on the fast lane, everything else through FastAPI.

The inference paths are an ASGI application ahead of FastAPI's router, by path: a handler function with a
streaming response costs the data path three times as much CPU. They are documented in the same OpenAPI
page all the same.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.edge import Edge
from gateway.api.endpoints import nowhere
from gateway.api.exchange import Exchange
from gateway.api.pages import Pages

OWN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json"})


class TenantApp:
    """The ASGI application of the tenants' port; `own` answers what is not for an engine."""

    def __init__(self, edge: Edge, own: ASGIApp) -> None:
        self._edge = edge
        self._own = own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OWN_PATHS:
            await self._own(scope, receive, send)
        else:
            path = scope["path"]
            endpoint = self._edge.endpoints.get(path) or nowhere(path)
            await Exchange(self._edge, endpoint, scope, receive, send).run()


def create_pages(edge: Edge) -> Pages:
    def rest() -> ASGIApp:
        from gateway.api.tenant_pages import tenant_pages

        return tenant_pages(edge)

    return Pages(edge, rest)


def create_tenant_app(edge: Edge) -> TenantApp:
    return TenantApp(edge, create_pages(edge))
