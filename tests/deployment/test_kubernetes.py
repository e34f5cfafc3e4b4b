"""The manifests in `deploy/kubernetes` agree with the code, and are valid.

The tests without a mark read the files as they are. `make test-kubernetes` also renders them with
kubectl, checks the result by the schemas of Kubernetes, and runs the service as its container does:
without the right to write, with the settings and ports of the manifests.
"""

import contextlib
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from sightline import __version__
from sightline.base.bundle import SCHEMA_VERSION
from sightline.base.bundle_files import check_files
from sightline.service.api import health
from sightline.service.compat import open_inference
from sightline.service.discovery import find_bundles
from sightline.service.metrics import Metrics
from sightline.service.runtime.state_memory import row_bytes
from sightline.service.server import END_S, RESPONSE_S
from sightline.service.settings import Settings, make_settings
from tests.deployment.custom_resources import (
    BEHAVIOR,
    MANIFESTS,
    SCHEMAS,
    Resource,
    custom_resources,
    errors,
    kind_of,
    pod_spec,
)
from tests.e2e.test_documented_commands import read_blocks
from tests.service.conftest import wait_until

DOCKERFILE = Path("Dockerfile").read_text(encoding="utf-8")
BASE, COMPONENTS, KSERVE, EXAMPLE = (MANIFESTS / name for name in ("base", "components", "kserve", "example"))
PAGE = Path("docs/how-to/kubernetes.md")
MODEL = "multi30k-en-de"
LABELS = {"app.kubernetes.io/name": "sightline"}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
PROCESS_BYTES, SHARED_BYTES = 160_000_000, 70_000_000  # docs/how-to/tune.md
MAX_ROWS = 32
GIB = 1024**3


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


DEPLOYMENT = read(BASE / "deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
RUNTIME = read(KSERVE / "serving-runtime.yaml")
(KSERVE_CONTAINER,) = RUNTIME["spec"]["containers"]
INFERENCE_SERVICE = read(KSERVE / "inference-service.yaml")
PREDICTOR = INFERENCE_SERVICE["spec"]["predictor"]
SCALED_OBJECT = read(COMPONENTS / "keda" / "scaled-object.yaml")["spec"]
AUTOSCALER = read(COMPONENTS / "hpa" / "autoscaler.yaml")["spec"]
MONITORED_SERVICE = read(COMPONENTS / "monitoring" / "service.yaml")
MONITOR = read(COMPONENTS / "monitoring" / "service-monitor.yaml")["spec"]
KUSTOMIZATIONS = sorted(MANIFESTS.rglob("kustomization.yaml"))
PATCHES = [path for path in sorted(COMPONENTS.rglob("*.yaml")) if read(path).get("kind") == "Deployment"]


def variables(lines: Sequence[str]) -> dict[str, str]:
    """Return the values of lines such as `NAME=value`."""
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def image_variables() -> dict[str, str]:
    """Return the settings that the image of the service sets."""
    lines = re.findall(r"^ENV (.*SIGHTLINE_.*)$", DOCKERFILE, flags=re.MULTILINE)
    return {
        name: value
        for line in lines
        for name, value in variables(shlex.split(line)).items()
        if name.startswith("SIGHTLINE_")
    }


BASE_VARIABLES = image_variables() | variables((BASE / "settings.env").read_text(encoding="utf-8").splitlines())
KSERVE_VARIABLES = image_variables() | {one["name"]: one["value"] for one in KSERVE_CONTAINER["env"]}


def generated_variables(kustomization: Path) -> dict[str, str]:
    """Return the settings that a component or an overlay adds to those of the base."""
    maps = read(kustomization).get("configMapGenerator", ())
    return {name: value for one in maps for name, value in variables(one.get("literals", ())).items()}


def containers_of(path: Path) -> list[dict[str, Any]]:
    """Return the containers of a Deployment or of a patch for it, init containers first."""
    spec = read(path)["spec"]["template"]["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def settings_of(values: Mapping[str, str]) -> Settings:
    return make_settings({}, values)


def metrics_in(expr: str) -> list[str]:
    return re.findall(r"\bsightline_\w+", expr)


def test_the_manifests_set_valid_settings() -> None:
    for values in (BASE_VARIABLES, KSERVE_VARIABLES):
        settings_of(values)
    for kustomization in KUSTOMIZATIONS:
        settings_of(BASE_VARIABLES | generated_variables(kustomization))
    named = [one["name"] for path in PATCHES for container in containers_of(path) for one in container.get("env", ())]
    assert named == ["SIGHTLINE_QUOTA_STORAGE"]
    settings_of(BASE_VARIABLES | {"SIGHTLINE_QUOTA_STORAGE": "redis://redis:6379/0"})


def test_every_container_listens_on_the_ports_of_its_settings() -> None:
    settings, of_kserve = settings_of(BASE_VARIABLES), settings_of(KSERVE_VARIABLES)
    assert CONTAINER["ports"] == [
        {"name": "http", "containerPort": settings.port},
        {"name": "admin", "containerPort": settings.admin_port},
    ]
    assert [one["containerPort"] for one in KSERVE_CONTAINER["ports"]] == [of_kserve.port]
    assert RUNTIME["spec"]["annotations"]["prometheus.kserve.io/port"] == str(of_kserve.admin_port)
    assert {host for host, _ in [*settings.addresses, *of_kserve.addresses]} == {"::"}
    assert re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, flags=re.MULTILINE) == [str(settings.port)]


def test_all_other_ports_are_those_of_the_container() -> None:
    names = {one["name"] for one in CONTAINER["ports"]}
    (service,) = read(BASE / "service.yaml")["spec"]["ports"]
    (metrics,) = MONITORED_SERVICE["spec"]["ports"]
    policy = read(BASE / "network-policy.yaml")["spec"]
    allowed = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
    assert service["targetPort"] == "http" and metrics["targetPort"] == "admin"
    assert allowed == ["http", "admin"] and set(allowed) == names
    (endpoint,) = MONITOR["endpoints"]
    assert endpoint["port"] == metrics["name"]
    assert {CONTAINER[probe]["httpGet"]["port"] for probe in PROBES} <= names
    assert {KSERVE_CONTAINER[probe]["httpGet"]["port"] for probe in PROBES} == {settings_of(KSERVE_VARIABLES).port}


def test_probes_ask_for_health_checks_that_need_no_key() -> None:
    open_paths = {one.path for one in health.ENDPOINTS if one.is_open and one.method == "GET"}
    paths = [CONTAINER[probe]["httpGet"]["path"] for probe in PROBES]
    assert set(paths) <= open_paths
    assert paths == ["/health/live", "/health/ready", "/health/live"]


def test_metrics_are_collected_where_the_service_has_them() -> None:
    (path,) = [one.path for one in health.ENDPOINTS if one.role == "admin"]
    assert MONITOR["endpoints"][0]["path"] == path
    assert RUNTIME["spec"]["annotations"]["prometheus.kserve.io/path"] == path


def test_a_pod_has_the_time_that_its_longest_stop_takes() -> None:
    for pod, values in ((POD, BASE_VARIABLES), (PREDICTOR, KSERVE_VARIABLES)):
        settings = settings_of(values)
        stop_s = settings.drain_s + settings.shutdown_timeout_s + RESPONSE_S + END_S
        assert pod["terminationGracePeriodSeconds"] >= stop_s + 5
        # New connections must have stopped when the listener closes.
        assert settings.drain_s >= 5


def test_a_pod_may_restart_only_if_it_does_not_answer_for_longer_than_a_request_takes() -> None:
    probe = CONTAINER["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > settings_of(BASE_VARIABLES).request_timeout_s


def test_pods_run_as_the_user_of_the_image_without_privileges() -> None:
    users = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, flags=re.MULTILINE)
    ((user, group),) = {(int(one), int(two)) for one, two in users}
    identity = {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": group,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    hardened = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert POD["securityContext"] == {**identity, "fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"}
    assert KSERVE_CONTAINER["securityContext"] == {**identity, **hardened}
    assert PREDICTOR["securityContext"] == {"fsGroup": group}
    own = [one for path in [BASE / "deployment.yaml", *PATCHES] for one in containers_of(path) if "image" in one]
    assert [one["name"] for one in own] == ["sightline", "bundles"]
    assert [one["securityContext"] for one in own] == [hardened, hardened]
    for pod in (POD, PREDICTOR):
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # see docs/reference/settings.md


def test_the_image_is_that_of_this_version() -> None:
    image = f"sightline:{__version__}"
    assert CONTAINER["image"] == KSERVE_CONTAINER["image"] == image
    (override,) = read(EXAMPLE / "kustomization.yaml")["images"]
    assert f"{override['name']}:{override['newTag']}" == image
    page = PAGE.read_text(encoding="utf-8")
    assert {*re.findall(r"\bsightline:[\d.]+\d", page)} == {image}


def test_bundles_are_mounted_where_the_service_reads_them() -> None:
    bundles = settings_of(BASE_VARIABLES).bundles
    for path in PATCHES:
        for container in containers_of(path):
            for mount in container.get("volumeMounts", ()):
                is_copying = container["name"] == "bundles"  # to the volume that the service mounts
                expected = "/served" if is_copying else str(bundles)
                assert mount["mountPath"] == expected or mount["name"] != "bundles"
                assert mount.get("readOnly") or is_copying, f"{path}: {mount}"
    init, _ = containers_of(COMPONENTS / "bundles-image" / "deployment.yaml")
    assert init["command"] == ["cp", "-r", "/bundles/.", "/served/"]


def test_the_init_container_copies_bundles_that_can_be_served(tmp_path: Path) -> None:
    source, target = tmp_path / "bundles", tmp_path / "served" / "bundles"
    shutil.copytree(Path("bundles", MODEL), source / MODEL)
    target.mkdir(parents=True)
    init, _ = containers_of(COMPONENTS / "bundles-image" / "deployment.yaml")
    folders = {"/bundles/.": f"{source}/.", "/served/": f"{target}/"}
    subprocess.run([folders.get(word, word) for word in init["command"]], check=True)
    (copied,) = find_bundles(target).items()
    check_files(*copied)


def test_the_file_of_keys_is_in_the_mounted_secret() -> None:
    keys = settings_of(generated_variables(COMPONENTS / "keys" / "kustomization.yaml")).keys
    (container,) = containers_of(COMPONENTS / "keys" / "deployment.yaml")
    (mount,) = container["volumeMounts"]
    assert keys is not None and str(keys.parent) == mount["mountPath"]
    page = PAGE.read_text(encoding="utf-8")
    (volume,) = read(COMPONENTS / "keys" / "deployment.yaml")["spec"]["template"]["spec"]["volumes"]
    assert f"create secret generic {volume['secret']['secretName']} --from-file={keys.name}" in page


def check_memory(resources: Mapping[str, Any]) -> None:
    """Check that a memory limit is enough for the shipped bundles, by the formula of tune.md."""
    limits = resources["limits"]
    assert resources["requests"] == limits
    limit = float(limits["memory"].removesuffix("Gi")) * GIB
    num_workers = int(limits["cpu"])
    manifests = find_bundles(Path("bundles")).values()
    worker = PROCESS_BYTES + sum(one.loaded_bytes for one in manifests)
    state = MAX_ROWS * sum(map(row_bytes, manifests))
    eighth = min(limit / 8, GIB)  # of the prefix cache, and of the responses
    assert num_workers * worker - (num_workers - 1) * SHARED_BYTES + state + 2 * eighth < limit


def test_the_memory_limit_is_enough_for_the_shipped_bundles() -> None:
    for container in (CONTAINER, KSERVE_CONTAINER):
        check_memory(container["resources"])


def shown_patch() -> dict[str, Any]:
    """Return the changes of the Deployment that the page shows."""
    (shown,) = [one.code for one in read_blocks(PAGE) if one.language == "yaml"]
    patch: dict[str, Any] = yaml.safe_load(shown)
    return patch


def shown_resources() -> dict[str, Any]:
    """Return the requests and limits that the changes on the page set."""
    (patch,) = shown_patch()["patches"]
    return {one["path"].rsplit("/", 1)[1]: one["value"] for one in yaml.safe_load(patch["patch"])}


def test_the_memory_limit_that_the_page_shows_is_enough_for_the_shipped_bundles() -> None:
    assert CONTAINER["resources"].keys() == shown_resources().keys()
    check_memory(shown_resources())


def test_autoscalers_count_waiting_and_running_sequences() -> None:
    (rule,) = read(COMPONENTS / "hpa" / "adapter-rules.yaml")["rules"]["custom"]
    (trigger,) = SCALED_OBJECT["triggers"]
    both = {"sightline_num_requests_running", "sightline_num_requests_waiting"}
    assert both <= {metric.name for metric in Metrics("0").registry.collect()}
    assert set(metrics_in(rule["metricsQuery"])) == both
    assert set(metrics_in(trigger["metadata"]["query"])) == both
    assert set(metrics_in(rule["seriesQuery"])) < both
    (metric,) = AUTOSCALER["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]


def test_the_query_of_keda_selects_the_pods_of_the_example() -> None:
    (trigger,) = SCALED_OBJECT["triggers"]
    selected = set(re.findall(r"\{(.*?)\}", trigger["metadata"]["query"]))
    namespace = read(EXAMPLE / "kustomization.yaml")["namespace"]
    job = MONITORED_SERVICE["metadata"]["labels"][MONITOR["jobLabel"]]
    assert selected == {f'namespace="{namespace}",job="{job}"'}
    assert f'up{{job="{job}"}}' in (COMPONENTS / "monitoring" / "alerts.yaml").read_text(encoding="utf-8")


def test_both_autoscalers_have_the_same_limits() -> None:
    (trigger,) = SCALED_OBJECT["triggers"]
    (metric,) = AUTOSCALER["metrics"]
    assert trigger["metadata"]["threshold"] == metric["pods"]["target"]["averageValue"]
    assert trigger["metricType"] == metric["pods"]["target"]["type"]
    assert SCALED_OBJECT["minReplicaCount"] == AUTOSCALER["minReplicas"] == DEPLOYMENT["spec"]["replicas"]
    assert SCALED_OBJECT["maxReplicaCount"] == AUTOSCALER["maxReplicas"]
    behavior = SCALED_OBJECT["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == AUTOSCALER["behavior"] and errors(behavior, BEHAVIOR) == []


def test_selectors_find_the_pods() -> None:
    assert DEPLOYMENT["spec"]["template"]["metadata"]["labels"] == LABELS
    (spread,) = POD["topologySpreadConstraints"]
    selectors = [
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        read(BASE / "service.yaml")["spec"]["selector"],
        read(BASE / "disruption-budget.yaml")["spec"]["selector"]["matchLabels"],
        read(BASE / "network-policy.yaml")["spec"]["podSelector"]["matchLabels"],
        spread["labelSelector"]["matchLabels"],
        MONITORED_SERVICE["spec"]["selector"],
    ]
    assert all(one == LABELS for one in selectors)
    name = DEPLOYMENT["metadata"]["name"]
    assert AUTOSCALER["scaleTargetRef"]["name"] == SCALED_OBJECT["scaleTargetRef"]["name"] == name


def test_prometheus_finds_each_pod_once() -> None:
    labels = MONITOR["selector"]["matchLabels"].items()
    assert labels <= MONITORED_SERVICE["metadata"]["labels"].items()
    assert not labels <= read(BASE / "service.yaml")["metadata"]["labels"].items()


def test_kserve_runs_the_container_of_the_deployment() -> None:
    for name in ("resources", "volumeMounts"):
        assert KSERVE_CONTAINER[name] == CONTAINER[name]
    for probe in PROBES:
        port = KSERVE_CONTAINER[probe]["httpGet"]["port"]
        assert KSERVE_CONTAINER[probe] == {**CONTAINER[probe], "httpGet": {**CONTAINER[probe]["httpGet"], "port": port}}
    assert RUNTIME["spec"]["volumes"] == POD["volumes"]
    assert PREDICTOR["terminationGracePeriodSeconds"] == POD["terminationGracePeriodSeconds"]


def test_kserve_serves_a_bundle_by_the_open_inference_protocol() -> None:
    model = PREDICTOR["model"]
    assert INFERENCE_SERVICE["metadata"]["name"] == MODEL == model["storageUri"].rpartition("/")[2]
    assert MODEL in {one.name for one in find_bundles(Path("bundles")).values()}
    (model_format,) = RUNTIME["spec"]["supportedModelFormats"]
    assert model["modelFormat"].items() <= model_format.items()
    assert model["modelFormat"]["version"] == str(SCHEMA_VERSION)
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert [model["protocolVersion"]] == RUNTIME["spec"]["protocolVersions"] == [open_inference.PREFIX.strip("/")]
    assert "open-inference" in settings_of(KSERVE_VARIABLES).api_names


@pytest.mark.parametrize("kustomization", KUSTOMIZATIONS, ids=lambda path: path.parent.name)
def test_a_kustomization_lists_all_files_of_its_folder(kustomization: Path) -> None:
    content = read(kustomization)
    listed = [one for one in content.get("resources", ()) if not one.startswith("../")]
    listed += [one["path"] for one in content.get("patches", ()) if "path" in one]
    present = {path.name for path in kustomization.parent.glob("*.yaml")}
    assert {kustomization.name, *listed} == present - {"adapter-rules.yaml"}


def test_custom_resources_are_valid() -> None:
    found = {kind_of(resource): errors(resource, SCHEMAS[kind_of(resource)]) for _, resource in custom_resources()}
    assert found == {kind: [] for kind in SCHEMAS}


def test_a_wrong_custom_resource_is_found() -> None:
    for _, resource in custom_resources():
        schema = SCHEMAS[kind_of(resource)]
        wrong = deepcopy(resource)
        name, value = wrong["spec"].popitem()
        wrong["spec"][f"{name}s"] = value
        assert errors(wrong, schema)


OVERLAYS = {  # components by the name of the overlay that the tests render
    "base": (),
    "autoscaler of Kubernetes": ("monitoring", "hpa"),
    "KEDA": ("monitoring", "keda"),
    "keys without monitoring": ("keys",),
    "keys and quotas": ("monitoring", "keys", "quotas"),
    "volume": ("bundles-volume",),
    "image": ("bundles-image",),
    "everything": ("monitoring", "keda", "keys", "quotas", "bundles-image"),
}


def render(folder: Path) -> list[Resource]:
    """Return the resources of a folder as kubectl would send them to a cluster."""
    if shutil.which("kubectl") is None:
        pytest.fail("kubectl is missing; install version 1.21 or later (https://kubernetes.io/docs/tasks/tools/).")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def render_overlay(folder: Path, components: Sequence[str], **more: Any) -> dict[str, Resource]:
    """Return the resources of the base with components and more fields of a kustomization, by kind
    and name.
    """
    overlay = folder / "overlay"
    shutil.copytree(MANIFESTS, folder, dirs_exist_ok=True)
    overlay.mkdir()
    content = {"resources": ["../base"], "components": [f"../components/{one}" for one in components], **more}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return {f"{one['kind']} {one['metadata']['name']}": one for one in render(overlay)}


def validate(resource: Resource) -> None:
    """Check a resource by the schemas of Kubernetes, or as a custom resource."""
    import kubernetes_validate  # of the extra `kubernetes`

    if kind_of(resource) in SCHEMAS:
        assert errors(resource, SCHEMAS[kind_of(resource)]) == []
        if not resource["apiVersion"].startswith("serving.kserve.io"):
            return
        resource = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod_spec(resource)}
    for version in (kubernetes_validate.latest_version(), "1.30"):
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.kubernetes
@pytest.mark.parametrize("components", OVERLAYS.values(), ids=OVERLAYS)
def test_what_kubectl_renders_is_valid(tmp_path: Path, components: Sequence[str]) -> None:
    resources = render_overlay(tmp_path, components)
    for resource in resources.values():
        validate(resource)
    deployment = resources["Deployment sightline"]
    assert ("replicas" in deployment["spec"]) is not bool({"hpa", "keda"} & {*components})
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # Patches add to the lists of the base, and take nothing from them.
    names = {"monitoring": [], "hpa": [], "keda": [], "quotas": [], "keys": ["keys"]}
    added = sorted(name for one in components for name in names.get(one, ["bundles"]))
    for part in (container["volumeMounts"], pod["volumes"]):
        assert sorted(one["name"] for one in part) == sorted(["tmp", *added])
    assert container["ports"] == CONTAINER["ports"]
    (settings,) = [one for name, one in resources.items() if name.startswith("ConfigMap")]
    assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    expected = dict(BASE_VARIABLES)
    for one in components:
        expected |= generated_variables(COMPONENTS / one / "kustomization.yaml")
    assert image_variables() | settings["data"] == expected
    if "monitoring" in components:
        (endpoint,) = resources["ServiceMonitor sightline"]["spec"]["endpoints"]
        assert ("authorization" in endpoint) is ("keys" in components)
    policy = resources["NetworkPolicy sightline"]["spec"]
    assert len(policy["ingress"]) == 2 and ("egress" in policy) is ("quotas" in components)


@pytest.mark.kubernetes
def test_the_changes_that_the_page_shows_are_applied(tmp_path: Path) -> None:
    image = {"name": "sightline-bundles", "newName": "registry.example/models", "newTag": "3"}
    resources = render_overlay(tmp_path, ["bundles-image"], images=[image], **shown_patch())
    pod = resources["Deployment sightline"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == shown_resources()
    assert pod["initContainers"][0]["image"] == "registry.example/models:3"


@pytest.mark.kubernetes
@pytest.mark.parametrize("folder", [EXAMPLE, KSERVE], ids=lambda path: path.name)
def test_what_kubectl_renders_of_a_folder_is_valid(folder: Path) -> None:
    resources = render(folder)
    for resource in resources:
        validate(resource)
    assert {one["metadata"]["namespace"] for one in resources} == {"sightline"}


@pytest.mark.kubernetes
def test_a_wrong_or_unknown_resource_is_not_valid() -> None:
    """A kind without a schema must fail: the validator's command only warns of it."""
    import kubernetes_validate

    wrong = deepcopy(DEPLOYMENT)
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(wrong)
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        validate({**DEPLOYMENT, "kind": "Deployments"})
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        validate({**SCALED_OBJECT, "apiVersion": "keda.sh/v2", "kind": "ScaledObject"})
    wrong = deepcopy(RUNTIME)
    wrong["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(wrong)


# Starts the service as the user of the image in namespaces of its own, where all ports are free.
# Nothing is writable but /tmp and the devices. The process keeps one capability, to read the Python
# and the checkout of this machine, which may belong to another user.
SANDBOX = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /srv
mkdir /srv/app /srv/python
mount --bind "$1" /srv/app
mount --bind "$2" /srv/python
if [ -n "$3" ]; then
    mount -t tmpfs tmpfs /mnt
    mkdir /mnt/models
    mount --bind "$3" /mnt/models
    mount -o remount,bind,ro /mnt
fi
cd /srv/app
mount -t tmpfs -o size=16m,mode=1777 tmpfs /tmp
for folder in / /srv /srv/app /srv/python; do mount -o remount,bind,ro $folder; done
ip link set lo up
kept=-all,+dac_read_search
exec setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set $kept --inh-caps $kept \
  --ambient-caps $kept /srv/python/bin/python -m sightline serve
"""
# Prints the status and the body of a request.
REQUEST = """
import sys, urllib.error, urllib.request as r
url, body = sys.argv[1:]
request = r.Request(url, body.encode() or None, {"Content-Type": "application/json"} if body else {})
try:
    response = r.urlopen(request, timeout=30)
except urllib.error.HTTPError as error:
    response = error
except OSError:
    sys.exit("no connection")
print(response.status, response.read().decode())
"""
START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Pod:
    """The service, which runs with the settings and the rights of a container."""

    process: subprocess.Popen[str]
    container: dict[str, Any]

    def request(self, port: int, path: str, body: Any = None) -> tuple[int, str]:
        """Return the status and the body of a response; the status is 0 if there is none."""
        text = "" if body is None else json.dumps(body)
        done = self.enter("--net", sys.executable, "-c", REQUEST, f"http://127.0.0.1:{port}{path}", text)
        if done.returncode != 0:
            return 0, done.stderr
        status, _, content = done.stdout.partition(" ")
        return int(status), content

    def enter(self, *command: str) -> subprocess.CompletedProcess[str]:
        command = ("nsenter", "--target", str(self.process.pid), *command)
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def probe(self, name: str) -> int:
        """Return the status that a probe gets."""
        check = self.container[name]["httpGet"]
        ports = {one["name"]: one["containerPort"] for one in self.container["ports"]}
        return self.request(ports.get(check["port"], check["port"]), check["path"])[0]

    def status(self) -> dict[str, str]:
        """Return the fields of the process in /proc."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return dict(line.split(":\t", 1) for line in text.splitlines())


@contextlib.contextmanager
def running(container: dict[str, Any], values: Mapping[str, str], model: Path | None = None) -> Iterator[Pod]:
    """Start the service as a container, wait for its probes, and end it."""
    for program in ("unshare", "nsenter", "setpriv", "ip"):
        if shutil.which(program) is None:
            pytest.fail(f"{program} is missing; install Debian's packages util-linux and iproute2.")
    arguments = [str(Path().resolve()), sys.prefix, str(model.resolve()) if model else ""]
    command = ["unshare", "--mount", "--net", "sh", "-c", SANDBOX, "sh", *arguments]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "ORT_DISABLE_TELEMETRY": "1", **values}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    pod = Pod(process, container)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while pod.probe("readinessProbe") != 200:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                pytest.fail(f"The service did not start; this test needs root.\n{process.communicate()[0]}")
            time.sleep(0.2)
        yield pod
    finally:
        process.kill()
        process.communicate()


def check_rights(pod: Pod) -> None:
    status = pod.status()
    assert status["Uid"].split() == status["Gid"].split() == ["10001"] * 4 and status["Groups"].strip() == ""
    assert status["NoNewPrivs"] == "1"
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 1 << 2  # CAP_DAC_READ_SEARCH
    for folder in ("/srv/app", "/srv/app/bundles", "/srv/python", "/", "/root"):
        assert "Read-only file system" in pod.enter("--mount", "touch", f"{folder}/written").stderr
    assert pod.enter("--mount", "touch", "/tmp/written").returncode == 0


def check_stop(pod: Pod, settings: Settings, grace_s: float) -> None:
    """Check that the pod serves in its drain window and then ends."""
    started = time.monotonic()
    pod.process.send_signal(signal.SIGTERM)
    wait_until(lambda: pod.request(settings.port, "/health/ready")[0] == 503)
    assert pod.request(settings.port, "/v1/models")[0] == 200
    output, _ = pod.process.communicate(timeout=grace_s)
    assert pod.process.returncode == 0, output
    assert time.monotonic() - started < settings.drain_s + 5  # nothing was running
    lines = [json.loads(line) for line in output.splitlines()]
    assert not [one for one in lines if one["level"] in ("warning", "error")]


@pytest.mark.kubernetes
def test_the_service_runs_as_the_container_of_the_deployment() -> None:
    settings = settings_of(BASE_VARIABLES)
    assert settings.admin_port is not None
    models = {"SIGHTLINE_BUNDLES": "bundles", "SIGHTLINE_DEFAULT_MODEL": MODEL}
    with running(CONTAINER, BASE_VARIABLES | models) as pod:
        assert [pod.probe(name) for name in PROBES] == [200] * 3
        check_rights(pod)
        status, body = pod.request(settings.port, "/v1/generate", {"inputs": "A dog runs on the beach."})
        assert status == 200 and "Hund" in body
        status, metrics = pod.request(settings.admin_port, MONITOR["endpoints"][0]["path"])
        assert status == 200
        (trigger,) = SCALED_OBJECT["triggers"]
        for name in metrics_in(trigger["metadata"]["query"]):
            assert f'\n{name}{{model_name="{MODEL}"}} 0.0\n' in metrics
        assert pod.request(settings.port, "/metrics")[0] == 404
        check_stop(pod, settings, POD["terminationGracePeriodSeconds"])


@pytest.mark.kubernetes
def test_the_service_runs_as_the_container_of_kserve() -> None:
    """The bundle is mounted as KServe mounts it, and a client uses the protocol of the runtime."""
    settings = settings_of(KSERVE_VARIABLES)
    body = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["A dog runs."]}]}
    with running(KSERVE_CONTAINER, KSERVE_VARIABLES, Path("bundles", MODEL)) as pod:
        assert [pod.probe(name) for name in PROBES] == [200] * 3
        check_rights(pod)
        name = INFERENCE_SERVICE["metadata"]["name"]
        for path in ("/v2/health/live", "/v2/health/ready", f"/v2/models/{name}", f"/v2/models/{name}/ready"):
            assert pod.request(settings.port, path)[0] == 200
        status, response = pod.request(settings.port, f"/v2/models/{name}/infer", body)
        assert status == 200 and "Hund" in response
        check_stop(pod, settings, PREDICTOR["terminationGracePeriodSeconds"])
