"""The admin API over the real engine: what it says is so, what it does holds, and tenants are apart in every verb."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.real_admin import ADMIN, ALICE, BOB, bearer, owner_label, real_server
from tests.server.test_admin_events import parse

BLOCK = 16


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with real_server(tmp_path_factory.mktemp("real")) as server:
        yield server


@pytest.fixture
def prompt(served):
    """A prompt of three blocks and two tokens that no other test has."""
    number = next(served.numbers)
    return [5 + number % 300, 5 + number // 300, *range(100, 148)]


def client(served, key):
    return httpx.Client(base_url=served.url, headers=bearer(key), timeout=60)


@pytest.fixture
def root(served):
    with client(served, ADMIN) as http:
        yield http


@pytest.fixture
def alice(served):
    with client(served, ALICE) as http:
        yield http


@pytest.fixture
def bob(served):
    with client(served, BOB) as http:
        yield http


def look(http, prompt):
    return http.post("/admin/cache/lookup", json={"tokens": prompt}).raise_for_status().json()


def finished(http, job_id):
    while (job := http.get(f"/admin/jobs/{job_id}").raise_for_status().json())["state"] in ("queued", "running"):
        pass
    return job


def test_a_lookup_says_what_a_request_then_finds(served, alice, prompt):
    assert look(alice, prompt)["computed_tokens"] == len(prompt)
    assert served.say(ALICE, prompt) == 0
    report = look(alice, prompt)
    found = report["device_tokens"] + report["host_tokens"] + report["disk_tokens"]
    assert found == served.say(ALICE, prompt) > 0
    assert found + report["computed_tokens"] == len(prompt)
    assert [span["end"] for span in report["spans"]][-1] == len(prompt)


def test_the_report_counts(served, root, alice, prompt):
    served.say(ALICE, prompt)
    report = root.get("/admin/cache").json()
    assert [tier["enabled"] for tier in report["tiers"]] == [True, True, True]
    assert report["tiers"][0]["num_blocks"] > 0
    assert report["store_id"]
    assert report["min_hit_tokens"] == report["block_size"] == BLOCK


def test_branches_and_blocks_are_found_by_their_ids(served, root, alice, prompt):
    served.say(ALICE, prompt)
    last = look(alice, prompt)["hashes"][-1]
    detail = alice.get(f"/admin/cache/prefixes/{last}").json()
    assert (detail["prefix"]["tenant"], detail["prefix"]["num_tokens"]) == (owner_label(ALICE), 48)
    assert detail["blocks"][-1]["hash"] == last
    assert root.get(f"/admin/cache/blocks/{last}").json()["num_tokens"] == BLOCK
    pages, cursor = [], None
    while cursor is not None or not pages:
        query = {"limit": 1} | ({"cursor": cursor} if cursor else {})
        pages.append(alice.get("/admin/cache/prefixes", params=query).json())
        cursor = pages[-1]["next_cursor"]
    ids = [prefix["id"] for page in pages for prefix in page["prefixes"]]
    assert last in ids
    assert len(ids) == len(set(ids)) == pages[0]["num_total"]


def test_tenants_are_apart_in_every_verb(served, root, alice, bob, prompt):
    served.say(BOB, prompt)
    hashes = look(bob, prompt)["hashes"]
    pin = bob.post("/admin/pins", json={"tokens": prompt}).raise_for_status().json()
    job = bob.post("/admin/cache/warm", json={"prompts": [{"tokens": prompt}]}).json()
    finished(bob, job["id"])
    label, last = owner_label(BOB), hashes[-1]
    # Not hit, not looked up.
    assert look(alice, prompt)["computed_tokens"] == len(prompt)
    assert not set(look(alice, prompt)["hashes"]) & set(hashes)
    assert served.say(ALICE, prompt) == 0
    # Not listed.
    for path in (
        "/admin/cache/prefixes?limit=1000",
        f"/admin/cache/prefixes?tenant={label}",
        f"/admin/cache/prefixes?q={last}",
    ):
        text = alice.get(path).text
        assert label not in text
        assert last not in text
    assert pin["id"] not in alice.get("/admin/pins").text
    assert job["id"] not in alice.get("/admin/jobs").text
    # Not shown, changed, pinned, unpinned, demoted or cleared.
    for method, path in (
        ("GET", f"/admin/cache/prefixes/{last}"), ("GET", f"/admin/cache/blocks/{last}"),
        ("GET", f"/admin/pins/{pin['id']}"), ("DELETE", f"/admin/pins/{pin['id']}"),
        ("GET", f"/admin/jobs/{job['id']}"), ("DELETE", f"/admin/jobs/{job['id']}"),
    ):  # fmt: skip
        assert alice.request(method, path).status_code == 404, path
    for path in ("/admin/pins", "/admin/cache/demote", "/admin/cache/clear"):
        assert alice.post(path, json={"prefix": last}).status_code == 404, path
    for body in ({}, {"tiers": ["device", "host"]}):
        alice.post("/admin/cache/demote", json={"tiers": ["device"]})
        alice.post("/admin/cache/clear", json=body)
    assert look(alice, prompt)["computed_tokens"] == len(prompt)
    report = look(bob, prompt)
    assert report["computed_tokens"] == 2
    assert bob.get(f"/admin/pins/{pin['id']}").json()["num_present"] == 3
    # An administrator may.
    assert root.get(f"/admin/cache/prefixes/{last}").status_code == 200
    assert root.delete(f"/admin/pins/{pin['id']}").status_code == 200


def test_a_pin_of_what_is_missing_computes_it(served, alice, prompt):
    pin = alice.post("/admin/pins", json={"tokens": prompt, "ttl": "1h", "name": "n"}).raise_for_status().json()
    assert (pin["outcome"], pin["num_pinned_tokens"], pin["tenant"]) == ("accepted", 48, owner_label(ALICE))
    assert pin["expires_s"] == pytest.approx(pin["created_s"] + 3600, abs=5)
    if pin["job"] is not None:
        assert finished(alice, pin["job"])["state"] == "done"
    now = alice.get(f"/admin/pins/{pin['id']}").json()
    assert (now["num_present"], now["num_missing"]) == (3, 0)
    assert served.say(ALICE, prompt) == 48
    # It stays when all that is not pinned goes, which is said.
    refused = alice.post("/admin/cache/clear", json={})
    assert refused.status_code == 409
    assert sum(tier["pinned"] for tier in refused.json()["tiers"]) >= 3
    assert look(alice, prompt)["computed_tokens"] == 2
    assert alice.delete(f"/admin/pins/{pin['id']}").json()["id"] == pin["id"]
    assert alice.post("/admin/cache/clear", json={}).status_code == 200
    assert look(alice, prompt)["computed_tokens"] == len(prompt)


def test_a_pin_over_the_budget_is_clipped_or_refused(alice):
    response = alice.post(
        "/admin/pins", json={"tokens": list(range(3, 303)) + [9] * 200, "tier": "host", "warm": False}
    )
    assert response.status_code in (201, 409)
    if response.status_code == 409:
        assert response.json()["error"]["pin"]["outcome"] == "refused"
    else:
        assert alice.delete(f"/admin/pins/{response.json()['id']}").status_code == 200


def test_warm_then_hit(served, alice, prompt):
    job = alice.post("/admin/cache/warm", json={"prompts": [{"tokens": prompt}], "name": "w"}).raise_for_status().json()
    done = finished(alice, job["id"])
    assert (done["state"], done["num_prompts_done"], done["num_tokens_done"]) == ("done", 1, len(prompt))
    assert served.say(ALICE, prompt) == 48


def test_reset_clears_the_device_as_vllm_does(served, root, alice, prompt):
    served.say(ALICE, prompt)
    root.post("/reset_prefix_cache").raise_for_status()
    assert look(alice, prompt)["device_tokens"] == 0
    root.post("/reset_prefix_cache?reset_external=true").raise_for_status()
    assert look(alice, prompt)["computed_tokens"] == len(prompt)


def test_flush_saves_and_verify_finds_nothing(served, root, alice, prompt):
    served.say(ALICE, prompt)
    assert root.post("/admin/cache/flush", json={"timeout": 30}).json() == {"saved": True, "num_unsaved_blocks": 0}
    demoted = alice.post("/admin/cache/demote", json={"tiers": ["device", "host"]})
    assert demoted.status_code == 200, demoted.text
    report = look(alice, prompt)
    assert (report["device_tokens"], report["host_tokens"], report["disk_tokens"]) == (0, 0, 48)
    verified = root.post("/admin/cache/verify").json()
    assert (verified["ok"], verified["findings"]) == (True, [])
    assert verified["num_checked"] > 0


def test_events_tell_what_is_stored(served, root, alice, prompt):
    with root.stream("GET", "/admin/events") as response:
        events = parse(response.iter_lines())
        key, name, data = next(events)
        while name == "snapshot" and key is None:
            key, name, data = next(events)
        assert name == "snapshot"
        served.say(ALICE, prompt)
        hashes = set(look(alice, prompt)["hashes"])
        seen = set()
        sequence = data["sequence"]
        while not hashes <= seen:
            _, name, data = next(events)
            assert data["sequence"] == sequence + 1
            sequence = data["sequence"]
            if name == "stored" and data["tier"] == "device":
                seen |= set(data["hashes"])
    # A reader that comes back misses nothing.
    with root.stream("GET", "/admin/events", headers={"last-event-id": key}) as response:
        again, name, data = next(parse(response.iter_lines()))
    epoch, number = again.rsplit("-", 1)
    assert (f"{epoch}-{int(number) - 1}", name in ("stored", "removed")) == (key, True)


def test_the_description_fits_the_server(root):
    document = root.get("/admin/openapi.json").json()
    assert document["components"]["schemas"]["LookupBody"]["properties"]["model"]["enum"] == ["tiny", None]
    assert "320" in json.dumps(document) or "319" in json.dumps(document)


def run_together(served, seconds):
    """Requests and verbs of two tenants and an administrator at once, for a while; returns what was answered."""
    deadline = time.monotonic() + seconds
    prompts = [[3 + i, *range(50, 50 + 16 * (1 + i % 6))] for i in range(40)]
    statuses = Counter()

    def talk(seed, key):
        draw = random.Random(seed)
        with client(served, key) as http:
            while time.monotonic() < deadline:
                body = {"prompt": draw.choice(prompts), "max_tokens": draw.randint(1, 4)}
                statuses["completion", http.post("/v1/completions", json=body).status_code] += 1

    def operate(seed, key):
        draw = random.Random(seed)
        with client(served, key) as http:
            while time.monotonic() < deadline:
                tokens = draw.choice(prompts)
                tenant = {} if key != ADMIN else {"tenant": owner_label(draw.choice([ALICE, BOB]))}
                tiers = draw.sample(["device", "host", "disk"], draw.randint(1, 3))
                listed = http.get("/admin/cache/prefixes", params={"limit": 3}).json()["prefixes"]
                pins = http.get("/admin/pins").json()["pins"]
                jobs = http.get("/admin/jobs").json()["jobs"]
                method, path, body = draw.choice(
                    [
                        ("POST", "/admin/cache/lookup", {"tokens": tokens} | tenant),
                        ("POST", "/admin/pins", {"tokens": tokens, "ttl": draw.choice([0.05, 60])} | tenant),
                        *([("POST", "/admin/pins", {"prefix": draw.choice(listed)["id"]})] if listed else []),
                        *([("GET", f"/admin/cache/prefixes/{draw.choice(listed)['id']}", None)] if listed else []),
                        *([("DELETE", f"/admin/pins/{draw.choice(pins)['id']}", None)] * 3 if pins else []),
                        ("POST", "/admin/cache/warm", {"prompts": [{"tokens": tokens} | tenant]}),
                        *([("DELETE", f"/admin/jobs/{draw.choice(jobs)['id']}", None)] if jobs else []),
                        ("POST", "/admin/cache/demote", {"tiers": [draw.choice(["device", "host"])]}),
                        ("POST", "/admin/cache/clear", {"tiers": tiers}),
                        *(
                            [("POST", "/admin/cache/verify", None), ("GET", "/admin/cache", None)]
                            if key == ADMIN
                            else []
                        ),
                    ]
                )
                status = http.request(method, path, json=body).status_code
                statuses[path.split("/")[2], status] += 1

    def follow():
        with client(served, ADMIN) as http, http.stream("GET", "/admin/events") as response:
            for _ in parse(response.iter_lines()):
                if time.monotonic() > deadline:
                    return

    jobs = [(talk, 1, ALICE), (talk, 2, BOB), (operate, 3, ALICE), (operate, 4, BOB), (operate, 5, ADMIN), (follow,)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(*job) for job in jobs]
        for each in running[:-1]:
            each.result(120 + seconds)
        # An event to let the reader see that time is up.
        served.say(ALICE, [9, 9, *range(60, 100)])
        running[-1].result(60)
    return statuses


def check_all_together(served, root, seconds):
    statuses = run_together(served, seconds)
    assert {status for _, status in statuses} <= {200, 201, 202, 404, 409, 429}, statuses
    assert {status for what, status in statuses if what == "completion"} == {200}
    for pin in root.get("/admin/pins").json()["pins"]:
        assert root.delete(f"/admin/pins/{pin['id']}").status_code in (200, 404)
    for job in root.get("/admin/jobs").json()["jobs"]:
        root.delete(f"/admin/jobs/{job['id']}").raise_for_status()
        finished(root, job["id"])
    assert root.post("/admin/cache/flush").json()["saved"]
    assert root.post("/admin/cache/verify").json()["ok"]
    assert root.post("/admin/cache/clear", json={}).status_code == 200
    tiers = root.get("/admin/cache").json()["tiers"]
    assert [(tier["num_blocks"], tier["num_pinned_blocks"]) for tier in tiers] == [(0, 0)] * 3
    served.engine.call(lambda core: core.check_integrity()).result(30)


def test_everything_at_once(served, root):
    check_all_together(served, root, 2.5)


@pytest.mark.soak
def test_everything_at_once_for_a_minute(served, root):
    check_all_together(served, root, 60)
