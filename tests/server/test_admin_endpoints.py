"""What the admin endpoints take and answer: bodies, queries, errors with reports, the description, the page's files."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from tests.server.conftest import running_server
from tests.server.fake_admin import BLOCK_SIZE, FakeAdmin
from tests.server.fake_engine import ASSISTANT, SYSTEM, USER, VOCAB_SIZE, FakeEngine
from tieredkv.hashing import tenant_salt
from tieredkv.server.admin.operations import OPERATIONS, RESET
from tieredkv.server.admin.ui import Page
from tieredkv.types import Tier

TOKENS = list(range(40))


@pytest.fixture(scope="module")
def _served():
    with running_server(FakeEngine(), FakeAdmin(), max_body_size="64KiB") as server:
        yield server


@pytest.fixture
def admin(_served):
    _served.admin.reset()
    _served.engine.reset()
    return _served.admin


@pytest.fixture
def service(_served):
    return _served.service


@pytest.fixture
def http(_served, admin):
    with httpx.Client(base_url=_served.url, timeout=20) as client:
        yield client


def error(response, status, param=None):
    assert response.status_code == status, response.text
    found = response.json()["error"]
    assert {"message", "type", "param", "code"} <= found.keys()
    assert param is None or found["param"] == param
    return found


def test_the_cache_report_has_all_its_fields(http, admin):
    admin.hold(TOKENS)
    report = http.get("/admin/cache").json()
    assert [tier["tier"] for tier in report["tiers"]] == ["device", "host", "disk"]
    assert report["gate"]["pays_from_tokens"] == {"host": 16, "disk": None}
    assert report["min_hit_tokens"] == BLOCK_SIZE


@pytest.mark.parametrize("name", ["", "other"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/admin/cache/flush", {}), ("/admin/cache/lookup", {"prompt": "x"}), ("/admin/pins", {"tokens": TOKENS})],
)
def test_a_name_of_no_model_is_refused(http, name, path, body):
    assert http.post(path, json=body | {"model": name}).status_code == 404
    assert http.post(path, json=body | {"model": None}).is_success


def test_prefixes_come_in_pages(http, admin):
    held = [admin.hold([i] * 32, name=f"n{i}").id for i in range(5)]
    seen, cursor = [], None
    while True:
        query = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = http.get("/admin/cache/prefixes", params=query).json()
        assert page["num_total"] == 5
        seen += [each["id"] for each in page["prefixes"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == held
    assert http.get("/admin/cache/prefixes", params={"tier": "disk"}).json()["num_total"] == 0
    assert http.get("/admin/cache/prefixes", params={"q": "n3"}).json()["num_total"] == 1
    pinned = http.post("/admin/pins", json={"prefix": held[1]}).json()
    assert pinned["prefix"] == held[1]
    for flag, num in (("true", 1), ("false", 4)):
        assert http.get("/admin/cache/prefixes", params={"pinned": flag}).json()["num_total"] == num


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"), ("limit=1001", "limit"), ("limit=x", "limit"), ("limit=", "limit"), ("limit=5.0", "limit"),
        ("limit=1_0", "limit"), ("limit=%D9%A3", "limit"), ("tier=hbm", "tier"), ("tier=", "tier"), ("pinned=1", "pinned"),
        ("pinned=", "pinned"), ("cursor=x", "cursor"), ("q=" + "a" * 1001, "q"),
    ],
)  # fmt: skip
def test_wrong_queries_are_named(http, query, param):
    error(http.get(f"/admin/cache/prefixes?{query}"), 400, param)


def test_ids_are_hashes_in_either_case(http, admin):
    chain = admin.hold(TOKENS)
    for text in (chain.id, chain.id.upper()):
        assert http.get(f"/admin/cache/prefixes/{text}").json()["prefix"]["id"] == chain.id
        assert http.get(f"/admin/cache/blocks/{text}").json()["hash"] == chain.id
    for text in ("x", chain.id[:-1], "00" * 32, "%00", "..%2f..", "é"):
        error(http.get(f"/admin/cache/prefixes/{text}"), 404)
        error(http.get(f"/admin/cache/blocks/{text}"), 404)


@pytest.mark.parametrize("path", ["cache/lookup", "pins", "cache/warm"])
def test_prompts_in_three_ways(http, admin, path):
    def post(body):
        return http.post(f"/admin/{path}", json={"prompts": [body]} if path.endswith("warm") else body)

    where = "prompts.0." if path.endswith("warm") else ""
    messages = [{"role": "system", "content": "a" * 30}]
    for body in (
        {"prompt": "b" * 40},
        {"messages": messages},
        {"tokens": TOKENS},
        {"prompt": "b" * 40, "tokens": None},
    ):
        assert post(body).status_code in (200, 201, 202), body
    for body in ({}, {"prompt": "x", "tokens": [1]}, {"tokens": None}):
        error(post(body), 400)
    error(post({"tokens": [VOCAB_SIZE]}), 400, f"{where}tokens")
    error(post({"tokens": [-1]}), 400)
    error(post({"tokens": [1] * 513}), 400, f"{where}tokens")
    error(post({"tokens": "x"}), 400)
    error(post({"tokens": [True]}), 400)
    error(post({"tokens": [2**70]}), 400)
    error(post({"messages": [{"role": "robot", "content": "x"}]}), 400)
    error(post({"prompt": 5}), 400)
    error(post({"prompt": ""}), 400)
    error(post({"prompt": "x", "cache_salt": ""}), 400)
    error(post({"prompt": "x", "model": "other"}), 404, "model")


def test_a_lookup_asks_for_a_request_a_pin_for_what_many_share(http, admin):
    messages = [{"role": "system", "content": "a" * 50}]
    request = [SYSTEM, *b"a" * 50, ASSISTANT]
    shared = [SYSTEM, *b"a" * 50, USER]
    report = http.post("/admin/cache/lookup", json={"messages": messages}).json()
    assert report["num_tokens"] == len(request)
    assert report["device_tokens"] + report["computed_tokens"] == len(request)
    http.post("/admin/cache/warm", json={"prompts": [{"messages": messages}]})
    assert admin.calls[-1]["prompts"][0].token_ids == shared
    http.post("/admin/cache/lookup", json={"messages": messages, "add_generation_prompt": False}).json()


def test_a_cache_salt_leads_elsewhere(http, admin):
    admin.hold(TOKENS, tenant_salt(cache_salt="s"))
    for salt, hit in (("s", 32), ("t", 0), (None, 0)):
        report = http.post("/admin/cache/lookup", json={"tokens": TOKENS, "cache_salt": salt}).json()
        assert report["device_tokens"] == hit


@pytest.mark.parametrize(
    ("ttl", "seconds"), [("90s", 90), ("5m", 300), ("1h", 3600), ("7d", 604800), (2.5, 2.5), (60, 60), (None, None)]
)
def test_times_to_live(http, admin, ttl, seconds):
    http.post("/admin/pins", json={"tokens": TOKENS, "ttl": ttl}).raise_for_status()
    assert admin.calls[-1]["ttl_s"] == seconds


@pytest.mark.parametrize("ttl", [0, -1, "", "5 minutes", "5y", "-5m", True, [], 1e300, "999999999d", "m"])
def test_impossible_times_to_live(http, ttl):
    error(http.post("/admin/pins", json={"tokens": TOKENS, "ttl": ttl}), 400, "ttl")


def test_a_pin_comes_and_goes(http, admin):
    made = http.post("/admin/pins", json={"tokens": TOKENS, "tier": "disk", "name": "system", "warm": False})
    assert made.status_code == 201
    assert admin.calls[-1]["tier"] is Tier.DISK
    assert admin.calls[-1]["warm"] is False
    pin = made.json()
    assert http.get("/admin/pins").json() == {"pins": [pin]}
    assert http.get(f"/admin/pins/{pin['id']}").json() == pin
    assert http.delete(f"/admin/pins/{pin['id']}").json() == pin
    error(http.delete(f"/admin/pins/{pin['id']}"), 404)
    assert http.get("/admin/pins").json() == {"pins": []}


def test_a_refused_pin_tells_its_report(http, admin):
    admin.pin_budget = 1
    found = error(http.post("/admin/pins", json={"tokens": TOKENS}), 409)
    assert found["pin"]["outcome"] == "refused"
    assert found["code"] == "pin_refused"


def test_a_prefix_stands_for_a_prompt(http):
    error(http.post("/admin/pins", json={"prefix": "ab" * 32, "tokens": [1]}), 400, "prefix")
    for unknown in ("ab" * 32, "nonsense", ""):
        error(http.post("/admin/pins", json={"prefix": unknown}), 404)


def test_jobs(http, admin):
    made = http.post("/admin/cache/warm", json={"prompts": [{"prompt": "x", "pin": True, "ttl": "1h"}], "name": "n"})
    assert made.status_code == 202
    job = made.json()
    (prompt,) = admin.calls[-1]["prompts"]
    assert (prompt.pin, prompt.ttl_s, prompt.token_ids) == (True, 3600, [*b"x"])
    assert http.get("/admin/jobs").json() == {"jobs": [job]}
    assert http.get(f"/admin/jobs/{job['id']}").json() == job
    assert http.delete(f"/admin/jobs/{job['id']}").json()["state"] == "cancelled"
    error(http.get("/admin/jobs/nothing"), 404)


@pytest.mark.parametrize("prompts", [[], None, {}, "x", [None], [5], [{"prompt": "x"}] * 1025])
def test_what_cannot_be_warmed(http, prompts):
    error(http.post("/admin/cache/warm", json={"prompts": prompts}), 400)


def test_nothing_is_warmed_while_the_server_stops(http, service, monkeypatch):
    monkeypatch.setattr(service, "draining", True)
    error(http.post("/admin/cache/warm", json={"prompts": [{"prompt": "x"}]}), 503)
    assert http.get("/admin/cache").status_code == 200


@pytest.mark.parametrize("verb", ["clear", "demote"])
def test_removals_say_whether_all_went(http, admin, verb):
    admin.hold(TOKENS)
    done = http.post(f"/admin/cache/{verb}", json={"tiers": ["device"]})
    assert done.status_code == 200
    assert done.json() == {
        "tiers": [{"tier": "device", "removed": 2, "in_use": 0, "pinned": 0, "error": None}],
        "complete": True,
    }
    admin.busy_blocks = 3
    partly = http.post(f"/admin/cache/{verb}", json={"tiers": ["device"]})
    assert "3 in use" in error(partly, 409)["message"]
    assert partly.json()["complete"] is False
    assert partly.json()["tiers"][0]["in_use"] == 3


def test_removals_by_default(http, admin):
    http.post("/admin/cache/clear", json={})
    assert admin.calls[-1] == {"verb": "clear", "tiers": None, "tenant": None, "scope": None}
    http.post("/admin/cache/demote", json={"tiers": None, "tenant": "shared"})
    assert admin.calls[-1] == {"verb": "demote", "tiers": {Tier.DEVICE}, "tenant": "shared", "scope": None}


@pytest.mark.parametrize("tiers", [[], ["hbm"], "device", [None], ["device"] * 9])
def test_wrong_tiers(http, tiers):
    error(http.post("/admin/cache/clear", json={"tiers": tiers}), 400)


def test_clearing_needs_a_body(http, admin):
    """So that no bare POST, as any page can send one, empties a cache."""
    error(http.post("/admin/cache/clear"), 415)
    error(http.post("/admin/cache/clear", content=b"{}", headers={"content-type": "text/plain"}), 415)
    assert not admin.calls


def test_flush(http, admin):
    assert http.post("/admin/cache/flush").json() == {"saved": True, "num_unsaved_blocks": 0}
    assert admin.calls[-1]["timeout_s"] == 30
    admin.unsaved = 4
    late = http.post("/admin/cache/flush", json={"timeout": 0})
    error(late, 504)
    assert (late.json()["saved"], late.json()["num_unsaved_blocks"]) == (False, 4)
    for timeout in (-1, 601, "x", True):
        error(http.post("/admin/cache/flush", json={"timeout": timeout}), 400, "timeout")
    error(http.post("/admin/cache/flush", content=b"{"), 415)
    error(http.post("/admin/cache/flush", content=b"{", headers={"content-type": "application/json"}), 400)


def test_verify(http, admin):
    admin.hold(TOKENS)
    assert http.post("/admin/cache/verify").json() == {"ok": True, "num_checked": 2, "findings": []}


def test_reset_as_vllm_has_it(http, admin):
    admin.hold(TOKENS)
    done = http.post("/reset_prefix_cache")
    assert (done.status_code, done.content) == (200, b"")
    assert admin.calls[-1]["tiers"] == {Tier.DEVICE}
    http.post("/reset_prefix_cache?reset_external=true").raise_for_status()
    assert admin.calls[-1]["tiers"] is None
    admin.busy_blocks = 1
    error(http.post("/reset_prefix_cache"), 409)


def test_large_bodies_are_refused(http):
    error(http.post("/admin/cache/lookup", json={"prompt": "x" * 70_000}), 413)


def test_methods(http):
    for operation in (*OPERATIONS, RESET):
        path = operation.path.replace("{id}", "ab" * 32)
        allowed = {each.method for each in OPERATIONS if each.path == operation.path} or {operation.method}
        allowed |= {"HEAD"} if "GET" in allowed else set()
        for method in {"GET", "PUT", "PATCH", "DELETE", "TRACE"} - allowed:
            response = http.request(method, path)
            assert response.status_code == 405
            assert set(re.split(", ?", response.headers["allow"])) == allowed
    error(http.get("/admin/pins/"), 404)
    assert http.head("/admin/events").headers["content-type"].startswith("text/event-stream")


class TestDescription:
    @pytest.fixture
    def document(self, http):
        return http.get("/admin/openapi.json").json()

    def test_every_operation_is_described_and_nothing_else(self, document):
        described = {(m.upper(), path) for path, item in document["paths"].items() for m in item}
        assert described == {(each.method, each.path) for each in (*OPERATIONS, RESET)}
        names = [op["operationId"] for item in document["paths"].values() for op in item.values()]
        assert len(names) == len(set(names))

    def test_references_lead_somewhere(self, document):
        text = json.dumps(document)
        for name in set(re.findall(r'"\$ref": "([^"]*)"', text)):
            assert name.removeprefix("#/components/schemas/") in document["components"]["schemas"]
        assert "#/$defs" not in text

    def test_it_is_openapi(self, document):
        import jsonschema_rs
        import schemathesis

        assert document["openapi"] == "3.1.0"
        schemathesis.openapi.from_dict(document).validate()
        for schema in document["components"]["schemas"].values():
            jsonschema_rs.meta.validate(schema)

    def test_answers_have_all_their_fields(self, document):
        for name in ("CacheReport", "PinReport", "TierRemoval", "VerifyReport"):
            schema = document["components"]["schemas"][name]
            assert sorted(schema["required"]) == sorted(schema["properties"])


class TestPage:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "ui" / "vendor").mkdir(parents=True)
        (tmp_path / "secret.txt").write_text("secret")
        (tmp_path / "ui" / "index.html").write_text("<!doctype html>")
        (tmp_path / "ui" / ".hidden").write_text("secret")
        (tmp_path / "ui" / "vendor" / "chart.js").write_text("1")
        (tmp_path / "ui" / "odd.xyz").write_text("1")
        return tmp_path / "ui"

    @pytest.fixture
    def page(self, folder):
        from starlette.applications import Starlette
        from starlette.routing import Route
        from starlette.testclient import TestClient

        return TestClient(Starlette(routes=[Route("/admin/ui/{path:path}", Page(folder).serve)]))

    def test_types(self, page):
        for path, media_type in (
            ("", "text/html; charset=utf-8"), ("index.html", "text/html; charset=utf-8"),
            ("vendor/chart.js", "text/javascript; charset=utf-8"), ("odd.xyz", "application/octet-stream"),
        ):  # fmt: skip
            response = page.get(f"/admin/ui/{path}")
            assert response.headers["content-type"] == media_type
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'self'" in response.headers["content-security-policy"]

    @pytest.mark.parametrize(
        "path",
        ["../secret.txt", "%2e%2e/secret.txt", "..%2fsecret.txt", "vendor/../../secret.txt", ".hidden", "vendor", "vendor/",
         "/etc/passwd", "%2fetc%2fpasswd", "vendor%5c..%5cindex.html", "nothing", "%00", "index.html%00", "INDEX.HTML"],
    )  # fmt: skip
    def test_only_files_of_the_page_by_their_names(self, page, path):
        response = page.get(f"/admin/ui/{path}")
        assert response.status_code == 404
        assert "secret" not in response.text

    def test_an_unchanged_file_is_not_sent_again(self, page):
        first = page.get("/admin/ui/")
        tag = first.headers["etag"]
        for given in (tag, f'"x", {tag}', f"W/{tag}", "*"):
            again = page.get("/admin/ui/", headers={"if-none-match": given})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert page.get("/admin/ui/", headers={"if-none-match": '"x"'}).status_code == 200
        assert page.get("/admin/ui/vendor/chart.js").headers["etag"] != tag

    def test_the_shipped_page(self, http):
        for path, target in (("/admin", "admin/ui/"), ("/admin/ui", "ui/")):
            response = http.get(path)
            assert (response.status_code, response.headers["location"]) == (307, target)
            assert str(http.get(path, follow_redirects=True).url).endswith("/admin/ui/")
        page = http.get("/admin/ui/")
        assert page.status_code == 200
        for name in re.findall(r'(?:src|href)="([^"#]+)"', page.text):
            assert http.get(f"/admin/ui/{name}").status_code == 200, name
