"""The status page in a real browser. Needs Debian's `chromium`, or another one in QOS_TEST_CHROMIUM."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.raw_client import ask, chat, post_chat
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ScriptedEngine,
    scripted_engine,
    streaming,
    token,
    usage_event,
)

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, async_playwright, expect
else:
    playwright = pytest.importorskip("playwright.async_api", reason="there is no playwright")
    async_playwright, expect = playwright.async_playwright, playwright.expect

pytestmark = pytest.mark.anyio

CHROMIUM = os.environ.get("QOS_TEST_CHROMIUM") or shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("there is no chromium: apt-get install chromium", allow_module_level=True)

SLOW = pytest.mark.skipif(not os.environ.get("OBSERVE_CHECK"), reason="make observe-check tries it")

TOKEN = "operators-token-of-this-page"
WAIT_MS = 20_000
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
async def browser() -> "AsyncIterator[Browser]":
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        await browser.close()


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        engine.play = streaming(token("Hello"), token(" you"), FINISH, usage_event(5, 2), DONE)
        yield engine


def settings(engine: ScriptedEngine, **given: Any) -> dict[str, Any]:
    return {"upstreams": [{"name": "gpu0", "url": engine.url}], **given}


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    async with running_gateway(settings(engine)) as gateway:
        yield gateway


@asynccontextmanager
async def opened(
    browser: "Browser", url: str, *, width: int = 1280, scheme: str = "light"
) -> "AsyncIterator[tuple[Page, list[str]]]":
    """A page, and what its console complained of."""
    context = await browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,  # type: ignore[arg-type]
    )
    context.set_default_timeout(WAIT_MS)
    page = await context.new_page()
    complaints: list[str] = []
    page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.goto(url)
    try:
        yield page, complaints
    finally:
        await context.close()


async def test_it_shows_the_classes_and_follows_the_traffic(
    browser: "Browser", gateway: GatewayProcess
) -> None:
    """All three classes with their standing, the engine, then a request that ends while the page is open, and
    a change of settings with its author; names from outside stay text; nobody complains."""
    async with opened(browser, gateway.operations) as (page, complaints):
        for name in ("P0", "P1", "P2"):
            await expect(page.locator(f".class.{name}")).to_be_visible()
        await expect(page.locator(".class.P0 .verdict")).to_have_text("no traffic")
        await expect(page.locator("#upstreams")).to_contain_text("gpu0")
        await expect(page.locator("#badges")).to_contain_text("serving")

        request = chat(stream=True, model=MARKUP)
        assert (await ask(gateway.port, post_chat(request, [("x-request-priority", "P0")]))).status == 200
        await expect(page.locator(".class.P0 .figure")).to_have_text("100 %", timeout=WAIT_MS)
        await expect(page.locator(".class.P0 .verdict")).to_have_text("✓ kept")
        await expect(page.locator("#gist")).to_contain_text("P0 keeps its promise")
        await expect(page.locator("#spoken")).to_have_text("P0 kept")
        await expect(page.locator("#endings")).to_contain_text("completed")
        await expect(page.locator("#decisions tbody tr").first).to_contain_text("P0", timeout=WAIT_MS)

        change = {"classes": {"P0": {"share": 0.5}, "P1": {"share": 0.45}}}
        told = await page.request.patch(
            gateway.operations + "/admin/settings", data=change, headers={"x-operator": "<b>mira</b>"}
        )
        assert told.status == 200
        await expect(page.locator("#changes")).to_contain_text("classes.P0.share 0.6 → 0.5", timeout=WAIT_MS)
        await expect(page.locator("#badges")).to_contain_text("2 set at run time")
        assert await page.locator("main img, #changes b").count() == 0
        assert complaints == []


@pytest.mark.parametrize("width", [400, 1280])
async def test_it_fits_without_scrolling_sideways(
    browser: "Browser", gateway: GatewayProcess, width: int
) -> None:
    async with opened(browser, gateway.operations, width=width) as (page, complaints):
        await expect(page.locator(".class.P2")).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert complaints == []


CONTRAST = """
() => {
  const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const weights = [0.2126, 0.7152, 0.0722];
  const light = (rgb) => rgb.reduce((sum, c, i) => sum + linear(c / 255) * weights[i], 0);
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const ground = (at) => {
    for (let e = at; e; e = e.parentElement) {
      const [r, g, b, a = 1] = parts(getComputedStyle(e).backgroundColor);
      if (a > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest("script")) continue;
    const [a, b] = [light(parts(getComputedStyle(e).color).slice(0, 3)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${e.textContent.trim()}: ${ratio.toFixed(2)}`);
  }
  return low;
}
"""


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
async def test_it_can_be_read_by_day_and_by_night(
    browser: "Browser", gateway: GatewayProcess, scheme: str, is_dark: bool
) -> None:
    """It follows the system's choice, and all of its text has the contrast that WCAG AA asks for."""
    async with opened(browser, gateway.operations, scheme=scheme) as (page, complaints):
        await expect(page.locator(".class.P2")).to_be_visible()
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        red = int(ground.removeprefix("rgb(").split(",")[0])
        assert (red < 64) is is_dark
        assert await page.evaluate(CONTRAST) == []
        assert complaints == []


@SLOW
async def test_it_says_when_its_figures_are_old(browser: "Browser", engine: ScriptedEngine) -> None:
    """The token is asked for, a wrong one is told, the right one is kept for this tab only and goes along to
    the API's document; and when the gateway has gone the page says so and keeps what it had."""
    given = settings(engine, server={"operations_token": TOKEN})
    async with (
        running_gateway(given, token=TOKEN) as gateway,
        opened(browser, gateway.operations) as (page, _),
    ):
        await page.get_by_label("Token").fill("wrong")
        await page.get_by_role("button", name="Show").click()
        await expect(page.locator("#door-says")).to_contain_text("is not the gateway's")
        await expect(page.locator("#board")).to_be_hidden()
        await page.get_by_label("Token").fill(TOKEN)
        await page.get_by_role("button", name="Show").click()
        await expect(page.locator("#board")).to_be_visible()
        await expect(page.locator("#stale")).to_be_hidden()
        assert await page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0
        assert TOKEN not in page.url
        await page.get_by_role("link", name="Admin API").click()
        await expect(page.locator("body")).to_contain_text("/admin/settings")
        await page.go_back()
        await expect(page.locator("#board")).to_be_visible()
        await gateway.stop()
        await expect(page.locator("#stale")).to_contain_text("No answer from the gateway", timeout=WAIT_MS)
        await expect(page.locator(".class.P0")).to_be_visible()


LONG = "x" * 200
TROUBLES: list[tuple[int, Any, str]] = [
    (503, {"error": {"message": f"the reason is {LONG}"}}, f"(status 503, the reason is {LONG})"),
    (502, "<html>a proxy's page</html>", "(status 502)"),
    (200, "<html>a proxy's page</html>", "(/admin/state is not JSON)"),
    (200, {"uptime_seconds": 10**6}, "Answers from the gateway that this page cannot show"),
]
"""What answers to a question for the state, and what the page says of it."""


@SLOW
async def test_it_tells_what_the_trouble_is(browser: "Browser", gateway: GatewayProcess) -> None:
    """Also where answers do come, and on a narrow screen, which a long word does not make wider; and no
    longer when it is over."""

    async def troubled(status: int, body: Any, told: str) -> None:
        async with opened(browser, gateway.operations, width=400) as (page, _):
            await expect(page.locator(".class.P0")).to_be_visible()
            text = body if isinstance(body, str) else json.dumps(body)
            await page.route("**/admin/state", lambda route: route.fulfill(status=status, body=text))
            await expect(page.locator("#stale")).to_contain_text(told, timeout=WAIT_MS)
            await expect(page.locator("#age")).to_contain_text("s old")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 400
            await page.unroute("**/admin/state")
            await expect(page.locator("#stale")).to_be_hidden(timeout=WAIT_MS)

    await asyncio.gather(*(troubled(*trouble) for trouble in TROUBLES))
