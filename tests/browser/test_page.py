"""What the admin page shows and does, over made-up numbers behind the real HTTP server."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from playwright.sync_api import Page, expect

from tests.browser.fake_admin import branch
from tests.server.conftest import running_server
from tests.server.fake_engine import FakeEngine
from tieredkv.types import Tier

HOSTILE = '<img src=x onerror="window.hacked = true"></td><script>window.hacked = true</script>'


@pytest.fixture
def opened(page: Page, fake) -> Page:
    """The page over three roots with two children each, after its first poll."""
    fake.admin.grow(roots=3, children=2)
    return open_page(page, fake)


def open_page(page: Page, server) -> Page:
    page.clock.install()
    page.goto(f"{server.url}/admin/ui")
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#prefix-empty, #prefix-table").locator("visible=true")).to_have_count(1)
    return page


def tick(page: Page, num_polls: int = 1) -> None:
    """Let the page's clock go on until it has asked for numbers again."""
    for _ in range(num_polls):
        with page.expect_response(lambda response: response.url.endswith("/admin/cache")):
            page.clock.run_for(1000)


def dialog(page: Page, title: str):
    return page.get_by_role("dialog", name=title)


def rows(page: Page):
    return page.locator("#prefix-rows tr")


def test_numbers_of_all_tiers_are_live(opened: Page):
    for name, capacity in (("Device", "352 MiB"), ("Host", "1.37 GiB"), ("Disk", "6.87 GiB")):
        card = opened.get_by_role("article", name=name)
        expect(card).to_contain_text(f"of {capacity}")
        meter = card.get_by_role("meter", name=f"{name} occupancy")
        before = card.locator(".big").text_content()
        tick(opened)
        expect(card.locator(".big")).not_to_have_text(before)
        assert (
            f"{meter.get_attribute('aria-valuenow')} %"
            == f"{float(card.locator('.big').text_content().split()[0]):.0f} %"
        )
    expect(opened.locator("#figures")).to_contain_text("3 running, 2 waiting, 1 restoring")
    expect(opened.locator("#figures")).to_contain_text("73 %")  # 5,500 of 7,500 tokens a poll
    expect(opened.locator("#about")).to_contain_text("disk from 48 tokens")


def test_charts_draw_and_say_their_numbers(opened: Page, console):
    console.expected = ["getImageData"]  # the browser advises against what this test does
    tick(opened, 3)
    for title, item in (
        ("Occupancy of the tiers", r"device \d+ %, host"),
        ("Flow between the tiers", r"up from host [\d.]+ MiB/s.*down into disk [\d.]+ MiB/s"),
        ("Prompt tokens by source", r"device [\d.]+K tok/s.*computed [\d.]+K tok/s"),
        ("Time to first token", r"device 20 ms, host 50 ms, disk 90 ms, computed 600 ms"),
    ):
        chart = opened.get_by_role("img", name=re.compile(title))
        expect(chart).to_have_attribute("aria-label", re.compile(item))
        expect(chart.locator("canvas")).to_have_count(1)
        # Something other than axes has been drawn: a colour that is no grey.
        coloured = """(canvas) => {
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200 && Math.abs(data[i] - data[i + 2]) > 40) return true;
            return false;
        }"""
        opened.wait_for_function(coloured, arg=chart.locator("canvas").element_handle())
    flow = opened.locator("#chart-flow")
    flow.get_by_text("Numbers", exact=True).click()
    expect(flow.get_by_role("columnheader", name="down into disk")).to_be_visible()
    expect(flow.get_by_role("row").nth(1)).to_contain_text("MiB/s")


def test_a_restart_of_the_counters_is_a_gap_and_no_negative_rate(opened: Page, fake):
    chart = opened.get_by_role("img", name=re.compile("Prompt tokens by source"))
    tick(opened, 2)
    expect(chart).to_have_attribute("aria-label", re.compile("device [1-9]"))
    fake.admin.epoch, fake.admin.num_polls = "second", 0
    tick(opened)
    expect(chart).to_have_attribute("aria-label", re.compile("device –"))
    tick(opened)
    expect(chart).to_have_attribute("aria-label", re.compile("device [1-9]"))


def test_an_empty_cache_says_what_to_do(page: Page, fake):
    fake.admin.is_idle = True
    open_page(page, fake)
    expect(page.locator("#prefix-empty")).to_have_text(re.compile("Nothing cached yet: send a request"))
    expect(page.locator("#pin-empty")).to_be_visible()
    expect(page.locator("#job-empty")).to_be_visible()
    expect(page.locator("#chart-ttft")).to_contain_text("No request in the last 30 seconds")


def test_the_tree_opens_closes_and_nests(opened: Page):
    expect(rows(opened)).to_have_count(9)
    toggle = opened.get_by_role("button", name="root 1: 2 branches below")
    expect(toggle).to_have_attribute("aria-expanded", "true")
    toggle.press("Enter")
    expect(toggle).to_have_attribute("aria-expanded", "false")
    expect(rows(opened)).to_have_count(7)
    expect(toggle).to_be_focused()
    opened.locator("#refresh").click()
    expect(rows(opened)).to_have_count(7)
    toggle.press("Space")
    expect(rows(opened).nth(1)).to_contain_text("Level 2")


def test_the_tree_is_read_page_by_page(page: Page, fake):
    fake.admin.grow(roots=1, children=249)
    open_page(page, fake)
    expect(page.locator("#prefix-count")).to_have_text("100 of 250 branches")
    page.get_by_role("button", name="Load more").click()
    expect(page.locator("#prefix-count")).to_have_text("200 of 250 branches")
    # Opening a branch fetches the children that it lacks.
    toggle = page.get_by_role("button", name="root 1: 249 branches below")
    toggle.click()
    toggle.click()
    expect(page.locator("#prefix-count")).to_have_text("250 of 250 branches")
    expect(page.get_by_role("button", name="Load more")).to_be_hidden()
    page.locator("#refresh").click()
    expect(rows(page)).to_have_count(250)


def test_filters_and_search(opened: Page, fake):
    admin = fake.admin
    admin.branches.append(
        branch(77, name="legal corpus", tenant="0123456789ab", blocks_by_tier={Tier.DISK: 10}, pins=["p"])
    )
    search = opened.get_by_role("searchbox", name="Search")
    search.fill("legal")
    expect(rows(opened)).to_have_count(1)
    expect(rows(opened)).to_contain_text("legal corpus")
    expect(rows(opened)).to_contain_text("pinned")
    search.fill("nothing like this")
    expect(opened.locator("#prefix-empty")).to_have_text("No branch fits these filters.")
    search.fill("")
    expect(rows(opened)).to_have_count(10)
    for label, value in (("Tier", "disk"), ("Pinned", "true")):
        opened.locator("#filters").get_by_label(label).select_option(value)
        expect(rows(opened)).to_have_count(1)
        opened.locator("#filters").get_by_label(label).select_option("")
        expect(rows(opened)).to_have_count(10)
    opened.locator("#filters").get_by_label("Tenant").fill("0123456789ab")
    expect(rows(opened)).to_have_count(1)


def test_siblings_are_sorted(opened: Page, fake):
    fake.admin.branches += [branch(90, name="big", num_own=99), branch(91, name="new", last_use_s=time.time() + 60)]
    opened.locator("#refresh").click()
    names = opened.locator("#prefix-rows th .link:not(.small)")
    expect(names.first).to_have_text("new")
    order = opened.locator("#filters").get_by_label("Sort by")
    order.select_option("tokens")
    expect(names.first).to_have_text("big")
    order.select_option("hits")
    expect(names.first).to_have_text("new")
    expect(names.nth(1)).to_have_text("big")


def test_a_branch_without_its_parent_can_fetch_it(opened: Page, fake):
    opened.get_by_role("searchbox", name="Search").fill(fake.admin.branches[1].id)
    expect(rows(opened)).to_have_count(1)
    opened.get_by_role("button", name="show what it continues").click()
    expect(rows(opened)).to_have_count(2)
    expect(opened.get_by_role("button", name="root 1", exact=True)).to_be_focused()


def test_a_tier_that_refuses_blocks_says_so_until_it_takes_some(page: Page, fake):
    fake.admin.refusal = "no space left on the device"
    open_page(page, fake)
    expect(page.locator("#tiers")).to_contain_text("1,234 blocks refused, the first")
    expect(page.locator("#tiers")).to_contain_text("no space left on the device")
    fake.admin.refusal = None
    expect(page.locator("#tiers")).not_to_contain_text("refused")


def test_names_and_texts_are_never_markup(page: Page, fake):
    fake.admin.branches.append(branch(1, name=HOSTILE, first_words=HOSTILE, last_words=HOSTILE, tenant=HOSTILE))
    fake.admin.add_job(name=HOSTILE, error=HOSTILE, state="failed")
    fake.admin.fault = HOSTILE
    open_page(page, fake)
    page.get_by_role("button", name=HOSTILE, exact=True).click()
    expect(dialog(page, HOSTILE)).to_contain_text(HOSTILE)
    dialog(page, HOSTILE).get_by_role("button", name="Pin…").click()
    dialog(page, "Pin this prefix?").get_by_role("button", name="Pin").click()
    expect(page.locator("#notice")).to_contain_text(HOSTILE)
    expect(page.locator("#pin-rows")).to_contain_text(HOSTILE)
    expect(page.locator("#job-rows")).to_contain_text(HOSTILE)
    expect(page.locator("#tiers")).to_contain_text(HOSTILE)
    assert page.locator("img[src], td script").count() == 0
    assert page.evaluate("window.hacked") is None


def test_pin_and_unpin(opened: Page, fake):
    opened.get_by_role("button", name="Pin root 4").click()
    box = dialog(opened, "Pin this prefix?")
    expect(box.get_by_label("Name")).to_have_value("root 4")
    box.get_by_label("Name").fill("kept")
    box.get_by_label("Keep it").select_option("1 hour")
    box.get_by_label("Where").select_option("host")
    box.get_by_role("button", name="Pin").click()
    expect(box).to_be_hidden()
    expect(opened.get_by_role("status").filter(has_text="Pin kept accepted: 160 of 160 tokens kept")).to_be_visible()
    prefix_id = fake.admin.branches[3].id
    assert fake.admin.calls == [
        ("pin", {"prefix_id": prefix_id, "tier": Tier.HOST, "ttl_s": 3600.0, "name": "kept"}),
    ]
    pin = opened.locator("#pin-rows tr")
    expect(pin).to_contain_text("kept shared")
    expect(pin).to_contain_text("160 of 160")
    expect(pin).to_contain_text("in 60 min")
    expect(rows(opened).nth(3)).to_contain_text("pinned")
    opened.get_by_role("button", name="Unpin kept").click()
    dialog(opened, "Unpin?").get_by_role("button", name="Unpin").click()
    expect(opened.locator("#pin-empty")).to_be_visible()
    assert fake.admin.calls[-1] == ("unpin", {"pin_id": "pin-1"})


def test_a_refused_pin_is_explained_and_can_be_tried_again(opened: Page, fake, console):
    console.expected = ["409"]
    fake.admin.refuse_pins = True
    opened.get_by_role("button", name="Pin root 1").click()
    box = dialog(opened, "Pin this prefix?")
    box.get_by_role("button", name="Pin").click()
    expect(box.get_by_role("alert")).to_contain_text("the budget of the disk tier is used up")
    fake.admin.refuse_pins = False
    box.get_by_role("button", name="Pin").click()
    expect(box).to_be_hidden()


def test_clearing_asks_first(opened: Page, fake):
    opened.get_by_role("button", name="Clear root 1").click()
    box = dialog(opened, "Clear this prefix?")
    expect(box.get_by_role("button", name="Cancel")).to_be_focused()
    opened.keyboard.press("Enter")
    expect(box).to_be_hidden()
    expect(opened.get_by_role("button", name="Clear root 1")).to_be_focused()
    opened.keyboard.press("Enter")
    opened.keyboard.press("Escape")
    expect(box).to_be_hidden()
    assert fake.admin.calls == []
    opened.get_by_role("button", name="Clear root 1").click()
    box.get_by_label("Disk").uncheck()
    box.get_by_role("button", name="Clear").click()
    expect(opened.locator("#notice")).to_contain_text("Done: device 9 blocks removed; host 9 blocks removed.")
    ((verb, arguments),) = fake.admin.calls
    assert verb == "clear"
    assert arguments == {"tiers": {Tier.DEVICE, Tier.HOST}, "prefix_id": f"{1:064x}", "tenant": None}


def test_clearing_everything_says_what_stayed(opened: Page, fake, console):
    console.expected = ["409"]
    fake.admin.in_use = 4
    opened.get_by_role("button", name="Clear…").click()
    box = dialog(opened, "Clear the cache?")
    box.get_by_label("Host").uncheck()
    box.get_by_label("Tenant").fill("0123456789ab")
    box.get_by_role("button", name="Clear").click()
    expect(opened.locator("#notice")).to_have_text(
        re.compile("Not all of it: device 9 blocks removed .4 in use stay.; disk 9 blocks removed .4 in use stay.")
    )
    ((_, arguments),) = fake.admin.calls
    assert arguments == {"tiers": {Tier.DEVICE, Tier.DISK}, "prefix_id": None, "tenant": "0123456789ab"}
    expect(opened.locator("#prefix-empty")).to_be_visible()


def test_detail_of_a_branch(opened: Page, fake):
    fake.admin.branches.append(branch(50, num_own=130, name="long", priority=80, expires_s=4102444800.0))
    opened.locator("#refresh").click()
    opened.get_by_role("button", name="long", exact=True).click()
    box = dialog(opened, "long")
    expect(box).to_contain_text(f"{50:064x}")
    expect(box).to_contain_text("80, expires in")
    expect(box.get_by_role("row")).to_have_count(101)
    box.get_by_role("button", name="Show all 130 blocks").click()
    expect(box.get_by_role("row")).to_have_count(131)
    expect(box.get_by_role("row").nth(1)).to_contain_text("writing")
    # A pin made here is shown here, and can be taken back.
    box.get_by_role("button", name="Pin…").click()
    dialog(opened, "Pin this prefix?").get_by_role("button", name="Pin").click()
    box.get_by_role("button", name="Unpin long…").click()
    dialog(opened, "Unpin?").get_by_role("button", name="Unpin").click()
    expect(box.get_by_role("button", name=re.compile("Unpin"))).to_have_count(0)
    assert [verb for verb, _ in fake.admin.calls] == ["pin", "unpin"]
    box.get_by_role("button", name="Close").click()
    expect(opened.get_by_role("button", name="long", exact=True)).to_be_focused()


def test_a_branch_that_is_gone_is_explained(opened: Page, fake, console):
    console.expected = ["404"]
    opened.locator("#auto").uncheck()
    fake.admin.branches.pop(0)
    opened.get_by_role("button", name="root 1", exact=True).click()
    expect(dialog(opened, "Prefix").get_by_role("alert")).to_contain_text("There is no prefix")


def test_lookup_pin_and_warm_a_prompt(opened: Page, fake):
    form = opened.locator("#lookup")
    form.get_by_label("Prompt").fill("x" * 200)
    form.get_by_role("button", name="Look up").click()
    result = opened.locator("#lookup-result")
    expect(result.get_by_role("img")).to_have_attribute(
        "aria-label", "tokens 0 to 100 device, tokens 100 to 150 disk, tokens 150 to 200 to be computed"
    )
    for text in ("200 tokens, 12 full blocks", "4 ms", "120 ms", "310 ms", "50 tokens"):
        expect(result).to_contain_text(text)
    result.get_by_role("button", name="Warm it…").click()
    dialog(opened, "Warm this prompt?").get_by_label("Name").fill("one prompt")
    dialog(opened, "Warm this prompt?").get_by_role("button", name="Warm").click()
    expect(opened.locator("#job-rows")).to_contain_text("one prompt")
    result.get_by_role("button", name="Pin this prompt…").click()
    dialog(opened, "Pin this prompt?").get_by_role("button", name="Pin").click()
    expect(opened.locator("#pin-rows tr")).to_have_count(1)
    form.get_by_label("Given as").select_option("tokens")
    form.get_by_label("Prompt").fill("[1, 2")
    form.get_by_role("button", name="Look up").click()
    expect(result.get_by_role("alert")).to_contain_text("This is not JSON")
    form.get_by_label("Prompt").fill(str([1] * 64))
    form.get_by_role("button", name="Look up").click()
    expect(result).to_contain_text("64 tokens, 4 full blocks")


def test_jobs_progress_end_and_cancel(opened: Page, fake):
    admin = fake.admin
    first, second = admin.add_job(name="morning"), admin.add_job(name="evening")
    bar = opened.get_by_role("progressbar", name="Progress of morning")
    tick(opened)
    expect(bar).to_have_attribute("value", "0.25")
    admin.jobs_by_id[first.id] = replace(first, state="done", num_prompts_done=4, num_tokens_done=4000)
    tick(opened)
    expect(bar).to_have_attribute("value", "1")
    expect(opened.locator("#notice")).to_contain_text("Job morning is done.")
    expect(opened.get_by_role("button", name="Cancel morning")).to_be_hidden()
    opened.get_by_role("button", name="Cancel evening").click()
    dialog(opened, "Cancel this job?").get_by_role("button", name="Cancel the job").click()
    expect(opened.locator("#job-rows tr").filter(has_text="evening")).to_contain_text("cancelled")
    assert admin.calls == [("cancel", {"job_id": second.id})]


def test_save_and_verify(opened: Page, fake, console):
    console.expected = ["504"]
    opened.get_by_role("button", name="Save now…").click()
    dialog(opened, "Save everything now?").get_by_role("button", name="Save").click()
    expect(opened.locator("#notice")).to_contain_text("All blocks are saved.")
    fake.admin.in_use = 1
    opened.get_by_role("button", name="Save now…").click()
    dialog(opened, "Save everything now?").get_by_role("button", name="Save").click()
    expect(dialog(opened, "Save everything now?").get_by_role("alert")).to_contain_text("3 blocks could not be saved")
    opened.keyboard.press("Escape")
    opened.get_by_role("button", name="Verify…").click()
    dialog(opened, "Verify all tiers?").get_by_role("button", name="Verify").click()
    expect(opened.locator("#notice")).to_contain_text("1,234 blocks checked: all is well.")


def test_pause_stops_the_polls(page: Page, fake):
    open_page(page, fake)
    pause = page.get_by_role("button", name="Pause")
    pause.click()
    expect(pause).to_have_attribute("aria-pressed", "true")
    seen = fake.admin.num_polls
    page.clock.run_for(20_000)
    with page.expect_response("**/admin/cache/prefixes*"):
        page.locator("#refresh").click()
    assert fake.admin.num_polls <= seen + 1  # one may have been under way
    pause.click()
    page.clock.run_for(5_000)
    expect(page.locator("#status")).to_have_text("live")


def test_a_failing_server_is_shown_and_recovers(opened: Page, fake, console):
    console.expected = ["500"]
    fake.admin.failure = RuntimeError("broken")
    tick(opened)
    expect(opened.locator("#refused")).to_be_visible()
    fake.admin.failure = None
    tick(opened)
    expect(opened.locator("#refused")).to_be_hidden()
    expect(opened.locator("#status")).to_have_text("live")


def test_a_stopped_server_is_shown_and_its_return_is_seen(page: Page, console, fake):
    console.expected = ["ERR_CONNECTION", "ERR_EMPTY_RESPONSE"]
    engine = FakeEngine()
    engine.metrics = fake.admin.metrics
    fake.admin.grow(roots=1, children=0)
    with running_server(engine, fake.admin) as server:
        open_page(page, server)
        port = server.port
    expect(page.locator("#down")).to_have_text(
        re.compile(r"The server does not answer. No numbers since \d\d:\d\d:\d\d")
    )
    expect(page.locator("#status")).to_have_text("no answer")
    with running_server(engine, fake.admin, port=port):
        expect(page.locator("#down")).to_be_hidden()
        expect(page.locator("#notice")).to_contain_text("The server answers again")
        expect(page.locator("#status")).to_have_text("live")
        page.get_by_role("button", name="Pause").click()


def test_keys(page: Page, console, fake):
    console.expected = ["401", "403"]
    engine = FakeEngine()
    engine.metrics = fake.admin.metrics
    fake.admin.grow(roots=2, children=0)
    with running_server(engine, fake.admin, admin_key="the-admin", api_key="a-tenant") as server:
        page.goto(f"{server.url}/admin/ui/")
        box = dialog(page, "Admin key")
        box.get_by_label("Key").fill("wrong")
        box.get_by_role("button", name="Use it").click()
        expect(page.locator("#refused")).to_contain_text("Wrong API key.")
        expect(page.locator("#admin-part")).to_be_hidden()
        page.get_by_role("button", name="Key").click()
        # A tenant's key shows the tenant's own, here nothing.
        box.get_by_label("Key").fill("a-tenant")
        box.get_by_role("button", name="Use it").click()
        expect(page.locator("#refused")).to_contain_text("An admin key may be needed")
        expect(page.get_by_role("button", name="Verify…")).to_be_hidden()
        expect(page.locator("#prefix-empty")).to_contain_text("Nothing cached yet")
        page.get_by_role("button", name="Key").click()
        box.get_by_label("Key").fill("the-admin")
        box.get_by_role("button", name="Use it").click()
        expect(page.locator("#status")).to_have_text("live")
        expect(page.locator("#refused")).to_be_hidden()
        expect(rows(page)).to_have_count(2)
        # Forgotten, it takes along what it had opened.
        page.get_by_role("button", name="Key").click()
        box.get_by_label("Key").fill("")
        box.get_by_role("button", name="Use it").click()
        expect(page.locator("#refused")).to_contain_text("The admin API needs a key.")
        expect(rows(page)).to_have_count(0)
        page.get_by_role("button", name="Key").click()
        box.get_by_label("Key").fill("the-admin")
        box.get_by_role("button", name="Use it").click()
        expect(rows(page)).to_have_count(2)
        # It lives as long as the tab, and is written nowhere else.
        page.reload()
        expect(page.locator("#status")).to_have_text("live")
        assert page.evaluate("sessionStorage.length") == 1
        assert page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href").count("the-admin") == 0
        page.get_by_role("button", name="Pause").click()
