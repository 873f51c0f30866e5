"""Settings of a worker, from variables with the prefix `HYPIC_WORKER_`."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.settings import PeerSettings

__all__ = ["WorkerSettings"]

_MIB = 1 << 20


class WorkerSettings(PeerSettings):
    """Everything that an operator may set."""

    model_config = SettingsConfigDict(env_prefix="HYPIC_WORKER_")

    checkpoint: Path = Field(description="directory of a Hugging Face checkpoint")
    weights: str = Field(
        default="checkpoint",
        pattern=r"^(checkpoint|random:\d{1,9})$",
        description="checkpoint, or random:SEED: drawn from a seed, so that a shape can be measured of which the checkpoint holds"
        " config.json, tokenizer and template alone; its replies mean nothing",
    )
    profile: Path | None = Field(
        default=None, description="profile.toml; default: the one in the checkpoint, else built-in"
    )
    calibration: Path | None = Field(
        default=None,
        description="calibration card that `hypic calibrate` wrote; default: calibration.json in the checkpoint, where there is"
        " one. A card of other weights, dtype or profile is refused, aloud, and the model is served as uncalibrated",
    )
    model_name: str | None = Field(
        default=None, description="what clients send as `model`; default: the checkpoint's folder"
    )
    worker_id: str = Field(
        default="worker-0", min_length=1, max_length=128, description="unique among the workers of a tier"
    )
    roles: str = Field(
        default="prefill,combine",
        description="what the worker does: prefill (captures), combine (combines and decodes), or both",
    )
    listen_address: str = Field(default="127.0.0.1:7102", description="host:port of the gRPC server")
    health_address: str = Field(
        default="",
        pattern=r"^(.+:\d+)?$",
        description="host:port of a second server that answers health probes alone, in plain text; empty: only the gRPC"
        " server answers them",
    )
    advertise_address: str | None = Field(
        default=None, description="where others reach this worker; default: listen_address"
    )
    cache_address: str = Field(default="127.0.0.1:7101", description="host:port of the cache service")

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="of weights, keys and values")
    torch_threads: int = Field(
        default_factory=lambda: 1 if (os.cpu_count() or 1) <= 4 else 4,
        ge=1,
        le=256,
        description="CPU threads of a tensor operation; 1 on up to 4 cores, else 4",
    )

    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="ranks of this host that hold the model together, a process each, on as many GPUs from the first one on;"
        " memory below is that of each",
    )

    page_tokens: int = Field(default=16, ge=1, le=1024, description="tokens a page of keys and values holds")
    memory_bytes: int | None = Field(
        default=None,
        ge=_MIB,
        description="memory of the device for everything: weights, running states and the work of the largest pass, and"
        " what they leave is shared between pages and states; takes the place of the two below",
    )
    page_bytes: int = Field(default=512 * _MIB, ge=_MIB, description="memory for pages of keys and values, all layers")
    state_bytes: int = Field(
        default=1024 * _MIB, ge=_MIB, description="memory for transitions, end states and snapshots"
    )
    max_running: int = Field(default=16, ge=1, le=4096, description="requests that combine or decode at once")
    max_waiting: int = Field(default=64, ge=0, le=65536, description="requests that wait for room before 429")
    layer_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens times layers of prefill between two decode steps; default: 1024 on a CPU, 20480 on a GPU",
    )
    warm_up: bool | None = Field(
        default=None,
        description="serve made-up requests before the worker is ready, so that kernels are compiled and passes recorded;"
        " default: on a GPU; not for a model held by several ranks",
    )
    capture_tokens: int | None = Field(
        default=None,
        ge=1,
        description="segments are packed into one capture up to this many tokens; default: 1024 on a CPU, 4096 on a GPU",
    )
    sweep_tokens: int | None = Field(
        default=None,
        ge=1,
        description="waiting prompts are combined together up to this many live tokens, and captures in the room that"
        " they leave; default: one by one on a CPU, 2048 on a GPU",
    )
    min_body: int = Field(default=16, ge=1, description="segments with a shorter body are computed live")
    context_length: int | None = Field(
        default=None, ge=2, description="limit on prompt plus reply; default: the model's"
    )

    host_bytes: int = Field(
        default=0,
        ge=0,
        description="host memory for stored states as the profile encodes them, pinned on a GPU; 0 is off",
    )
    disk_directory: Path | None = Field(
        default=None, description="where stored states outlive a restart, in a folder of this worker's; default: off"
    )
    disk_bytes: int = Field(default=16 * 1024 * _MIB, ge=_MIB, description="room for stored states on disk")
    redis_url: str | None = Field(default=None, description="Redis that keeps small stored states; default: off")
    redis_prefix: str = Field(default="hypic", min_length=1, description="start of every key in Redis")
    redis_bytes: int = Field(default=1024 * _MIB, ge=_MIB, description="room for stored states in Redis")
    redis_blob_max_bytes: int = Field(
        default=8 * _MIB, ge=1, description="larger states stay out of Redis, where reading them takes too long"
    )
    held_seconds: float = Field(
        default=30.0, gt=0, le=3600, description="how long a decode state waits for the engine that is to go on with it"
    )
    held_bytes: int = Field(
        default=1024 * _MIB,
        ge=_MIB,
        description="decode states that wait at once, within the memory for pages and running states",
    )
    fetch_bytes: int = Field(
        default=256 * _MIB,
        ge=_MIB,
        description="bytes of states that are in memory on their way to other workers, and as many on their way from them",
    )
    fetch_seconds: float = Field(
        default=5.0, gt=0.0, description="longest wait of a prompt for stored states; then they are computed in place"
    )

    turn_seconds: float = Field(
        default=5.0,
        ge=0.0,
        description="how long the state behind a reply is held until the router says whether it is of use to the next turn;"
        " 0 holds none",
    )

    shares_memory: bool = Field(
        default=True,
        description="states go to workers of the same host through memory that both map, where both see each other's processes",
    )

    drain_seconds: float = Field(
        default=30.0,
        ge=0.0,
        description="how long SIGTERM waits for running streams, and then for states on their way to a tier",
    )
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(default=0, ge=0, le=65535, description="0 serves no metrics")

    @field_validator("disk_directory", mode="before")
    @classmethod
    def _is_off_when_empty(cls, value: object) -> object:
        """An empty path would be the folder that the process happens to run in."""
        return value or None

    @field_validator("roles")
    @classmethod
    def _names_roles(cls, value: str) -> str:
        named = {role.strip() for role in value.split(",")}
        if not named <= {"prefill", "combine"}:
            raise ValueError(f"{value!r} must be prefill, combine or prefill,combine")
        return ",".join(sorted(named, reverse=True))

    @model_validator(mode="after")
    def _counts_devices_from_the_first(self) -> "WorkerSettings":
        """Ranks choose their GPUs themselves."""
        if self.tensor_parallel > 1 and ":" in self.device:
            raise ValueError(
                f"HYPIC_WORKER_DEVICE: {self.device} is one GPU and HYPIC_WORKER_TENSOR_PARALLEL asks for"
                f" {self.tensor_parallel}; set it to cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
            )
        return self

    @model_validator(mode="after")
    def _shares_memory_once(self) -> "WorkerSettings":
        """A budget of everything leaves nothing to say about its shares."""
        if self.memory_bytes is not None and {"page_bytes", "state_bytes"} & self.model_fields_set:
            raise ValueError(
                "HYPIC_WORKER_MEMORY_BYTES shares memory itself; leave out HYPIC_WORKER_PAGE_BYTES and"
                " HYPIC_WORKER_STATE_BYTES, or it"
            )
        return self

    @property
    def can_capture(self) -> bool:
        """Whether it captures segments."""
        return "prefill" in self.roles

    @property
    def can_combine(self) -> bool:
        """Whether it combines prompts and decodes."""
        return "combine" in self.roles

    @property
    def random_seed(self) -> int | None:
        """What weights are drawn from; None where they come from the checkpoint."""
        return int(self.weights.partition(":")[2]) if self.weights.startswith("random:") else None

    @property
    def reached_at(self) -> str:
        """The address that the directory hands to other services."""
        return self.advertise_address or self.listen_address
