"""The page with a keyboard, with a screen reader, in both themes, on a small screen, offline, and among hostile sites."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.test_page import dialog, open_page, rows
from tieredkv.server.admin.ui import FOLDER

# Texts whose contrast with what is behind them is under WCAG's AA, as [text, ratio].
LOW_CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return canvas.getImageData(0, 0, 1, 1).data;
    };
    const light = (colour) => {
        const part = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
        return 0.2126 * part(colour[0]) + 0.7152 * part(colour[1]) + 0.0722 * part(colour[2]);
    };
    const behind = (node) => {
        for (; node; node = node.parentElement) {
            const colour = rgba(getComputedStyle(node).backgroundColor);
            if (colour[3] === 255) return colour;
        }
        return rgba("canvas");
    };
    const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
    const failures = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = walker.nextNode(); text; text = walker.nextNode()) {
        const node = text.parentElement;
        if (!text.data.trim() || !node.checkVisibility() || node.closest(".hidden, .skip, option, :disabled")) continue;
        const style = getComputedStyle(node);
        const size = parseFloat(style.fontSize);
        const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
        const found = ratio(rgba(style.color), behind(node));
        if (found < least) failures.push([text.data.trim(), found]);
    }
    for (const mark of document.querySelectorAll(".swatch:not(.tone-none), .bar:not(.pinned), .status")) {
        const style = getComputedStyle(mark, mark.matches(".status") ? "::before" : null);
        const found = ratio(rgba(style.backgroundColor), behind(mark.parentElement.closest("section, header")));
        if (mark.checkVisibility() && !mark.dataset.dash && found < 3) failures.push([mark.className, found]);
    }
    return failures;
}"""
# Controls without a name, references to nothing, ids that are not unique, headings that skip a level.
BROKEN_SEMANTICS = """() => {
    const problems = [];
    const visible = (selector) => [...document.querySelectorAll(selector)].filter((node) => node.checkVisibility());
    for (const node of visible("button, input, select, textarea, [role=img], [role=meter], [role=region], progress")) {
        const labels = [...(node.labels ?? [])].map((label) => label.textContent).join("");
        const name = node.getAttribute("aria-label") ?? (labels || (node.matches("button") ? node.textContent : ""));
        if (!name.trim()) problems.push(`no name: ${node.outerHTML.slice(0, 80)}`);
    }
    for (const node of document.querySelectorAll("[aria-labelledby], [aria-describedby], label[for]")) {
        const id = node.getAttribute("aria-labelledby") ?? node.getAttribute("aria-describedby") ?? node.htmlFor;
        if (!document.getElementById(id)) problems.push(`nothing has the id ${id}`);
    }
    const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
    if (new Set(ids).size !== ids.length) problems.push("an id is used twice");
    let level = 0;
    for (const heading of visible("h1, h2, h3, h4")) {
        const next = Number(heading.tagName[1]);
        if (next > level + 1) problems.push(`h${level} is followed by h${next}: ${heading.textContent}`);
        level = next;
    }
    for (const table of document.querySelectorAll("table")) {
        if (!table.caption || !table.querySelector("th[scope=col]")) problems.push("a table without caption or headers");
    }
    return problems;
}"""


@pytest.fixture
def opened(page: Page, fake) -> Page:
    fake.admin.grow(roots=2, children=2)
    fake.admin.add_job(name="morning")
    open_page(page, fake)
    # Everything that there can be is on the screen: numbers, a pin, a message, and a result.
    page.get_by_role("button", name="Pin root 1").click()
    dialog(page, "Pin this prefix?").get_by_role("button", name="Pin").click()
    expect(dialog(page, "Pin this prefix?")).to_be_hidden()
    page.locator("#lookup").get_by_label("Prompt").fill("some prompt of several blocks" * 9)
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#lookup-result")).to_contain_text("full blocks")
    expect(page.locator("#job-rows tr")).to_have_count(1)
    for chart in page.locator("details").all():
        chart.locator("summary").click()
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_enough_in_both_themes(opened: Page, scheme):
    opened.emulate_media(color_scheme=scheme)
    assert opened.evaluate(LOW_CONTRAST) == []
    opened.get_by_role("button", name="Clear root 1").click()
    assert opened.evaluate(LOW_CONTRAST) == []


def test_structure_and_names(opened: Page):
    assert opened.evaluate(BROKEN_SEMANTICS) == []
    expect(opened.get_by_role("banner")).to_have_count(1)
    expect(opened.get_by_role("main")).to_have_count(1)
    expect(opened.get_by_role("search", name="Filter prefixes")).to_have_count(1)
    expect(opened.get_by_role("heading", level=1)).to_have_text("TieredKV")
    for name in ("Over time", "Prefixes", "Pins", "Jobs", "Look up a prompt", "The whole cache"):
        expect(opened.get_by_role("region", name=name, exact=True).first).to_be_visible()
    assert opened.locator("html").get_attribute("lang") == "en"
    # What changes every second is not announced; what happened is.
    assert opened.locator("[role=status] .plot, [aria-live] #figures").count() == 0
    expect(opened.get_by_role("status").filter(has_text="accepted")).to_have_count(1)
    opened.get_by_role("button", name="root 1", exact=True).click()
    expect(dialog(opened, "root 1")).to_be_visible()
    assert opened.evaluate(BROKEN_SEMANTICS) == []


def test_everything_can_be_reached_and_done_with_the_keyboard(page: Page, fake):
    fake.admin.grow(roots=1, children=1)
    open_page(page, fake)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the numbers")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    order = [
        "span",
        "q",
        "tier",
        "pinned",
        "tenant",
        "order",
        "root 1: 1 branch below",
        "Pin root 1",
        "Clear root 1",
        "kind",
        "text",
    ]
    seen = []
    while not set(order) <= set(seen) and len(seen) < 60:
        page.keyboard.press("Tab")
        node = "document.activeElement"
        seen.append(page.evaluate(f"{node}.getAttribute('aria-label') || {node}.name || {node}.id"))
    positions = [seen.index(name) for name in order]
    assert positions == sorted(positions)
    # A dialog keeps the focus, gives it back, and answers to Enter.
    page.get_by_role("button", name="Pin root 1").focus()
    page.keyboard.press("Enter")
    box = dialog(page, "Pin this prefix?")
    expect(box.get_by_label("Name")).to_be_focused()
    for _ in range(12):
        page.keyboard.press("Tab")
        inside = page.evaluate("document.activeElement === document.body || !!document.activeElement.closest('dialog')")
        assert inside
    box.get_by_label("Name").focus()
    page.keyboard.press("Enter")
    expect(box).to_be_hidden()
    expect(page.locator("#notice")).to_contain_text("accepted")
    expect(page.get_by_role("button", name="Pin root 1", exact=True)).to_be_focused()


def test_an_update_takes_no_focus(opened: Page):
    button = opened.get_by_role("button", name="Clear root 1")
    button.focus()
    for _ in range(2):
        with opened.expect_response("**/admin/cache/prefixes*"):
            opened.locator("#refresh").dispatch_event("click")
        with opened.expect_response("**/admin/cache"):
            pass
    expect(button).to_be_focused()


def test_themes(page: Page, fake):
    page.emulate_media(color_scheme="dark")
    open_page(page, fake)
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(background)
    assert light != dark
    toggle = page.get_by_role("button", name=re.compile("Theme"))
    toggle.click()
    expect(toggle).to_have_accessible_name("Theme: light")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) == light
    toggle.click()
    expect(toggle).to_have_accessible_name("Theme: dark")
    page.reload()
    page.emulate_media(color_scheme="light")
    assert page.evaluate(background) == dark
    toggle.click()
    assert page.evaluate(background) == light


def test_a_small_screen_needs_no_sideways_scrolling(opened: Page):
    for width in (360, 768):
        opened.set_viewport_size({"width": width, "height": 700})
        opened.wait_for_function("(width) => document.documentElement.scrollWidth <= width", arg=width)
    # Tables scroll by themselves, also with the keyboard.
    assert opened.get_by_role("region", name="Prefix tree").get_attribute("tabindex") == "0"


def test_reduced_motion(opened: Page):
    moving = "[...document.querySelectorAll('*')].filter((n) => getComputedStyle(n).transitionDuration !== '0s').length"
    assert opened.evaluate(moving) > 0
    opened.emulate_media(reduced_motion="reduce")
    assert opened.evaluate(moving) == 0


def test_it_needs_nothing_but_its_own_server(page: Page, fake):
    hosts = set()
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    open_page(page, fake)
    assert hosts == {urlsplit(fake.url).netloc}
    assert rows(page).count() == 0


def test_its_files_obey_the_content_security_policy(fake):
    with httpx.Client(base_url=fake.url) as http:
        answer = http.get("/admin/ui/")
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        for path in re.findall(r'(?:src|href)="([^"#]+)"', answer.text):
            assert http.get(f"/admin/ui/{path}").status_code == 200, path
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|style=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", index)
    for script in FOLDER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script.read_text()
        )


def test_the_vendored_library_says_what_it_is():
    vendor = FOLDER / "vendor"
    version = re.search(r"uPlot \(v([\d.]+)\)|uPlot.*?\(v([\d.]+)\)", (vendor / "uPlot.iife.min.js").read_text())
    assert version
    assert f"uPlot {version[1] or version[2]}, MIT" in (vendor / "README.md").read_text()
    assert "MIT License" in (vendor / "uPlot.LICENSE.txt").read_text()
