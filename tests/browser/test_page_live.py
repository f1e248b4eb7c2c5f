"""The page before the real engine with a tiny model, while requests come in: its numbers are true, and what it does holds."""

from __future__ import annotations

import random
import re
import threading

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.test_page import dialog, rows
from tests.server.real_admin import VOCAB_SIZE, real_server

BLOCK_SIZE = 16


def prompt(rng: random.Random, num_blocks: int) -> list[int]:
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(num_blocks * BLOCK_SIZE)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    with (
        real_server(folder, admin_key=[], api_key=[], admin_show_text=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as server.http,
    ):
        yield server


@pytest.fixture
def load(server):
    """Requests from two clients until the test ends: mostly new prompts, and old ones by turns."""
    stop = threading.Event()
    failures = []

    def client(seed):
        rng = random.Random(seed)
        old = [prompt(rng, 8) for _ in range(6)]
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for number in range(10**9):
                if stop.is_set():
                    return
                token_ids = old[number % len(old)] if number % 2 else prompt(rng, 12)
                answer = http.post("/v1/completions", json={"prompt": token_ids, "max_tokens": 4})
                if answer.status_code != 200:
                    failures.append(answer.text)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    yield
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []


def open_page(page: Page, server) -> Page:
    page.goto(f"{server.url}/admin")
    expect(page.locator("#status")).to_have_text("live")
    return page


def test_numbers_live_under_load(page: Page, server, load):
    open_page(page, server)
    expect(page.locator("#model")).to_have_text("tiny")
    for title, item in (
        ("Occupancy of the tiers", r"Now: device [1-9][\d.]* %, host [1-9][\d.]* %, disk [1-9][\d.]* %"),
        ("Flow between the tiers", r"down into host [1-9].*B/s, down into disk [1-9].*B/s"),
        ("Prompt tokens by source", r"computed [1-9].* tok/s"),
        ("Time to first token", r"computed [1-9].* m?s"),
    ):
        chart = page.get_by_role("img", name=re.compile(title))
        expect(chart).to_have_attribute("aria-label", re.compile(item), timeout=20_000)
    # The cards say what the API says, at the same moment or a later one.
    page.get_by_role("button", name="Pause").click()
    before = server.http.get("/admin/cache").json()
    page.get_by_role("button", name="Pause").click()
    with page.expect_response(lambda response: response.url.endswith("/admin/cache")) as shown:
        pass
    after = server.http.get("/admin/cache").json()
    for tier, low, high in zip(shown.value.json()["tiers"], before["tiers"], after["tiers"], strict=True):
        assert low["hit_tokens"] <= tier["hit_tokens"] <= high["hit_tokens"]
        assert low["num_spilled_blocks"] <= tier["num_spilled_blocks"] <= high["num_spilled_blocks"]
        assert 0 < tier["num_blocks"] <= tier["capacity_blocks"]
    expect(rows(page).first).to_be_visible()


def test_a_pin_made_on_the_page_holds(page: Page, server):
    rng = random.Random(7)
    kept = prompt(rng, 10)
    body = {"prompt": kept, "max_tokens": 1, "prompt_cache_key": "the handbook"}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    look = {"tokens": [*kept, 11]}  # the last token of a prompt is always computed
    found = server.http.post("/admin/cache/lookup", json=look).json()
    open_page(page, server)
    page.get_by_role("searchbox", name="Search").fill("the handbook")
    expect(rows(page)).to_have_count(1)
    expect(rows(page)).to_contain_text("160")
    page.get_by_role("button", name="Pin the handbook", exact=True).click()
    dialog(page, "Pin this prefix?").get_by_label("Where").select_option("device")
    dialog(page, "Pin this prefix?").get_by_role("button", name="Pin").click()
    expect(page.locator("#notice")).to_contain_text("Pin the handbook accepted: 160 of 160 tokens kept in device")
    (pin,) = server.http.get("/admin/pins").json()["pins"]
    assert (pin["name"], pin["num_pinned_tokens"], pin["prefix"]) == ("the handbook", 160, found["hashes"][-1])
    # More than ten times what the device holds.
    for _ in range(60):
        answer = server.http.post("/v1/completions", json={"prompt": prompt(rng, 12), "max_tokens": 1})
        assert answer.status_code == 200
    assert server.http.post("/admin/cache/lookup", json=look).json()["device_tokens"] == 160
    expect(page.locator("#pin-rows tr")).to_contain_text("10 of 10")
    page.get_by_role("button", name="Unpin the handbook").click()
    dialog(page, "Unpin?").get_by_role("button", name="Unpin").click()
    expect(page.locator("#pin-empty")).to_be_visible()
    assert server.http.get("/admin/pins").json()["pins"] == []


def test_clearing_a_prefix_on_the_page_removes_it(page: Page, server):
    gone = prompt(random.Random(8), 6)
    body = {"prompt": gone, "max_tokens": 1, "prompt_cache_key": "of yesterday"}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    open_page(page, server)
    page.get_by_role("searchbox", name="Search").fill("of yesterday")
    page.get_by_role("button", name="Clear of yesterday", exact=True).click()
    dialog(page, "Clear this prefix?").get_by_role("button", name="Clear").click()
    expect(page.locator("#notice")).to_contain_text("Done")
    expect(page.locator("#prefix-empty")).to_be_visible()
    assert server.http.post("/admin/cache/lookup", json={"tokens": gone}).json()["computed_tokens"] == len(gone)


def test_looking_up_and_warming_a_prompt(page: Page, server):
    open_page(page, server)
    fresh = prompt(random.Random(9), 5)
    form, result = page.locator("#lookup"), page.locator("#lookup-result")
    form.get_by_label("Given as").select_option("tokens")
    form.get_by_label("Prompt").fill(str(fresh))
    form.get_by_role("button", name="Look up").click()
    expect(result.get_by_role("img")).to_have_attribute("aria-label", "tokens 0 to 80 to be computed")
    result.get_by_role("button", name="Warm it…").click()
    dialog(page, "Warm this prompt?").get_by_label("Name").fill("five blocks")
    dialog(page, "Warm this prompt?").get_by_role("button", name="Warm").click()
    expect(page.locator("#job-rows tr").filter(has_text="five blocks")).to_contain_text("done")
    form.get_by_role("button", name="Look up").click()
    expect(result.get_by_role("img")).to_have_attribute("aria-label", re.compile("tokens 0 to (64|80) device"))
