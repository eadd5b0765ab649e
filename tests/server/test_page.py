"""The chat page in headless Chromium, at a desk's and a phone's width. Screenshots go where ``PAGEDJAX_SCREENSHOTS`` says."""

import dataclasses
import os
import pathlib
import re
import shutil

import pytest

from tests.server.running import CONFIG, running

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DESK, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 780}


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[test-slow]'")
    with sync_api.sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture(params=[DESK, PHONE], ids=["desk", "phone"])
def page(browser, server, request, tmp_path):
    """The page of a server, freshly opened; nothing on it may fail or be wider than the screen."""
    context = browser.new_context(viewport=request.param)
    one = context.new_page()
    problems = []
    one.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    one.on("pageerror", lambda error: problems.append(str(error)))
    one.goto(f"{server.url}/")
    one.problems = problems
    yield one
    folder = pathlib.Path(os.environ.get("PAGEDJAX_SCREENSHOTS") or tmp_path)
    one.screenshot(path=folder / f"{re.sub(r'[^a-z_]+', '-', request.node.name)}.png")
    assert one.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
    assert problems == []
    context.close()


def wait(page, selector):
    """The page's own rules forbid what evaluates texts, `wait_for_function` among it."""
    page.wait_for_selector(selector, timeout=60_000, state="attached")


def settle(page):
    wait(page, "article.assistant:not(.going)")


def put(page, **knobs):
    """Set knobs as a hand does."""
    page.click("#tune")
    for name, value in knobs.items():
        page.locator(f"#{name}").fill(str(value))
    page.click("#tune")


def test_a_conversation_is_streamed(page, server):
    wait(page, "#model:has-text('tiny')")
    assert page.text_content("#model") == "tiny · up to 256 tokens"
    put(page, temperature=0, top_p=1, max_tokens=40, system="be brief")
    page.fill("#text", "hello")
    page.keyboard.press("Enter")
    assert page.text_content("article.user .said") == "hello"
    settle(page)
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    body = {"messages": asked, "temperature": 0, "max_tokens": 40}
    want = server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
    assert page.text_content("article.assistant .said") == want
    assert re.search(r"^\d+ tokens · first after [\d.]+ s", page.text_content("article.assistant .note"))

    page.fill("#text", "and then?")
    page.click("#send")
    page.wait_for_selector("article:nth-of-type(4):not(.going) .note:not([hidden])")
    asked += [{"role": "assistant", "content": want}, {"role": "user", "content": "and then?"}]
    second = server.post("/v1/chat/completions", {**body, "messages": asked})[1]["choices"][0]["message"]["content"]
    assert page.locator("article.assistant .said").nth(1).text_content() == second
    wait(page, "#hits:has-text('%')")
    page.click("#fresh")
    assert page.locator("article").count() == 0 and page.is_visible("#empty")


def test_settings_are_kept(page):
    put(page, temperature=0.3, top_k=7)
    page.reload()
    page.click("#tune")
    assert (
        page.input_value("#temperature") == "0.3" and page.text_content("#temperature-shown") == "0.3" and page.input_value("#top_k") == "7"
    )


def test_stop_ends_the_answer_on_the_server_too(page, server):
    import time

    dispatch = server.runner.dispatch

    def slow(*arguments, **options):
        time.sleep(0.2)
        return dispatch(*arguments, **options)

    server.runner.dispatch = slow
    try:
        put(page, temperature=1, max_tokens=200)
        page.fill("#text", "go on")
        page.keyboard.press("Enter")
        wait(page, "#running:text-is('1')")
        wait(page, "article.assistant .said:not(:empty)")
        assert page.is_visible("#stop") and not page.is_visible("#send")
        page.click("#stop")
        settle(page)
        assert page.text_content("article.assistant .note") == "stopped" and page.is_visible("#send")
        server.wait_idle(3)
    finally:
        server.runner.dispatch = dispatch


def test_markup_is_shown_as_text(page):
    put(page, max_tokens=2)
    page.fill("#text", "<img src=x onerror=\"document.title='broken'\"><b>bold</b>")
    page.keyboard.press("Enter")
    settle(page)
    assert page.text_content("article.user .said").endswith("<b>bold</b>") and page.locator("article img").count() == 0
    assert page.title() == "pagedjax"


def test_an_error_is_shown_and_the_question_may_be_asked_again(page):
    put(page, max_tokens=0)
    page.fill("#text", "hello")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.wrong")
    assert page.text_content("article.wrong .said") == "max_tokens is 0; it must be at least 1"
    put(page, max_tokens=3)
    page.fill("#text", "hello")
    page.keyboard.press("Enter")
    page.wait_for_selector("article.assistant:not(.going):not(.wrong)")
    assert [one for one in page.problems if "400" not in one] == []
    page.problems.clear()  # the browser's own line about status 400


def test_a_key_is_asked_for(browser, folder):
    with running(folder, dataclasses.replace(CONFIG, api_keys=("secret",))) as server:
        page = browser.new_page()
        page.goto(f"{server.url}/")
        wait(page, "#model:has-text('asks for an API key')")
        page.click("#tune")
        page.fill("#key", "secret")
        wait(page, "#model:has-text('tiny')")
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
        page.close()
