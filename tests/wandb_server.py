"""A stand-in for the wandb server on 127.0.0.1: answers the requests of wandb 0.31 and stores the data.

It implements the protocol (GraphQL, file_stream, uploads) and stores runs, artifacts, views and sweeps. It checks no
API key and shows no page. It refuses unknown requests, history with a gap and artifacts without their files, and
records each refusal in `faults`. A test without faults has sent only requests that this server implements.
"""

import base64
import itertools
import json
import os
import re
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self, cast
from urllib.parse import quote, unquote

import yaml

ENTITY = "somebody"  # whom the API key belongs to

HISTORY, EVENTS, SUMMARY = "wandb-history.jsonl", "wandb-events.jsonl", "wandb-summary.json"


@dataclass
class Run:
    """One run, with the data received so far."""

    id: str
    entity: str
    project: str
    config: dict[str, Any] = field(default_factory=dict)  # as sent: {key: {"value": …}}, and wandb's own "_wandb"
    display_name: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    sweep: str | None = None
    lines: dict[str, list[str]] = field(default_factory=dict)  # received by file_stream, by file
    exit_code: int | None = None  # None: still running
    preempting: bool = False
    files: dict[str, bytes] = field(default_factory=dict)  # uploaded, by name
    artifacts: list["Artifact"] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)  # title, text, severity, …

    @property
    def history(self) -> list[dict[str, Any]]:
        """Its rows in order; NaN and infinity are floats again."""
        return [json.loads(line) for line in self.lines.get(HISTORY, [])]

    @property
    def summary(self) -> dict[str, Any]:
        lines = self.lines.get(SUMMARY, [])
        return cast("dict[str, Any]", json.loads(lines[-1])) if lines else {}

    @property
    def storage_id(self) -> str:
        return _opaque("Run", self.id, self.project, self.entity)


@dataclass
class Artifact:
    """One version of an artifact."""

    id: str
    name: str
    type: str
    version: int
    digest: str
    metadata: str | None  # JSON
    aliases: list[str]
    state: Literal["PENDING", "COMMITTED"] = "PENDING"
    manifest: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)  # uploaded, by name


@dataclass
class View:
    """A saved view of a project, such as a workspace."""

    id: str
    entity: str
    project: str
    name: str  # internal, `nw-…-v`
    display_name: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    saves: int = 0


@dataclass
class Sweep:
    """A sweep over a grid, and its runs."""

    id: str
    entity: str
    project: str
    config: dict[str, Any]
    trials: list[dict[str, Any]] = field(
        default_factory=list
    )  # parameters of the trials that no agent has received yet
    runs: list[str] = field(default_factory=list)  # ids of the trials that an agent has received


class NotFoundError(Exception):
    """An error that a real server answers with 404. It is not recorded as a fault."""


class WandbServer:
    """Listens from its construction. `with` closes it, even if requests still wait."""

    behaviour: Literal["ok", "refuse", "error", "hang"] = "ok"

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.views: list[View] = []
        self.sweeps: dict[str, Sweep] = {}
        self.artifacts: dict[str, Artifact] = {}
        self.projects: set[tuple[str, str]] = set()  # (entity, project); a run or a sweep makes its own
        self.requests: list[str] = []  # every request in order: a GraphQL operation's name, "file_stream" or "upload"
        self.faults: list[str] = []
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._http = _Http(("127.0.0.1", 0), _Request)
        self._http.wandb = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Close the socket and every connection. The server cannot be started again."""
        self.over.set()
        self._http.shutdown()
        self._http.server_close()
        self._http.cut()

    def environment(self, directory: Path) -> dict[str, str]:
        """Variables with which wandb uses this server, and not the user's settings, keys and caches."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": "0123456789" * 4,
            "WANDB_CONFIG_DIR": str(directory / "wandb-config"),
            "WANDB_CACHE_DIR": str(directory / "wandb-cache"),
            "WANDB_DATA_DIR": str(directory / "wandb-data"),
            "NETRC": str(directory / "netrc"),
            "WANDB_ERROR_REPORTING": "false",
        }

    def answer(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL operation."""
        if name not in _ANSWERS:
            raise ValueError(f"no such operation here: {name}")
        with self._lock:
            return _ANSWERS[name](self, variables)

    # --- runs

    def _viewer(self, _: dict[str, Any]) -> dict[str, Any]:
        viewer = {"id": "viewer", "entity": ENTITY, "username": ENTITY, "email": "", "flags": "{}", "admin": False}
        return {"viewer": {**viewer, "teams": {"edges": []}}}

    def _features(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def _organization(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"entity": {"organization": None}}

    def _resume_status(self, v: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(v["name"])
        if run is None:
            return {"model": None}
        own = {key: run.lines.get(key, []) for key in (HISTORY, EVENTS)}
        bucket = {
            **self._bucket(run),
            "summaryMetrics": json.dumps(run.summary),
            "logLineCount": len(run.lines.get("output.log", [])),
            "eventsLineCount": len(own[EVENTS]),
            "historyTail": json.dumps(own[HISTORY][-1:]),
            "eventsTail": json.dumps(own[EVENTS][-1:]),
            "tags": run.tags,
            "notes": None,
            # Empty for a run that a sweep has created and no process has started: wandb treats it as new.
            "wandbConfig": json.dumps(run.config.get("_wandb", {}).get("value", {})),
        }
        return {"model": {"id": "project", "name": run.project, "entity": _named(run.entity), "bucket": bucket}}

    def _upsert_bucket(self, v: dict[str, Any]) -> dict[str, Any]:
        inserted = v["name"] not in self.runs
        if inserted:
            self.runs[v["name"]] = Run(v["name"], v["entity"] or ENTITY, v["project"] or "uncategorized")
        run = self.runs[v["name"]]
        self.projects.add((run.entity, run.project))
        if v["config"] is not None:
            run.config = json.loads(v["config"])
        # A value of null does not change the stored one.
        sent = {"display_name": v["displayName"], "group": v["groupName"], "job_type": v["jobType"], "tags": v["tags"]}
        for key, value in {**sent, "notes": v["notes"], "sweep": v["sweep"]}.items():
            if value is not None:
                setattr(run, key, value)
        return {"upsertBucket": {"bucket": self._bucket(run), "inserted": inserted}}

    def _bucket(self, run: Run) -> dict[str, Any]:
        return {
            "id": run.storage_id,
            "name": run.id,
            "displayName": run.display_name or run.id,
            "description": None,
            "config": json.dumps(run.config),
            "sweepName": run.sweep,
            "project": {"id": "project", "name": run.project, "entity": _named(run.entity)},
            "historyLineCount": len(run.lines.get(HISTORY, [])),
        }

    def _create_run_files(self, v: dict[str, Any]) -> dict[str, Any]:
        run = self.runs[v["run"]]
        files = [{"name": name, "uploadUrl": self._upload_url("run", run.id, name)} for name in v["files"]]
        return {"createRunFiles": {"runID": run.storage_id, "uploadHeaders": [], "files": files}}

    def _alert(self, v: dict[str, Any]) -> dict[str, Any]:
        self.runs[v["runName"]].alerts.append({key: v[key] for key in ("title", "text", "severity", "waitDuration")})
        return {"notifyScriptableRunAlert": {"success": True}}

    def stream(self, run_id: str, body: dict[str, Any]) -> dict[str, Any]:
        """Store the lines of one file_stream request. Raises `ValueError` for history with a gap."""
        with self._lock:
            run = self.runs[run_id]
            for name, chunk in body.get("files", {}).items():
                lines, offset, content = run.lines.setdefault(name, []), chunk["offset"], chunk["content"]
                if name == HISTORY:
                    again = lines[offset : offset + len(content)]  # sent a second time, because the answer was lost
                    same = all(_row(old) == _row(new) for old, new in zip(again, content, strict=False))
                    if offset > len(lines) or not same:
                        raise ValueError(f"{run_id}: history at line {offset} does not follow on {len(lines)} lines")
                lines[offset : offset + len(content)] = content
            run.preempting = body.get("preempting", run.preempting)
            run.exit_code = body["exitcode"] if body.get("complete") else None
        return {"exitcode": None, "limits": {}}

    # --- uploads

    def _upload_url(self, kind: str, owner: str, name: str) -> str:
        return f"{self.url}/upload/{kind}/{quote(owner, safe='')}/{quote(name, safe='')}"

    def upload(self, kind: str, owner: str, name: str, content: bytes) -> None:
        """Keep a file of a run, or of an artifact."""
        with self._lock:
            if kind == "run":
                self.runs[owner].files[name] = content
            elif kind == "manifest":
                self.artifacts[owner].manifest = json.loads(content)
            else:
                self.artifacts[owner].files[name] = content

    # --- artifacts

    def _artifact_type(self, v: dict[str, Any]) -> dict[str, Any]:
        name = v["name"].partition(":")[0]
        known = [artifact for artifact in self.artifacts.values() if artifact.name == name]
        return {"project": {"artifact": {"artifactType": {"name": known[0].type}} if known else None}}

    def _create_artifact(self, v: dict[str, Any]) -> dict[str, Any]:
        given = v["input"]
        name, others = given["artifactCollectionName"], list(self.artifacts.values())
        before = [artifact for artifact in others if artifact.name == name]
        artifact = Artifact(
            id=_opaque("Artifact", str(len(others))),
            name=name,
            type=given["artifactTypeName"],
            version=len(before),
            digest=given["digest"],
            metadata=given.get("metadata"),
            aliases=[alias["alias"] for alias in given.get("aliases") or []],
        )
        self.artifacts[artifact.id] = artifact
        if given.get("runName"):
            self.runs[given["runName"]].artifacts.append(artifact)
        latest = {"id": before[-1].id} if before else None
        answer = {"id": artifact.id, "state": artifact.state, "artifactSequence": {"latestArtifact": latest}}
        return {"createArtifact": {"artifact": answer}}

    def _create_manifest(self, v: dict[str, Any]) -> dict[str, Any]:
        # wandb sends it twice: first to get an id for the files, then with `includeUpload` to upload them.
        url = self._upload_url("manifest", v["artifactID"], v["name"])
        file = {"id": "file", "uploadUrl": url, "uploadHeaders": []}
        return {"createArtifactManifest": {"artifactManifest": {"id": f"manifest:{v['artifactID']}", "file": file}}}

    def _create_artifact_files(self, v: dict[str, Any]) -> dict[str, Any]:
        nodes = [
            {
                "storagePath": file["name"],
                "uploadUrl": self._upload_url("artifact", file["artifactID"], file["name"]),
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": file["artifactID"]},
            }
            for file in v["input"]["artifactFiles"]
        ]
        return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}

    def _commit_artifact(self, v: dict[str, Any]) -> dict[str, Any]:
        artifact = self.artifacts[v["artifactID"]]
        missing = artifact.manifest.get("contents", {}).keys() - artifact.files.keys()
        if missing or not artifact.manifest:
            raise ValueError(f"{artifact.name}: committed without {sorted(missing) or 'its manifest'}")
        artifact.state = "COMMITTED"
        return {"commitArtifact": {"artifact": {"id": artifact.id, "digest": artifact.digest}}}

    def _artifact_by_id(self, v: dict[str, Any]) -> dict[str, Any]:
        artifact = self.artifacts[v["id"]]
        collection = {"__typename": "ArtifactSequence", "id": f"collection:{artifact.name}", "name": artifact.name}
        [run] = [run for run in self.runs.values() if artifact in run.artifacts]
        project = {"id": "project", "internalId": "project", "name": run.project, "entity": _named(run.entity)}
        aliases = [{"id": alias, "alias": alias, "artifactCollection": None} for alias in artifact.aliases]
        return {
            "artifact": {
                "__typename": "Artifact",
                "id": artifact.id,
                "artifactSequence": {**collection, "project": project},
                "versionIndex": artifact.version,
                "artifactType": {"name": artifact.type},
                "description": None,
                "metadata": artifact.metadata or "{}",
                "ttlDurationSeconds": -2,
                "ttlIsInherited": True,
                "tags": [],
                "historyStep": None,
                "state": artifact.state,
                "size": sum(map(len, artifact.files.values())),
                "digest": artifact.digest,
                "commitHash": None,
                "fileCount": len(artifact.files),
                "createdAt": "2000-01-01T00:00:00Z",
                "updatedAt": None,
                "aliases": aliases,
            }
        }

    # --- views

    def _upsert_view(self, v: dict[str, Any]) -> dict[str, Any]:
        where = (v["entityName"], v["projectName"])
        if where not in self.projects:
            raise NotFoundError(f"project {'/'.join(where)} not found")
        by_id = [view for view in self.views if view.id == v.get("id")]
        if v.get("id") and not by_id:
            raise NotFoundError(f"view {v['id']} not found")
        known = by_id or self._views_of(*where, v["name"])
        if not known:
            self.views.append(View(_opaque("View", str(len(self.views))), *where, v["name"]))
        view = known[0] if known else self.views[-1]
        view.display_name, view.spec, view.saves = v["displayName"], json.loads(v["spec"]), view.saves + 1
        return {"upsertView": {"view": {"id": view.id, "name": view.name}, "inserted": not known}}

    def _views_of(self, entity: str, project: str, name: str) -> list[View]:
        return [view for view in self.views if (view.entity, view.project, view.name) == (entity, project, name)]

    def _view(self, v: dict[str, Any]) -> dict[str, Any]:
        where = (v["entityName"], v["projectName"])
        if where not in self.projects:
            return {"project": None}
        found = self._views_of(*where, v["viewName"])
        nodes = [{"id": view.id, "displayName": view.display_name, "spec": json.dumps(view.spec)} for view in found]
        return {"project": {"allViews": {"edges": [{"node": node} for node in nodes]}}}

    # --- sweeps

    def _upsert_sweep(self, v: dict[str, Any]) -> dict[str, Any]:
        config = yaml.safe_load(v["config"])
        values = {key: given.get("values", [given.get("value")]) for key, given in config["parameters"].items()}
        sweep = Sweep(
            id=f"sweep{len(self.sweeps)}",
            entity=v["entityName"] or ENTITY,
            project=v["projectName"] or "uncategorized",
            config=config,
            trials=[dict(zip(values, trial, strict=True)) for trial in itertools.product(*values.values())],
        )
        self.sweeps[sweep.id] = sweep
        self.projects.add((sweep.entity, sweep.project))
        project = {"id": "project", "name": sweep.project, "entity": _named(sweep.entity)}
        return {"upsertSweep": {"sweep": {"name": sweep.id, "project": project}, "configValidationWarnings": []}}

    def _sweep_with_runs(self, v: dict[str, Any]) -> dict[str, Any]:
        sweep = self.sweeps[v["sweep"]]
        found = {"id": sweep.id, "name": sweep.id, "state": "RUNNING", "config": yaml.safe_dump(sweep.config)}
        return {"project": {"sweep": {**found, "runs": {"edges": []}}}}

    def _create_agent(self, v: dict[str, Any]) -> dict[str, Any]:
        return {"createAgent": {"agent": {"id": f"agent of {self.sweeps[v['sweep']].id}"}}}

    def _heartbeat(self, v: dict[str, Any]) -> dict[str, Any]:
        """Order the next trial, or the exit of the agent if there is none."""
        sweep = self.sweeps[v["id"].removeprefix("agent of ")]
        commands: list[dict[str, Any]] = []
        if not json.loads(v["runState"]):
            commands = [self._next_trial(sweep)] if sweep.trials else [{"type": "exit"}]
        return {"agentHeartbeat": {"agent": {"id": v["id"]}, "commands": json.dumps(commands)}}

    def _next_trial(self, sweep: Sweep) -> dict[str, Any]:
        """Create the run of the next trial; the order to run it."""
        args = {key: {"value": value} for key, value in sweep.trials.pop(0).items()}
        run_id = f"{sweep.id}-{len(sweep.runs)}"
        self.runs[run_id] = Run(run_id, sweep.entity, sweep.project, config=dict(args), sweep=sweep.id)
        sweep.runs.append(run_id)
        return {"type": "run", "run_id": run_id, "program": sweep.config.get("program"), "args": args}


_ANSWERS: dict[str, Callable[[WandbServer, dict[str, Any]], dict[str, Any]]] = {
    "Viewer": WandbServer._viewer,
    "ServerFeaturesQuery": WandbServer._features,
    "OrganizationCoreWeaveOrganizationID": WandbServer._organization,
    "RunResumeStatus": WandbServer._resume_status,
    "UpsertBucket": WandbServer._upsert_bucket,
    "CreateRunFiles": WandbServer._create_run_files,
    "NotifyScriptableRunAlert": WandbServer._alert,
    "ArtifactType": WandbServer._artifact_type,
    "CreateArtifact": WandbServer._create_artifact,
    "CreateArtifactManifest": WandbServer._create_manifest,
    "CreateArtifactFiles": WandbServer._create_artifact_files,
    "CommitArtifact": WandbServer._commit_artifact,
    "ArtifactByID": WandbServer._artifact_by_id,
    "UpsertView2": WandbServer._upsert_view,
    "View": WandbServer._view,
    "UpsertSweep": WandbServer._upsert_sweep,
    "SweepWithRuns": WandbServer._sweep_with_runs,
    "CreateAgent": WandbServer._create_agent,
    "Heartbeat": WandbServer._heartbeat,
}


def _opaque(*parts: str) -> str:
    """An id such as the real server's: the parts of a GraphQL key in base64."""
    return base64.b64encode(":".join(parts).encode()).decode()


def _row(line: str) -> str:
    """A row of history in a form that can be compared, although keys have any order and NaN differs from NaN."""
    return json.dumps(json.loads(line), sort_keys=True)


def _named(name: str) -> dict[str, Any]:
    return {"id": _opaque("Entity", name), "name": name}


class _Http(ThreadingHTTPServer):
    """Keeps its connections, so that they can be closed while threads wait on them."""

    wandb: WandbServer
    daemon_threads = True
    block_on_close = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def cut(self) -> None:
        for connection in self._open.copy():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it, which closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that died, or a connection that this server closed


class _Request(BaseHTTPRequestHandler):
    """Handles the requests of a connection in turn."""

    protocol_version = "HTTP/1.1"
    server: _Http

    def do_POST(self) -> None:
        body = json.loads(self._body())
        if self.path.endswith("/graphql"):
            [name, *_] = re.findall(r"(?:query|mutation)\s+(\w+)", body["query"]) or [body["query"]]
            self._serve(lambda: {"data": self.server.wandb.answer(name, body.get("variables") or {})}, name)
        elif self.path.endswith("/file_stream"):
            self._serve(lambda: self.server.wandb.stream(unquote(self.path.split("/")[-2]), body), "file_stream")
        else:
            self._serve(self._unknown, self.path)

    def do_PUT(self) -> None:
        body = self._body()
        _, where, *parts = self.path.split("/")
        if where == "upload" and len(parts) == 3:
            kind, owner, name = map(unquote, parts)
            self._serve(lambda: self.server.wandb.upload(kind, owner, name, body), "upload")
        else:
            self._serve(self._unknown, self.path)

    def do_GET(self) -> None:
        self._serve(self._unknown, self.path)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _unknown(self) -> None:
        raise ValueError(f"no such address here: {self.command} {self.path}")

    def _serve(self, answer: Callable[[], Any], request: str) -> None:
        """Send the value of `answer`, or the failure that the server's behaviour simulates."""
        wandb = self.server.wandb
        wandb.requests.append(request)
        if wandb.behaviour == "hang":
            wandb.over.wait()
            self.close_connection = True
        elif wandb.behaviour == "refuse":
            self._send(401, {"errors": [{"message": "permission denied", "path": []}]})
        elif wandb.behaviour == "error":
            self._send(500, {"error": "internal server error"})
        else:
            try:
                self._send(200, answer() or {})
            except NotFoundError as missing:
                self._send(404, {"errors": [{"message": str(missing)}]})
            except Exception as error:
                wandb.faults.append("".join(traceback.format_exception(error)))
                self._send(400, {"errors": [{"message": str(error)}]})  # 400: wandb does not try again

    def _send(self, code: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass  # a line for each request would clutter pytest's output


def minimal_environment(cache: Path) -> dict[str, str]:
    """The environment of a command without settings of the user's shell, launcher or wandb account."""
    kept = ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV", "LANG")
    own = {name: os.environ[name] for name in kept if name in os.environ}
    return {**own, "GPTEXP_CACHE": str(cache), "OMP_WAIT_POLICY": "PASSIVE"}
