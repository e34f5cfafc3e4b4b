"""Schemas of the custom resources in `deploy/kubernetes`: the documented fields that the manifests
use, and no others.

Run as `python -m tests.deployment.custom_resources FOLDER` to check the manifests by the complete
definitions (`CustomResourceDefinition`) of KEDA, KServe and the Prometheus Operator, which FOLDER
has as YAML files.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import yaml  # type: ignore[import-untyped]

MANIFESTS = Path("deploy/kubernetes")

Resource = dict[str, Any]
Schema = dict[str, Any]
Kind = tuple[str, str]  # apiVersion and kind


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Return the schema of an object with these fields only."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


ANY: Schema = {}  # checked as a part of a pod
TEXT: Schema = {"type": "string", "minLength": 1}
NAME: Schema = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
NUMBER: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
DURATION: Schema = {"type": "string", "pattern": r"^\d+(ms|s|m|h|d)$"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
METADATA = record({"name": NAME}, {"namespace": NAME, "labels": TEXTS, "annotations": TEXTS})

# Fields of the autoscaler's behavior are those of autoscaling/v2.
POLICIES = array(record({"type": {"enum": ["Pods", "Percent"]}, "value": NUMBER, "periodSeconds": NUMBER}))
SCALING_RULES = record({"policies": POLICIES}, {"stabilizationWindowSeconds": NUMBER})
BEHAVIOR = record({}, {"scaleUp": SCALING_RULES, "scaleDown": SCALING_RULES})

SPECS: Mapping[Kind, Schema] = {
    ("keda.sh/v1alpha1", "ScaledObject"): record(
        {
            "scaleTargetRef": record({"name": NAME}),
            "triggers": array(
                record(
                    {
                        "type": {"const": "prometheus"},
                        "metadata": record({"serverAddress": TEXT, "query": TEXT, "threshold": TEXT}),
                    },
                    {"metricType": {"enum": ["Value", "AverageValue"]}},
                )
            ),
        },
        {
            "minReplicaCount": NUMBER,
            "maxReplicaCount": NUMBER,
            "pollingInterval": NUMBER,
            "fallback": record(
                {"failureThreshold": NUMBER, "replicas": NUMBER},
                {"behavior": {"enum": ["static", "currentReplicas", "currentReplicasIfHigher"]}},
            ),
            "advanced": record({"horizontalPodAutoscalerConfig": record({"behavior": BEHAVIOR})}),
        },
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): record(
        {
            "selector": record({"matchLabels": TEXTS}),
            "endpoints": array(
                record(
                    {"port": NAME, "path": TEXT, "interval": DURATION},
                    {"authorization": record({"credentials": record({"name": NAME, "key": TEXT})})},
                )
            ),
        },
        {"jobLabel": TEXT},
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): record(
        {
            "groups": array(
                record(
                    {
                        "name": NAME,
                        "rules": array(
                            record(
                                {"alert": TEXT, "expr": TEXT, "for": DURATION}, {"labels": TEXTS, "annotations": TEXTS}
                            )
                        ),
                    }
                )
            )
        }
    ),
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): record(
        {
            "containers": array(ANY),
            "supportedModelFormats": array(
                record({"name": TEXT}, {"version": TEXT, "autoSelect": FLAG, "priority": NUMBER})
            ),
        },
        {"annotations": TEXTS, "protocolVersions": array({"enum": ["v1", "v2", "grpc-v2"]}), "volumes": array(ANY)},
    ),
    ("serving.kserve.io/v1beta1", "InferenceService"): record(
        {
            "predictor": record(
                {
                    "model": record(
                        {"modelFormat": record({"name": TEXT}, {"version": TEXT}), "storageUri": TEXT},
                        {"protocolVersion": {"enum": ["v1", "v2", "grpc-v2"]}, "runtime": NAME},
                    )
                },
                {
                    "minReplicas": NUMBER,
                    "maxReplicas": NUMBER,
                    "automountServiceAccountToken": ANY,
                    "enableServiceLinks": ANY,
                    "terminationGracePeriodSeconds": ANY,
                    "securityContext": ANY,
                },
            )
        }
    ),
}
SCHEMAS: Mapping[Kind, Schema] = {
    (version, kind): record(
        {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": METADATA, "spec": spec}
    )
    for (version, kind), spec in SPECS.items()
}


def kind_of(resource: Resource) -> Kind:
    return resource["apiVersion"], resource["kind"]


def errors(resource: Resource, schema: Schema) -> list[str]:
    """Return the violations of a schema, each with its place in the resource."""
    found = jsonschema_rs.validator_for(schema).iter_errors(resource)
    return [f"{'.'.join(map(str, one.instance_path))}: {one.message}" for one in found]


def pod_spec(resource: Resource) -> dict[str, Any]:
    """Return the parts of a resource of KServe that become a part of a pod."""
    spec = resource["spec"]
    if resource["kind"] == "ServingRuntime":
        return {"containers": spec["containers"], "volumes": spec["volumes"]}
    own = {"model", "minReplicas", "maxReplicas"}
    of_pod = {name: value for name, value in spec["predictor"].items() if name not in own}
    return {"containers": [{"name": "kserve-container"}], **of_pod}


def custom_resources() -> Iterator[tuple[Path, Resource]]:
    """Yield the files and the custom resources in them."""
    for path in sorted(MANIFESTS.rglob("*.yaml")):
        resource = yaml.safe_load(path.read_text(encoding="utf-8"))
        group = resource.get("apiVersion", "").partition("/")[0]
        if "." in group and not group.endswith(".k8s.io"):  # the groups of Kubernetes
            yield path, resource


def closed(schema: Any) -> Any:
    """Return a schema that rejects all fields which it does not describe."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and not is_open:
        inner["additionalProperties"] = False
    return inner


def read_definitions(folder: Path) -> dict[Kind, Schema]:
    """Return the schemas of the definitions in a folder, by version and kind."""
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        for one in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if one and one.get("kind") == "CustomResourceDefinition":
                for version in one["spec"]["versions"]:
                    schema = closed(version["schema"]["openAPIV3Schema"])
                    schema["properties"]["metadata"] = METADATA
                    kind = (f"{one['spec']['group']}/{version['name']}", one["spec"]["names"]["kind"])
                    found[kind] = schema
    return found


def main(folder: Path) -> int:
    """Check all custom resources by the definitions in a folder, and return the exit status."""
    definitions = read_definitions(folder)
    num_failed = 0
    for path, resource in custom_resources():
        version, kind = kind_of(resource)
        if (version, kind) not in definitions:
            found = [f"{folder} has no definition of {kind} ({version})"]
        else:
            found = errors(resource, definitions[version, kind])
        num_failed += bool(found)
        print(f"{path}: {'; '.join(found) or 'valid'}")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
