"""Who may use the admin API: keys, tenants, places, hosts, origins, and a port of its own."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.conftest import running_server
from tests.server.fake_admin import FakeAdmin
from tests.server.fake_engine import FakeEngine
from tieredkv.errors import ConfigError, RequestError
from tieredkv.hashing import owner_label, tenant_salt
from tieredkv.server.admin.access import Access, Identity, is_loopback
from tieredkv.server.admin.operations import OPERATIONS, RESET

ALICE, BOB, ADMIN = "alice-key", "bob-key", "admin-key"
GLOBAL = sorted(f"{each.method} {each.path}" for each in (*OPERATIONS, RESET) if each.admin_only)
SCOPED = sorted(f"{each.method} {each.path}" for each in OPERATIONS if not each.admin_only)


def key(value):
    return {"authorization": f"Bearer {value}".strip()}


def call(http, what, headers=None, **settings):
    """Any operation, with a body where it takes one; the body of an endless answer is not read."""
    method, path = what.split()
    path = path.replace("{id}", "ab" * 32)
    if method == "POST":
        settings.setdefault("json", {})
    with http.stream(method, path, headers=headers, **settings) as response:
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return response
        response.read()
        return response


@pytest.fixture(scope="module")
def guarded():
    """A server with an admin key and two tenants, each of whom has one cached prefix, one pin and one job."""
    admin = FakeAdmin()
    with running_server(FakeEngine(), admin, admin_key=[ADMIN], api_key=[ALICE, BOB]) as server:
        yield server


@pytest.fixture
def http(guarded):
    guarded.admin.reset()
    with httpx.Client(base_url=guarded.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="module")
def open_server():
    with running_server(FakeEngine(), FakeAdmin(), api_key=[ALICE]) as server:
        yield server


@pytest.fixture
def local(open_server):
    open_server.admin.reset()
    with httpx.Client(base_url=open_server.url, timeout=20) as client:
        yield client


@pytest.mark.parametrize("what", [*GLOBAL, *SCOPED, "GET /admin/openapi.json", "GET /admin/nothing"])
def test_nobody_gets_in_without_a_right_key(http, what):
    for headers in (
        {}, key("wrong"), key(""), key(ADMIN + "x"), key(ADMIN[:-1]), {"authorization": ADMIN},
        {"authorization": f"Basic {ADMIN}"}, {"x-api-key": ADMIN}, {"cookie": f"key={ADMIN}"},
    ):  # fmt: skip
        response = call(http, what, headers)
        assert response.status_code == 401, (what, headers)
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_two_keys_in_one_request_are_none(http):
    headers = [("authorization", f"Bearer {ADMIN}"), ("authorization", f"Bearer {ALICE}")]
    assert http.get("/admin/pins", headers=headers).status_code == 401


@pytest.mark.parametrize("what", GLOBAL)
def test_global_verbs_are_for_administrators(http, what):
    assert call(http, what, key(ALICE)).status_code == 403
    assert call(http, what, key(ADMIN)).status_code == 200


@pytest.mark.parametrize("what", SCOPED)
def test_tenants_may_use_the_others(http, what):
    assert call(http, what, key(ALICE)).status_code not in (401, 403)


def test_an_admin_key_is_no_key_for_requests(http):
    assert http.post("/v1/completions", json={"prompt": "x"}, headers=key(ADMIN)).status_code == 401
    assert http.post("/v1/completions", json={"prompt": "x"}, headers=key(ALICE)).status_code == 200


def test_a_key_is_for_one_of_both():
    with pytest.raises(ConfigError, match="admin_key"):
        Access([ADMIN, ALICE], [ALICE])


class TestTenantsAreAsIfAbsentToEachOther:
    """Across all verbs; `theirs` is what Bob has."""

    @pytest.fixture
    def theirs(self, guarded, http):
        admin = guarded.admin
        tokens = list(range(64))
        chain = admin.hold(tokens, tenant_salt(api_key=BOB), owner_label(BOB), "bob's")
        pin = http.post("/admin/pins", json={"tokens": tokens}, headers=key(BOB)).json()
        job = http.post("/admin/cache/warm", json={"prompts": [{"tokens": tokens}]}, headers=key(BOB)).json()
        return {"chain": chain, "pin": pin["id"], "job": job["id"], "tokens": tokens, "label": owner_label(BOB)}

    def test_lists(self, http, theirs):
        for headers, num in ((key(ALICE), 0), (key(BOB), 1), (key(ADMIN), 1)):
            page = http.get("/admin/cache/prefixes", headers=headers).json()
            assert (len(page["prefixes"]), page["num_total"]) == (num, num)
            assert len(http.get("/admin/pins", headers=headers).json()["pins"]) == num
            assert len(http.get("/admin/jobs", headers=headers).json()["jobs"]) == num

    def test_filters_lead_nowhere(self, http, theirs):
        for query in ({"tenant": theirs["label"]}, {"q": "bob"}, {"q": theirs["chain"].id[:8]}, {"cursor": "0"}):
            page = http.get("/admin/cache/prefixes", params=query, headers=key(ALICE)).json()
            assert (page["prefixes"], page["num_total"]) == ([], 0)

    def test_things_by_their_ids(self, http, theirs):
        chain = theirs["chain"]
        paths = [
            ("GET", f"/admin/cache/prefixes/{chain.id}"),
            ("GET", f"/admin/cache/blocks/{chain.hashes[0].hex()}"),
            ("GET", f"/admin/pins/{theirs['pin']}"),
            ("DELETE", f"/admin/pins/{theirs['pin']}"),
            ("GET", f"/admin/jobs/{theirs['job']}"),
            ("DELETE", f"/admin/jobs/{theirs['job']}"),
        ]
        for method, path in paths:
            there = http.request(method, path, headers=key(ALICE))
            nowhere = http.request(method, path.replace(path[-8:], "0" * 8), headers=key(ALICE))
            assert (there.status_code, nowhere.status_code) == (404, 404), path
        for method, path in paths:
            assert http.request(method, path, headers=key(BOB)).status_code == 200, path

    def test_lookups(self, http, theirs):
        body = {"tokens": theirs["tokens"]}
        hits = {
            who: http.post("/admin/cache/lookup", json=body, headers=key(who)).json()["device_tokens"]
            for who in (ALICE, BOB)
        }
        assert hits == {ALICE: 0, BOB: 64}
        for salt in (BOB, theirs["label"], theirs["chain"].tenant.hex()):
            response = http.post("/admin/cache/lookup", json=body | {"cache_salt": salt}, headers=key(ALICE))
            assert response.json()["device_tokens"] == 0

    @pytest.mark.parametrize("path", ["pins", "cache/lookup", "cache/warm", "cache/clear", "cache/demote"])
    def test_naming_another_tenant(self, http, theirs, path):
        body = {"tenant": theirs["label"]}
        if path.endswith(("pins", "lookup")):
            body["tokens"] = theirs["tokens"]
        if path.endswith("warm"):
            body = {"prompts": [body | {"tokens": theirs["tokens"]}]}
        assert http.post(f"/admin/{path}", json=body, headers=key(ALICE)).status_code == 404
        assert http.post(f"/admin/{path}", json=body, headers=key(BOB)).status_code in (200, 201, 202)

    @pytest.mark.parametrize("path", ["pins", "cache/clear", "cache/demote"])
    def test_their_prefix(self, http, theirs, path):
        body = {"prefix": theirs["chain"].id}
        assert http.post(f"/admin/{path}", json=body, headers=key(ALICE)).status_code == 404
        assert theirs["chain"].id in http.get("/admin/cache/prefixes", headers=key(ADMIN)).text

    @pytest.mark.parametrize("verb", ["clear", "demote"])
    def test_removals_stay_at_home(self, guarded, http, theirs, verb):
        done = http.post(f"/admin/cache/{verb}", json={"tiers": ["device"]}, headers=key(ALICE)).json()
        assert sum(tier["removed"] for tier in done["tiers"]) == 0
        assert theirs["chain"].id in guarded.admin.chains
        done = http.post(f"/admin/cache/{verb}", json={"tiers": ["device"]}, headers=key(BOB)).json()
        assert sum(tier["removed"] for tier in done["tiers"]) == 4
        assert not guarded.admin.chains

    def test_pins_and_warmth_are_their_own(self, guarded, http, theirs):
        pin = http.post("/admin/pins", json={"tokens": theirs["tokens"]}, headers=key(ALICE)).json()
        assert pin["tenant"] == owner_label(ALICE)
        http.post("/admin/cache/warm", json={"prompts": [{"tokens": [1]}]}, headers=key(ALICE))
        (prompt,) = guarded.admin.calls[-1]["prompts"]
        assert (prompt.tenant, prompt.owner) == (tenant_salt(api_key=ALICE), owner_label(ALICE))

    def test_an_administrator_acts_for_a_tenant(self, guarded, http, theirs):
        body = {"tokens": theirs["tokens"]}
        unclear = http.post("/admin/cache/lookup", json=body, headers=key(ADMIN))
        assert (unclear.status_code, unclear.json()["error"]["param"]) == (400, "tenant")
        for who, hit in ((ALICE, 0), (BOB, 64)):
            response = http.post("/admin/cache/lookup", json=body | {"tenant": owner_label(who)}, headers=key(ADMIN))
            assert response.json()["device_tokens"] == hit
        assert http.post("/admin/pins", json=body | {"tenant": "nobody"}, headers=key(ADMIN)).status_code == 404
        pin = http.post("/admin/pins", json=body | {"tenant": theirs["label"]}, headers=key(ADMIN)).json()
        assert pin["id"] in http.get("/admin/pins", headers=key(BOB)).text


class TestWithoutAnAdminKey:
    def test_this_machine_needs_no_key(self, local):
        for what in [*GLOBAL, *SCOPED, "GET /admin/openapi.json"]:
            assert call(local, what).status_code not in (401, 403), what

    def test_a_wrong_key_is_wrong_nevertheless(self, local):
        assert local.get("/admin/cache", headers=key("wrong")).status_code == 401
        assert local.get("/admin/cache", headers=key("")).status_code == 401

    def test_a_tenant_is_a_tenant(self, local):
        assert local.get("/admin/cache", headers=key(ALICE)).status_code == 403
        assert local.get("/admin/pins", headers=key(ALICE)).status_code == 200

    @pytest.mark.parametrize(
        "host",
        ["evil.example", "evil.example:80", "localhost.evil.example", "192.168.1.5", "", "127.0.0.1@evil", "a b"],
    )
    def test_another_name_for_this_machine_is_refused(self, local, host):
        for headers in ({"host": host}, {"host": host} | key(ALICE)):
            response = local.get("/admin/pins", headers=headers)
            assert response.status_code == 403, response.text
        assert local.get("/health", headers={"host": host}).status_code == 200

    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "localhost.", "127.0.0.1:9", "127.3.2.1", "[::1]:80"])
    def test_names_of_this_machine(self, local, host):
        assert local.get("/admin/cache", headers={"host": host}).status_code == 200

    @pytest.mark.parametrize(
        "name", ["forwarded", "via", "x-real-ip", "x-forwarded-for", "x-forwarded-host", "X-Forwarded-Proto"]
    )
    def test_what_came_through_a_proxy_may_come_from_anywhere(self, local, name):
        for value in ("127.0.0.1", "", "for=127.0.0.1"):
            assert local.get("/admin/cache", headers={name: value}).status_code == 403

    def test_the_page_needs_the_place_but_no_key(self, local, http):
        assert local.get("/admin/ui/").status_code == 200
        assert local.get("/admin/ui/", headers={"host": "evil.example"}).status_code == 403
        assert http.get("/admin/ui/").status_code == 200
        assert http.get("/admin/ui/", headers=key("wrong")).status_code == 200


@pytest.mark.parametrize(
    "what", [*(each for each in (*GLOBAL, *SCOPED) if not each.startswith("GET")), "OPTIONS /admin/pins"]
)
def test_a_page_of_another_site_changes_nothing(http, local, open_server, what):
    own = open_server.url
    for client, headers in ((http, key(ADMIN)), (local, {})):
        for theirs in (
            {"origin": "https://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"},
            {"origin": ""}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"},
            {"origin": str(client.base_url).rstrip("/").replace("http", "ftp")},
        ):  # fmt: skip
            assert call(client, what, headers | theirs).status_code == 403, theirs
    if not what.startswith("OPTIONS"):
        mine = {"origin": own, "sec-fetch-site": "same-origin"}
        assert call(local, what, mine).status_code not in (401, 403)


def test_a_page_of_another_site_learns_nothing_by_looking(local):
    response = local.get("/admin/cache", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("address", "is_own"),
    [
        ("127.0.0.1", True), ("127.255.1.2", True), ("::1", True), ("::ffff:127.0.0.1", True), ("::1%lo", True),
        ("10.0.0.1", False), ("0.0.0.0", False), ("::", False), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False),
        ("localhost", False), ("", False), ("127.1", False), ("2130706433", False),
    ],
)  # fmt: skip
def test_loopback_addresses(address, is_own):
    assert is_loopback(address) == is_own


def scope_of(client, headers=(), method="GET", path="/admin/cache"):
    return {"type": "http", "method": method, "path": path, "client": client, "headers": list(headers)}


@pytest.mark.parametrize("client", [None, ("10.1.2.3", 5), ("::ffff:10.1.2.3", 5), ("", 0), ("unix:", 0)])
def test_other_machines_are_refused_without_an_admin_key(client):
    access = Access([], [ALICE])
    host = (b"host", b"localhost:8000")
    for headers, status in (
        ([host], 403),
        ([host, (b"authorization", b"Bearer alice-key")], 403),
        ([host, (b"authorization", b"Bearer wrong")], 401),
    ):
        with pytest.raises(RequestError) as refused:
            access.admit(scope_of(client, headers))
        assert refused.value.status == status
    admin = Access([ADMIN], [])
    assert admin.admit(scope_of(client, [host, (b"authorization", b"bearer admin-key")])) == Identity()


HEADERS = st.tuples(st.sampled_from([b"host", b"origin", b"authorization", b"sec-fetch-site"]), st.binary(max_size=30))


@given(st.lists(HEADERS), st.sampled_from(["GET", "POST"]))
def test_no_headers_break_the_rules(headers, method):
    """Nothing but a refusal comes out for what is not understood."""
    for access in (Access([], [ALICE]), Access([ADMIN], [ALICE])):
        with pytest.raises(RequestError) as refused:
            access.admit(scope_of(("127.0.0.1", 1), [*headers, (b"host", b"evil.example")], method))
        assert refused.value.status in (401, 403)


def test_a_port_of_its_own():
    with running_server(FakeEngine(), FakeAdmin(), admin_port=0, admin_key=[ADMIN], api_key=[ALICE]) as server:
        main, own = (httpx.Client(base_url=url) for url in (server.url, server.admin_url))
        assert server.url != server.admin_url
        with main, own:
            for path in ("/admin/cache", "/admin/ui/", "/admin/openapi.json", "/admin/pins"):
                assert main.get(path, headers=key(ADMIN)).status_code == 404
                assert own.get(path, headers=key(ADMIN)).status_code == 200
            assert main.get("/admin/cache").status_code == 401
            for path in ("/health", "/metrics", "/version"):
                assert own.get(path).status_code == 200
            assert own.get("/v1/models").status_code == 401
            assert own.get("/v1/models", headers=key(ALICE)).status_code == 404
            assert main.post("/reset_prefix_cache", headers=key(ADMIN)).status_code == 200
            assert main.post("/reset_prefix_cache", headers=key(ALICE)).status_code == 403
            assert own.post("/reset_prefix_cache", headers=key(ADMIN)).status_code == 404
            assert "/reset_prefix_cache" not in own.get("/admin/openapi.json", headers=key(ADMIN)).json()["paths"]


def test_no_admin_no_api():
    with running_server(FakeEngine()) as server:
        assert httpx.get(f"{server.url}/admin/cache").status_code == 404


def test_a_handler_runs_for_nobody_unknown():
    """Past the gate there is a second lock: without a decision no handler runs."""
    from starlette.requests import Request

    from tieredkv.server.admin.call import Call

    with pytest.raises(TypeError):
        Call.of(Request({"type": "http", "headers": [], "method": "GET", "path": "/admin/cache"}, asyncio.sleep))
