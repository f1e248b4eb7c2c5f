"""Property-based fuzzing of the real admin API from its own OpenAPI document, as an administrator, a tenant, and nobody.

Nothing answers 5xx or hangs, every answer is as described, a wrong key is never let in, and a tenant neither sees nor
harms what is another's.
"""

from __future__ import annotations

import hashlib
import json

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks
from schemathesis.config import SchemathesisConfig

from tests.server.real_admin import ADMIN, ALICE, BOB, MODEL, VOCAB_SIZE, bearer, owner_label, real_server
from tieredkv.server.admin.openapi import document
from tieredkv.server.admin.operations import OPERATIONS, RESET

# What is valid by the document may be too long for the model, or name a cursor of no list: such a 400 is right. Keys are
# tried on their own.
UNCHECKED = [checks.positive_data_acceptance, checks.ignored_auth]
TIMEOUT_S = 30
ALL_HEALTH_CHECKS = list(HealthCheck)
# The same requests in every run; the soak looks for new ones.
FEW = settings(max_examples=8, derandomize=True, deadline=None, suppress_health_check=ALL_HEALTH_CHECKS)
MANY = settings(max_examples=150, deadline=None, suppress_health_check=ALL_HEALTH_CHECKS)
ADMIN_ONLY = {(each.method, each.path) for each in (*OPERATIONS, RESET) if each.admin_only}
TOKENS = list(range(3, 3 + 40))


def _schema(key, *, with_edge_cases=True):
    """The document as seen with `key`. Edge cases are a fixed set for each field, about a thousand in all."""
    config = SchemathesisConfig()
    config.projects.default.max_stream_events = 1
    config.projects.default.phases.coverage.enabled = with_edge_cases
    schema = schemathesis.openapi.from_dict(document([MODEL], VOCAB_SIZE), config=config)

    @schema.auth()
    class Key:
        def get(self, case, context):
            return key

        def set(self, case, data, context):
            case.headers = {**(case.headers or {}), "Authorization": f"Bearer {data}"}

    return schema


as_admin, as_alice = _schema(ADMIN), _schema(ALICE)
as_admin_quickly, as_alice_quickly = _schema(ADMIN, with_edge_cases=False), _schema(ALICE, with_edge_cases=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with real_server(tmp_path_factory.mktemp("fuzz")) as server, requests.Session() as session:
        server.session = session
        yield server


@pytest.fixture
def known(served, request):
    """Ids of things that exist: Bob's."""
    served.say(BOB, TOKENS)
    with httpx.Client(base_url=served.url, headers=bearer(BOB), timeout=TIMEOUT_S) as http:
        pin = http.post("/admin/pins", json={"tokens": TOKENS, "name": "bob's"}).json()
        job = http.post("/admin/cache/warm", json={"prompts": [{"tokens": TOKENS}], "name": "bob's"}).json()
        found = http.post("/admin/cache/lookup", json={"tokens": TOKENS}).json()
        yield {"pins": pin["id"], "jobs": job["id"], "prefixes": found["hashes"][-1], "blocks": found["hashes"][0]}
        # Whatever was sent in between, the server is well, and what was Bob's still is.
        assert http.get("/health").status_code == 200
        if "tenant" in request.node.name:
            assert http.get(f"/admin/pins/{pin['id']}").json()["num_present"] == pin["num_blocks"]
            assert http.post("/admin/cache/lookup", json={"tokens": TOKENS}).json()["computed_tokens"] < 16
        http.delete(f"/admin/pins/{pin['id']}")


def aim(case, known):
    """Have half of the valid requests name something that exists; which half depends on the request alone."""
    if case.meta is not None and case.meta.generation.mode is not schemathesis.GenerationMode.POSITIVE:
        return
    parts = case.path.split("/")
    drawn = hashlib.sha256(repr((case.path_parameters, case.body, case.query)).encode()).digest()[0]
    if drawn % 2:
        if case.path_parameters and parts[-2] in known:
            case.path_parameters["id"] = known[parts[-2]]
        if isinstance(case.body, dict) and isinstance(case.body.get("prefix"), str):
            case.body["prefix"] = known["prefixes"]
        if isinstance(case.body, dict) and isinstance(case.body.get("tenant"), str):
            case.body["tenant"] = owner_label(BOB)


def ask(case, served, **settings):
    return case.call(base_url=served.url, session=served.session, timeout=TIMEOUT_S, **settings)


def check_as_admin(case, served, known):
    aim(case, known)
    case.validate_response(ask(case, served), excluded_checks=UNCHECKED)


def check_as_alice(case, served, known):
    aim(case, known)
    response = ask(case, served)
    case.validate_response(response, excluded_checks=UNCHECKED)
    if (case.method, case.path) in ADMIN_ONLY:
        assert response.status_code not in range(200, 300)
    if response.status_code < 400:
        for secret in (*known.values(), owner_label(BOB), "bob's"):
            assert secret not in response.text


def check_wrong_key(case, served):
    drawn = hashlib.sha256(repr((case.path_parameters, case.body, case.query)).encode()).digest()
    wrong = ["", ADMIN[:-1], ADMIN + " x", ADMIN.upper(), owner_label(ALICE), drawn.hex(), f"{ADMIN},{ALICE}"]
    response = ask(case, served, headers={"Authorization": f"Bearer {wrong[drawn[0] % len(wrong)]}".strip()})
    # The HTTP parser may refuse a request before anybody is asked.
    assert response.status_code == 401 or (response.status_code == 400 and "error" not in response.text)
    if response.status_code == 401:
        assert json.loads(response.content)["error"]["code"] == "invalid_api_key"


@as_admin.parametrize()
@FEW
def test_an_administrator_gets_what_is_described(case, served, known):
    check_as_admin(case, served, known)


@as_alice_quickly.parametrize()
@FEW
def test_a_tenant_stays_within_its_own(case, served, known):
    check_as_alice(case, served, known)


@as_admin_quickly.parametrize()
@FEW
def test_a_wrong_key_is_never_let_in(case, served):
    check_wrong_key(case, served)


@pytest.mark.soak
@as_admin.parametrize()
@MANY
def test_soak_an_administrator(case, served, known):
    check_as_admin(case, served, known)


@pytest.mark.soak
@as_alice.parametrize()
@MANY
def test_soak_a_tenant(case, served, known):
    check_as_alice(case, served, known)


@pytest.mark.soak
@as_admin.parametrize()
@MANY
def test_soak_wrong_keys(case, served):
    check_wrong_key(case, served)
