"""What docker/ names exists: paths, variables, ports, probes. Images are not built here; what can be checked without a
container runtime is. The metrics that the dashboard shows are checked against a server, in tests/serving."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from photon_backend import layout, serve
from photon_backend.config import Settings
from photon_backend.layout import LaunchError

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
VARIABLES = {
    *(name.upper() for name in vars(serve.parse_arguments([]))),
    *(f"PHOTON_{name.upper()}" for name in Settings.__struct_fields__),
    "TRITON_HOME",
    "TRITON_CACHE_DIR",  # of the kernels' compiler
    "DEBIAN_FRONTEND",
}
MODELS = {path.name for path in (ROOT / "model_repository").iterdir()}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DOCKER / name).read_text()))


COMPOSE = documents("compose.yaml")[0]
DEPLOYMENT, SERVICE = documents("kubernetes.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
POD_VARIABLES = {entry["name"]: entry["value"] for entry in CONTAINER["env"]}


SCHEMAS = ROOT / "tests" / "conformance" / "deployment"
API = json.loads((SCHEMAS / "kubernetes-1.33.json").read_text())
KINDS = {"Deployment": "io.k8s.api.apps.v1.Deployment", "Service": "io.k8s.api.core.v1.Service"}


def wrong(document: Any, schema: dict[str, Any]) -> list[str]:
    """Where a document breaks its schema."""
    return [error.json_path for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]


def test_compose_file_follows_its_specification() -> None:
    schema = json.loads((SCHEMAS / "compose-spec.json").read_text())
    assert wrong(COMPOSE, schema) == []
    photon = COMPOSE["services"]["photon"]
    misspelled = {"services": {"photon": {**photon, "stop_grace": "60s"}}}
    assert wrong(misspelled, schema) == ["$.services.photon"]
    assert wrong({"services": {"photon": {**photon, "ports": "8000"}}}, schema) == ["$.services.photon.ports"]


@pytest.mark.parametrize("document", documents("kubernetes.yaml"), ids=lambda document: document["kind"])
def test_manifest_follows_the_api(document: dict[str, Any]) -> None:
    schema = {"$ref": f"#/$defs/{KINDS[document['kind']]}", **API}
    assert wrong(document, schema) == []
    assert wrong({**document, "spec": {**document["spec"], "misspelled": 1}}, schema) == ["$.spec"]


def test_a_misspelled_probe_would_be_seen() -> None:
    schema = {"$ref": f"#/$defs/{KINDS['Deployment']}", **API}
    text = json.dumps(DEPLOYMENT)
    for right, false in (("httpGet", "httpget"), ("failureThreshold", "failures"), ("claimName", "claim")):
        assert wrong(json.loads(text.replace(right, false)), schema) != [], right


def test_dockerfile_names_the_same_python_throughout() -> None:
    """The engine's and the stubs' environment are of the Python that the image's stub was built for."""
    (python,) = re.findall(r"^ARG PYTHON=(\S+)", DOCKERFILE, re.MULTILINE)
    assert python == "3.12" and "libpython${PYTHON}.so" in DOCKERFILE
    assert DOCKERFILE.count("python${PYTHON} -m venv") == 2


def test_flags_and_modules_of_the_commands_exist() -> None:
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[1])  # type: ignore[index]
    assert entry[1] == "-m" and (ROOT / (entry[2].replace(".", "/") + ".py")).exists()
    flags = [word for word in entry if word.startswith("--")] + CONTAINER.get("args", []) + CONTAINER.get("command", [])
    known = {f"--{name.replace('_', '-')}" for name in vars(serve.parse_arguments([]))}
    assert set(flags) <= known
    assert "command" not in COMPOSE["services"]["photon"], "its flags would have to be checked here"


def image_environment() -> dict[str, str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    pairs = [re.findall(r"([A-Z_]+)=(\S+)", line) for line in joined.splitlines() if line.startswith("ENV ")]
    return dict(pair for line in pairs for pair in line)


def test_every_variable_is_read_by_something() -> None:
    compose = COMPOSE["services"]["photon"]["environment"]
    for names in (image_environment(), compose, POD_VARIABLES):
        assert set(names) <= VARIABLES


def test_dockerfile_copies_and_runs_what_exists() -> None:
    for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
        allowed = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
        assert all(f"!{source}" in allowed for source in sources), line
    assert 'ENTRYPOINT ["/opt/photon/stub/bin/python", "-m", "photon_backend.serve"]' in DOCKERFILE
    assert image_environment()["PHOTON_ENGINE_PYTHON"].startswith("/opt/photon/engine/bin/")


def test_requirements_of_the_two_environments() -> None:
    """The sed commands of the Dockerfile, run on the real file."""
    engine_script, stub_script = re.findall(r"sed '([^']*)'", DOCKERFILE)
    text = (ROOT / "requirements.txt").read_text()
    engine = subprocess.run(["sed", engine_script], input=text, capture_output=True, text=True, check=True).stdout
    stub = subprocess.run(["sed", stub_script], input=engine, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^torch==", engine, re.MULTILINE) and "pytest" not in engine
    assert not re.search(r"^torch==", stub, re.MULTILINE) and re.search(r"^numpy==1\.", stub, re.MULTILINE)
    for name in ("msgspec", "pyzmq", "tokenizers", "pillow", "llguidance"):
        assert re.search(rf"^{name}==", stub, re.MULTILINE), name


def test_ports_are_the_launchers() -> None:
    environment, defaults = image_environment(), serve.parse_arguments([])
    for name in serve.PORTS:
        assert environment[name] == str(getattr(defaults, name.lower()))
    ports = {port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {int(environment[name]) for name in serve.PORTS}
    assert {port["port"] for port in SERVICE["spec"]["ports"]} == ports
    published = {int(port.rsplit(":", 1)[1]) for port in COMPOSE["services"]["photon"]["ports"]}
    assert published == ports
    (target,) = documents("prometheus.yml")[0]["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == f"photon:{environment['METRICS_PORT']}"


def test_probes_ask_for_models_that_exist() -> None:
    paths = [CONTAINER[probe]["httpGet"]["path"] for probe in ("readinessProbe", "startupProbe")]
    paths += re.findall(r"/v2/models/\w+/ready", " ".join(COMPOSE["services"]["photon"]["healthcheck"]["test"]))
    assert len(paths) == 3
    for path in paths:
        assert re.fullmatch(r"/v2/models/(\w+)/ready", path)[1] in MODELS  # type: ignore[index]
    assert CONTAINER["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"


def test_time_to_end_is_longer_than_draining() -> None:
    drain = float(POD_VARIABLES["DRAIN_SECONDS"]) + serve.STOP_S
    pause = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] > drain + pause
    assert int(COMPOSE["services"]["photon"]["stop_grace_period"].rstrip("s")) > drain


def test_shared_memory_is_enough() -> None:
    front_ends, engines = int(POD_VARIABLES["FRONT_ENDS"]), int(POD_VARIABLES["ENGINES"])
    need = (front_ends + layout.unary_front_ends(front_ends) + engines) * layout.SHM_BYTES + layout.SHM_SPARE
    (shm,) = (volume["emptyDir"] for volume in POD["volumes"] if volume["name"] == "shm")
    assert (shm["medium"], shm["sizeLimit"]) == ("Memory", "1Gi") and need < 1 << 30
    assert COMPOSE["services"]["photon"]["shm_size"] == "1gb" and need < 10**9


def test_compose_mounts_what_exists() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = re.sub(r"^\$\{\w+:-(.*)\}:(.*)$", r"\1:\2", volume).split(":")[0]
            assert source in COMPOSE["volumes"] or (DOCKER / source).exists(), volume


def test_grafana_finds_its_source_and_dashboards() -> None:
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "photon.yaml").read_text())["providers"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in COMPOSE["services"]
    assert any(
        volume.split(":")[1] == provider["options"]["path"] for volume in COMPOSE["services"]["grafana"]["volumes"]
    )
    dashboard = json.loads((DOCKER / "grafana" / "dashboards" / "photon.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


COMMAND = shutil.which("docker-compose")


@pytest.mark.skipif(COMMAND is None, reason="no docker-compose here")
def test_compose_file_is_valid() -> None:
    done = subprocess.run([str(COMMAND), "-f", str(DOCKER / "compose.yaml"), "config"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_triton_home_names_an_installed_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    with pytest.raises(LaunchError, match="bin/tritonserver"):
        layout.triton_home()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    assert layout.triton_home() == tmp_path
    assert layout.triton_libraries() == tmp_path / "lib"
    stub = tmp_path / "backends" / "python" / "triton_python_backend_stub"
    with pytest.raises(LaunchError, match="cannot be read"):
        layout.stub_path()
    stub.parent.mkdir(parents=True)
    stub.touch()
    assert layout.stub_path() == stub


def test_operations_page_names_settings_that_exist() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"`(PHOTON_[A-Z_]+)`", text))
    assert named and named <= VARIABLES
    launcher = {f"`{name.upper()}`" for name in vars(serve.parse_arguments([]))}
    assert [name for name in launcher if name not in text] == []
