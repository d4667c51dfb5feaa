"""The Ray cluster on which the cells of a sweep run: settings, connection, and what its nodes have room for."""

import logging
import math
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from gptexp.config.schema import Config
from gptexp.process.errors import ConfigError, first_line
from gptexp.process.fields import AUTO
from gptexp.process.signals import HANDLED
from gptexp.process.terminal import NOWHERE, output_to
from gptexp.process.words import counted, shown
from gptexp.sweep.launchers import refuse_too_large

KEY = "hydra.launcher.ray"
ADDRESS = "RAY_ADDRESS"  # environment: Ray's own variable for the address of a cluster
CONNECT_S = 5.0  # s: longest wait for an answer at the address of a cluster; Ray itself tries for two minutes
OBJECT_STORE_BYTES = 80_000_000  # of a cluster on this machine, near Ray's minimum of 75 MiB: no object is stored
# Ray reads these when it is imported: send no usage statistics, print no message of the cluster on the terminal, and
# under `uv run` ship no working directory to the nodes.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
# Options of `ray.remote` that are amounts for a rank; a cell that runs on one node asks for them once per rank.
AMOUNTS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}  # option -> Ray's name of the resource
OPTIONS = (*AMOUNTS, "resources", "accelerator_type", "runtime_env", "max_retries")
# What a client of HTTP/2, such as one of gRPC, sends first: the preface and an empty frame of settings (RFC 9113, 3.4).
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
HTTP2_SETTINGS = 4  # type of the frame that a server sends first: the fourth byte


@dataclass(frozen=True)
class Settings:
    """hydra.launcher.ray without null values: the arguments of `ray.init`, and the options of `ray.remote`."""

    init: dict[str, Any] = field(default_factory=dict)
    remote: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, str]:
        """The address of the cluster, "local" for one of this machine, and the setting that it comes from."""
        given, from_environment = self.init.get("address"), os.environ.get(ADDRESS)
        if from_environment and given in (None, "", AUTO):  # Ray too takes it in place of auto
            return from_environment, f"{ADDRESS}={from_environment}"
        return given or "local", f"{KEY}.init.address={given}"


def read_settings(given: Any) -> Settings:
    """Check hydra.launcher.ray. Raises `ConfigError` for what Ray would ignore, replace, or refuse with a traceback."""
    settings = _mapping(KEY, OmegaConf.to_container(given) if OmegaConf.is_config(given) else given)
    init, remote = (_mapping(f"{KEY}.{part}", settings.pop(part, {})) for part in ("init", "remote"))
    if settings:
        raise ConfigError(f"{KEY}.{min(settings)}: unknown; use {KEY}.init or {KEY}.remote")
    init, remote = ({key: value for key, value in part.items() if value is not None} for part in (init, remote))
    if not isinstance(init.get("address", ""), str):
        raise ConfigError(f"{KEY}.init.address={shown(init['address'])}: must be HOST:PORT or auto")
    if unknown := remote.keys() - {*OPTIONS}:
        raise ConfigError(f"{KEY}.remote.{min(unknown)}: cannot be set; the options are {', '.join(OPTIONS)}")
    resources = _mapping(f"{KEY}.remote.resources", remote.get("resources", {}))
    amounts = {name: remote[name] for name in AMOUNTS if name in remote}
    for name, amount in {**amounts, **{f"resources.{name}": amount for name, amount in resources.items()}}.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount < math.inf:
            raise ConfigError(f"{KEY}.remote.{name}={shown(amount)}: must be a number, 0 or above")
    retries = remote.get("max_retries", -1)
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < -1:
        raise ConfigError(f"{KEY}.remote.max_retries={shown(retries)}: must be a whole number, -1 or above")
    return Settings(init, remote)


def _mapping(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{key}={shown(value)}: must be a mapping, for example {{}}")
    return {str(name): part for name, part in value.items()}


class RayCluster:
    """The nodes of a cluster, and what a rank asks of them."""

    def __init__(self, ray: Any, address: str, remote: Mapping[str, Any], used_gpus: bool = False) -> None:
        """`remote` are the options of `ray.remote`; with `used_gpus`, a cell of the sweep has trained on a GPU.

        `train.device=auto` is decided here, once. Otherwise a cell would continue on a CPU, with other numbers, when
        the nodes with GPUs are lost.
        """
        self.ray, self.address, self.remote = ray, address, remote
        self.shortages = set[str]()  # the shortages that were printed already, for cells that wait
        self.auto_is_gpu = used_gpus or any(node.get("GPU") for node in self.nodes().values())

    def nodes(self) -> dict[str, dict[str, float]]:
        """Return the resources of each node that is alive, by its id."""
        return {node["NodeID"]: node["Resources"] for node in self.ray.nodes() if node["Alive"]}

    def needs(self, config: Config) -> dict[str, float]:
        """Return the resources of one rank."""
        needs = {name: self.remote.get(option, 0) for option, name in AMOUNTS.items()}
        if "num_gpus" not in self.remote:
            needs["GPU"] = int(config.train.device == "cuda" or (config.train.device == AUTO and self.auto_is_gpu))
        needs.update(self.remote.get("resources", {}))
        if (kind := self.remote.get("accelerator_type")) is not None:
            needs[f"accelerator_type:{kind}"] = 0.001  # as Ray itself asks for it
        return {name: amount for name, amount in needs.items() if amount}

    def options(self, config: Config, ranks: int) -> dict[str, Any]:
        """Return the options of an actor that holds the resources of so many ranks."""
        needs = {"CPU": 0.0, "GPU": 0.0, **self.needs(config)}  # Ray refuses 0 as an amount of memory
        options: dict[str, Any] = {option: ranks * needs[name] for option, name in AMOUNTS.items() if name in needs}
        options["resources"] = {name: ranks * amount for name, amount in self.remote.get("resources", {}).items()}
        return options | {key: self.remote[key] for key in ("accelerator_type", "runtime_env") if key in self.remote}

    def rooms(self, config: Config) -> dict[str, int]:
        """Return node id -> how many ranks of `config` the node has room for if nothing else runs there."""
        size, needs = config.world.size or 1, self.needs(config)  # without needs, each node has room for a cell
        return {
            node: min((int(resources.get(name, 0) / amount + 1e-6) for name, amount in needs.items()), default=size)
            for node, resources in self.nodes().items()
        }

    def fits_one_node(self, config: Config) -> bool:
        return max(self.rooms(config).values(), default=0) >= (config.world.size or 1)

    def shortage(self, config: Config) -> str | None:
        """Return what a cell of `config` needs that the nodes could never give it; None if they can."""
        size, room = config.world.size or 1, sum(self.rooms(config).values())
        if room >= size:
            return None
        needs = ", ".join(f"{name} {size * amount:g}" for name, amount in self.needs(config).items())
        return (
            f"world.size={size} needs {needs} in all; the cluster at {self.address} "
            f"({counted(len(self.nodes()), 'node')}) has room for {counted(room, 'rank')}"
        )

    def refuse(self, configs: Sequence[Config]) -> None:
        """Raise `ConfigError` for a config whose cell the nodes could never hold."""
        for config in alike(configs):
            size, gpus = config.world.size or 1, self.remote.get("num_gpus", 0)
            if gpus % 1 and size > 1:
                raise ConfigError(
                    f"{KEY}.remote.num_gpus={gpus}: each of the {size} ranks of a cell needs a GPU of its own; use a "
                    "whole number, or world.size=1"
                )
            if (shortage := self.shortage(config)) is not None:
                raise ConfigError(f"{shortage}; add nodes, or lower world.size or {KEY}.remote.num_cpus")
        refuse_too_large([config for config in configs if self.needs(config).get("GPU")], self.gpu_kinds())

    def gpu_kinds(self) -> set[str]:
        """The kinds of GPU that ranks may get, as Ray calls them; "unknown" is one of them where Ray does not know."""
        if "accelerator_type" in self.remote:
            return {self.remote["accelerator_type"]}
        kinds, prefix = set[str](), "accelerator_type:"
        for node in self.nodes().values():
            if node.get("GPU"):
                kinds |= {name.removeprefix(prefix) for name in node if name.startswith(prefix)} or {"unknown"}
        return kinds


def alike(configs: Sequence[Config]) -> list[Config]:
    """Return one config of each group of configs that ask for the same resources."""
    return list({(config.world.size, config.train.device): config for config in configs}.values())


def connect(settings: Settings) -> Any:
    """Connect to the cluster, or start one of this machine. Returns the module `ray`.

    Raises `ConfigError` in one line if that fails.
    """
    address, source = settings.address
    if address.startswith("ray://"):
        raise ConfigError(
            f"{source}: Ray Client is not supported; start the command on a node of the cluster, with auto or HOST:PORT"
        )
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise ConfigError("hydra/launcher=ray: not installed; pip install 'gptexp[ray]'") from None
    _refuse_silent(address, source)
    here = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES} if address == "local" else {}
    quietly = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        with output_to(NOWHERE):
            ray.init(**{**here, **quietly, **settings.init, "address": address})
    except Exception as error:  # each failure has its own type
        text = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"Ray at {address}: {text}") from None
    finally:
        for number, handler in handlers.items():  # Ray sets its own
            signal.signal(number, handler)
    return ray


def _refuse_silent(address: str, source: str) -> None:
    """Raise `ConfigError` if no server of Ray's protocol, gRPC, answers at an address of the form HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and "local"; Ray refuses others at once
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as there:
            if os.environ.get("RAY_USE_TLS") != "1":
                there.sendall(HTTP2_HELLO)
                answer = there.recv(4)
                if len(answer) < 4 or answer[3] != HTTP2_SETTINGS:
                    raise OSError("something else does")
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{source}: no Ray cluster answers there ({first_line(error)}); give the port of ray start --head (6379), "
            "or leave the address out for a cluster of this machine"
        ) from None
