"""JSON schemas of what the manifests use, written after the definitions of Kubernetes 1.31 (Job, Pod, NetworkPolicy), JobSet
v1alpha2 and the training operator 1.9 (PyTorchJob). A key that is not here is refused, as the API server would refuse it.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
COUNT: Schema = {"type": "integer", "minimum": 0}
AMOUNT: Schema = {"anyOf": [COUNT, {"type": "string", "pattern": r"^\d+(\.\d+)?([KMGT]i?|m)?$"}]}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}


def thing(*required: str, **properties: Schema) -> Schema:
    """An object with these keys and no other."""
    assert set(required) <= set(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def some(schema: Schema) -> Schema:
    return {"type": "array", "items": schema, "minItems": 1}


_VARIABLE = thing(
    "name",
    name={"type": "string", "pattern": "^[A-Z][A-Z0-9_]*$"},
    value={"type": "string"},
    valueFrom=thing("secretKeyRef", secretKeyRef=thing("name", "key", name=NAME, key=TEXT)),
)
_CONTAINER = thing(
    *("name", "image", "command"),
    name=NAME,
    image=TEXT,
    command=some(TEXT),
    env=some(_VARIABLE),
    ports=some(
        thing("containerPort", name=NAME, containerPort={"type": "integer", "minimum": 1, "maximum": 65535})
    ),
    resources=thing(
        limits={"type": "object", "additionalProperties": AMOUNT},
        requests={"type": "object", "additionalProperties": AMOUNT},
    ),
    securityContext=thing(allowPrivilegeEscalation={"type": "boolean"}),
    volumeMounts=some(thing("name", "mountPath", name=NAME, mountPath={"type": "string", "pattern": "^/"})),
)
_VOLUME = thing(
    "name",
    name=NAME,
    persistentVolumeClaim=thing("claimName", claimName=NAME),
    emptyDir=thing(medium=one_of("Memory"), sizeLimit=AMOUNT),
)
_POD = thing(
    "spec",
    metadata=thing(labels=LABELS),
    spec=thing(
        "containers",
        restartPolicy=one_of("Always", "Never", "OnFailure"),
        terminationGracePeriodSeconds=COUNT,
        containers=some(_CONTAINER),
        volumes=some(_VOLUME),
    ),
)
_POD_FAILURE = thing(
    "action",
    action=one_of("Count", "FailIndex", "FailJob", "Ignore"),
    onExitCodes=thing(
        *("operator", "values"),
        containerName=NAME,
        operator=one_of("In"),
        values=some({"type": "integer", "minimum": 1, "maximum": 255}),
    ),
    onPodConditions=some(thing("type", "status", type=TEXT, status=one_of("True", "False", "Unknown"))),
)
_JOB = thing(
    "template",
    parallelism=COUNT,
    completions=COUNT,
    completionMode=one_of("Indexed", "NonIndexed"),
    backoffLimit=COUNT,
    podFailurePolicy=thing("rules", rules=some(_POD_FAILURE)),
    template=_POD,
)
_JOB_FAILURE = thing(
    *("name", "action"),
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action=one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob"),
    onJobFailureReasons=some(
        one_of("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "PodFailurePolicy")
    ),
    targetReplicatedJobs=some(NAME),
)
_REPLICATED_JOB = thing(
    "name", "template", name=NAME, replicas=COUNT, template=thing("spec", metadata=thing(), spec=_JOB)
)
_REPLICA = thing(
    "template",
    replicas=COUNT,
    restartPolicy=one_of("Always", "OnFailure", "Never", "ExitCode"),
    template=_POD,
)
_PODS = thing("matchLabels", matchLabels=LABELS)


def _document(version: str, kind: str, spec: Schema) -> Schema:
    metadata = thing("name", name=NAME, labels=LABELS)
    fixed = {"apiVersion": {"const": version}, "kind": {"const": kind}}
    return thing("apiVersion", "kind", "metadata", "spec", **fixed, metadata=metadata, spec=spec)


SCHEMAS = {
    "JobSet": _document(
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        thing(
            "replicatedJobs",
            network=thing(enableDNSHostnames={"type": "boolean"}, subdomain=NAME),
            successPolicy=thing("operator", operator=one_of("All", "Any"), targetReplicatedJobs=some(NAME)),
            failurePolicy=thing(maxRestarts=COUNT, rules=some(_JOB_FAILURE)),
            replicatedJobs=some(_REPLICATED_JOB),
        ),
    ),
    "PyTorchJob": _document(
        "kubeflow.org/v1",
        "PyTorchJob",
        thing(
            "pytorchReplicaSpecs",
            runPolicy=thing(backoffLimit=COUNT, cleanPodPolicy=one_of("All", "Running", "None")),
            pytorchReplicaSpecs=thing("Master", Master=_REPLICA, Worker=_REPLICA),
        ),
    ),
    "NetworkPolicy": _document(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        thing(
            "podSelector",
            podSelector=_PODS,
            policyTypes=some(one_of("Ingress", "Egress")),
            ingress=some(thing(**{"from": some(thing(podSelector=_PODS))})),
        ),
    ),
}
