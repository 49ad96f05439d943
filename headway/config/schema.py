"""What can be set: every key with its meaning, unit, range and default.

The TOML example, the reference table in docs/configuration.md and the error
messages are all made from these models, so a key is described once, here.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headway.config.machine import default_threads
from headway.cost_model import CostModel
from headway.rpc.channel import DEFAULT_MAX_CALLS, DEFAULT_MAX_MESSAGE_BYTES

__all__ = [
    "ActionSettings",
    "BatchSettings",
    "ClassName",
    "EmbodimentSettings",
    "EngineSettings",
    "InteractiveSettings",
    "SchedulerSettings",
    "ServerSettings",
    "Settings",
    "SimulatedSettings",
    "StandardSettings",
    "TelemetrySettings",
    "TenantSettings",
    "TlsSettings",
]

ClassName = Literal["interactive", "standard", "batch"]

_NS_PER_S = 1e9


class Section(BaseModel):
    """A table of the file: immutable, takes no unknown keys and converts nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# Meanings that several sections share.
QueuedRequests = Annotated[int, Field(ge=1, description="Most requests that may wait.")]
QueuedTokens = Annotated[
    int, Field(ge=1, description="Most tokens (prompt and largest output) that may wait.")
]
Tpot = Annotated[
    float,
    Field(
        gt=0,
        description="Longest time between two tokens of a request, in seconds. Bounds a step "
        "that such a request takes part in.",
    ),
]
Slo = Annotated[
    float,
    Field(
        gt=0,
        description="Time to the first token for a text request that brings no budget, in seconds.",
    ),
]


class TlsSettings(Section):
    """Files in PEM form; read again whenever they change."""

    certificate: str = Field(
        "", description="Certificate chain of the server; empty: connections are not encrypted."
    )
    private_key: str = Field("", description="Its private key. Needed with certificate.")
    client_authorities: str = Field(
        "",
        description="Authorities whose client certificates are taken for credentials (mutual "
        "TLS); empty: clients need none. Needs certificate.",
    )

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if bool(self.certificate) != bool(self.private_key):
            raise ValueError("certificate and private_key are needed together")
        if self.client_authorities and not self.certificate:
            raise ValueError("client_authorities needs certificate and private_key")
        return self


class ServerSettings(Section):
    """Where the server listens, and how it treats connections."""

    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address to listen on. Any other than a loopback address needs credentials "
        "and TLS.",
    )
    development: bool = Field(
        False,
        description="Whether callers without a credential are taken for the tenant 'default' "
        "(or the first). Only on a loopback address.",
    )
    keys_file: str = Field(
        "", description="File of API keys, made by 'headway tenant add'; empty: there are none."
    )
    port: int = Field(50051, ge=0, le=65535, description="TCP port; 0 takes a free one.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="TCP port for Prometheus on the same host; 0 is off."
    )
    admin_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="TCP port for channelz, health and reflection, always on 127.0.0.1 and "
        "without credentials; 0 is off.",
    )
    max_message_bytes: int = Field(
        DEFAULT_MAX_MESSAGE_BYTES, ge=1024, description="Largest message taken or sent, in bytes."
    )
    max_calls: int = Field(
        DEFAULT_MAX_CALLS, ge=1, description="Most calls and sessions at once; more are refused."
    )
    grace_s: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="How long a shutdown waits for what was promised, in seconds.",
    )
    heartbeat_interval_s: float = Field(
        2.0,
        gt=0,
        le=3600,
        description="How often both ends of a session give a sign of life, in seconds.",
    )
    idle_timeout_s: float = Field(
        10.0,
        gt=0,
        le=86400,
        description="Silence after which a session is ended, in seconds. "
        "Longer than heartbeat_interval_s.",
    )
    write_timeout_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="How long a reader may leave a stream unread before it is dropped, in seconds.",
    )
    send_queue_messages: int = Field(
        64, ge=1, description="Most messages that wait for a slow reader of a stream."
    )
    reflection: bool = Field(
        False, description="Whether the server tells its services to tools such as grpcurl."
    )
    tls: TlsSettings = Field(default_factory=TlsSettings)

    @model_validator(mode="after")
    def _outlasts_heartbeat(self) -> Self:
        if self.idle_timeout_s <= self.heartbeat_interval_s:
            raise ValueError(
                f"idle_timeout_s ({self.idle_timeout_s}) must be longer than "
                f"heartbeat_interval_s ({self.heartbeat_interval_s})"
            )
        return self


class SimulatedSettings(Section):
    """The simulated engine: a step takes what the cost model says, and no model runs."""

    t0_s: float = Field(0.005, ge=0, description="Time of any step, in seconds.")
    prefill_token_s: float = Field(0.00005, ge=0, description="Time per prompt token, in seconds.")
    pair_s: float = Field(
        0.0, ge=0, description="Time per query-key pair of a prompt's chunk, in seconds."
    )
    decode_s: float = Field(0.0002, ge=0, description="Time per decoding request, in seconds.")
    kv_token_s: float = Field(0.0, ge=0, description="Time per token of KV read, in seconds.")
    noise: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Largest deviation of a step from the model, as a share of its time.",
    )
    seed: int = Field(0, ge=0, description="Seed of the noise.")

    def cost_model(self) -> CostModel:
        """The model that steps follow, margin 1."""
        return CostModel(
            t0_ns=self.t0_s * _NS_PER_S,
            prefill_ns=self.prefill_token_s * _NS_PER_S,
            pair_ns=self.pair_s * _NS_PER_S,
            decode_ns=self.decode_s * _NS_PER_S,
            kv_ns=self.kv_token_s * _NS_PER_S,
        )


class EngineSettings(Section):
    """What executes the steps."""

    kind: Literal["torch", "simulated"] = Field(
        "torch", description="torch runs a model; simulated only takes the time of one."
    )
    model: str = Field(
        "tiny",
        min_length=1,
        description="Name of a pulled model (headway model list), folder of a Llama-family "
        "checkpoint (config.json, safetensors, tokenizer.json), or tiny for a small untrained "
        "one that is made on the spot.",
    )
    replicas: int = Field(1, ge=1, le=64, description="Engine processes.")
    device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="Where the model runs: cpu, cuda, or cuda:N for one of several.",
        json_schema_extra={"expected": '"cpu" or "cuda:0"'},
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Type of weights and KV; auto takes bfloat16 where the chip has it."
    )
    compile: bool = Field(
        True,
        description="Whether kernels are built for this processor before the engine is ready, "
        "where there is a C++ compiler; without them it runs slower.",
    )
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads of an engine; 0 takes one less than the cores, at least 1.",
    )
    kv_tokens: int = Field(16384, ge=1, description="Room for KV, in tokens, of an engine.")
    swap_tokens: int = Field(
        0,
        ge=0,
        description="Room in host memory, in tokens, for the KV of work that gives way; it is "
        "used where copying is quicker than computing again. 0: none.",
    )
    block_tokens: int = Field(16, ge=1, le=1024, description="Tokens in a block of KV.")
    max_context_tokens: int = Field(
        0, ge=0, description="Longest prompt plus output, in tokens; 0 is the model's own limit."
    )
    adapters: tuple[str, ...] = Field(
        (),
        strict=False,
        description="LoRA adapters that are loaded beside the model, each as NAME=FOLDER, the "
        "folder as PEFT writes it.",
    )
    start_timeout_s: float = Field(
        300.0, gt=0, description="How long an engine may take to be ready, in seconds."
    )
    step_timeout_s: float = Field(
        30.0,
        gt=0,
        description="How long a step may take before its engine counts as lost, in seconds.",
    )
    stall_factor: float = Field(
        20.0,
        ge=1,
        description="A step that takes this many times what was predicted, and at least "
        "stall_after_s, means a lost engine too.",
    )
    stall_after_s: float = Field(
        2.0,
        gt=0,
        description="No step counts as stalled before, in seconds: other work on the machine "
        "holds an engine up as well.",
    )
    restart_backoff_s: float = Field(
        0.5, gt=0, description="First wait before a lost engine is started again, in seconds."
    )
    restart_backoff_max_s: float = Field(
        30.0, gt=0, description="Longest wait before a lost engine is started again, in seconds."
    )
    simulated: SimulatedSettings = Field(default_factory=SimulatedSettings)

    @property
    def num_blocks(self) -> int:
        """Whole blocks of KV of an engine."""
        return self.kv_tokens // self.block_tokens

    @property
    def num_swap_blocks(self) -> int:
        """Whole blocks of host memory for swapped KV."""
        return self.swap_tokens // self.block_tokens

    @property
    def num_threads(self) -> int:
        """CPU threads of an engine on this machine."""
        return self.threads or default_threads()

    @property
    def adapter_folders(self) -> tuple[tuple[str, str], ...]:
        """(name, folder) of each adapter."""
        pairs = (adapter.partition("=") for adapter in self.adapters)
        return tuple((name.strip(), folder.strip()) for name, _, folder in pairs)

    @model_validator(mode="after")
    def _adapters_have_names(self) -> Self:
        for given, (name, folder) in zip(self.adapters, self.adapter_folders, strict=True):
            if not (name and folder):
                raise ValueError(f"adapters must each be NAME=FOLDER, got {given!r}")
        _require_unique("adapters", [name for name, _ in self.adapter_folders])
        return self

    @model_validator(mode="after")
    def _holds_a_block(self) -> Self:
        if self.kv_tokens < self.block_tokens:
            raise ValueError(
                f"kv_tokens ({self.kv_tokens}) must hold at least one block of "
                f"block_tokens ({self.block_tokens})"
            )
        if self.restart_backoff_max_s < self.restart_backoff_s:
            raise ValueError(
                f"restart_backoff_max_s ({self.restart_backoff_max_s}) must be at least "
                f"restart_backoff_s ({self.restart_backoff_s})"
            )
        return self


class InteractiveSettings(Section):
    """A robot waits. First in everything."""

    slo_s: Slo = 0.5
    tpot_s: Tpot = 0.05
    max_queued_requests: QueuedRequests = 1024
    max_queued_tokens: QueuedTokens = 1_048_576


class StandardSettings(Section):
    """A person waits."""

    slo_s: Slo = 2.0
    tpot_s: Tpot = 0.1
    max_queued_requests: QueuedRequests = 1024
    max_queued_tokens: QueuedTokens = 4_194_304


class BatchSettings(Section):
    """Nobody waits. Runs in what the others leave."""

    patience_s: float = Field(
        600.0,
        gt=0,
        description="Wait after which batch work may draw from the starvation lane, in seconds.",
    )
    max_queued_requests: QueuedRequests = 100_000
    max_queued_tokens: QueuedTokens = 1_073_741_824


class SchedulerSettings(Section):
    """Who runs when, and who is told no."""

    max_running: int = Field(64, ge=1, description="Most requests in a batch of an engine.")
    max_step_s: float = Field(
        0.1,
        gt=0,
        description="Longest step of batch work alone, in seconds: the longest that an arriving "
        "interactive request waits for it.",
    )
    target_miss_share: float = Field(
        0.001,
        gt=0,
        lt=1,
        description="Share of promises that may be broken; sets the margin on predictions.",
    )
    starvation_share: float = Field(
        0.05,
        ge=0,
        le=0.5,
        description="Share of step time for batch work that waited longer than its patience.",
    )
    starvation_window_s: float = Field(
        1.0, gt=0, description="Time over which starvation_share is kept, in seconds."
    )
    prompt_weight: float = Field(
        1.0, gt=0, description="What a prompt token counts in a tenant's share."
    )
    output_weight: float = Field(
        2.0, gt=0, description="What an output token counts in a tenant's share."
    )
    fairness_bound_tokens: int = Field(
        8192,
        ge=1,
        description="How far tenants' weighted service may drift apart, in weighted tokens.",
    )
    demand_window_s: float = Field(
        5.0,
        ge=0,
        description="How long a refused tenant counts as one that wants service, in seconds.",
    )
    prefix_cache: bool = Field(
        True, description="Whether KV of equal beginnings is kept and shared inside a tenant."
    )
    interactive: InteractiveSettings = Field(default_factory=InteractiveSettings)
    standard: StandardSettings = Field(default_factory=StandardSettings)
    batch: BatchSettings = Field(default_factory=BatchSettings)


class TenantSettings(Section):
    """One customer, fleet or team."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$",
        description="Name: small letters, digits, - and _, at most 63.",
        json_schema_extra={"expected": '"fleet-7"'},
    )
    weight: float = Field(1.0, gt=0, description="Share of the service relative to other tenants.")
    classes: tuple[ClassName, ...] = Field(
        ("interactive", "standard", "batch"),
        strict=False,
        min_length=1,
        description="Classes that the tenant may use.",
    )
    adapters: tuple[str, ...] = Field(
        ("*",),
        strict=False,
        description="Names of the adapters that the tenant may use; * is all of them.",
    )
    models: tuple[str, ...] = Field(
        ("*",),
        strict=False,
        description="Names of the models that the tenant may use; * is all of them.",
    )
    robots: tuple[str, ...] = Field(
        ("*",),
        strict=False,
        description="Ids of the robots that the tenant may speak for; * stands for any text.",
    )
    subject_names: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Subject alternative names by which client certificates are known to be the "
        "tenant's; * stands for any text.",
    )
    operator: bool = Field(
        False,
        description="Whether the tenant may see all tenants and drain the server.",
    )
    tokens_per_s: float = Field(
        0.0, ge=0, description="Lasting rate of weighted tokens, per second; 0 is unlimited."
    )
    burst_tokens: int = Field(
        0, ge=0, description="Weighted tokens at once above that rate. Needed with tokens_per_s."
    )
    degraded_max_tokens: int = Field(
        0,
        ge=0,
        description="Output to which a request is cut before it is refused, in tokens; 0 is never.",
    )

    @model_validator(mode="after")
    def _bucket_holds_something(self) -> Self:
        if self.tokens_per_s > 0 and self.burst_tokens == 0:
            raise ValueError(
                "tokens_per_s needs burst_tokens of at least 1, or nothing ever passes"
            )
        return self


class EmbodimentSettings(Section):
    """A kind of robot: what the values of an action are, and their ranges."""

    name: str = Field(min_length=1, max_length=64, description="Name, such as diff_drive.")
    values: tuple[str, ...] = Field(
        strict=False, min_length=1, description="Names of the values of an action, in order."
    )
    low: tuple[float, ...] = Field(strict=False, description="Smallest value of each, in SI units.")
    high: tuple[float, ...] = Field(strict=False, description="Largest value of each, in SI units.")

    @model_validator(mode="after")
    def _ranges_fit(self) -> Self:
        if not len(self.values) == len(self.low) == len(self.high):
            raise ValueError(
                f"values, low and high must be of one length, got {len(self.values)}, "
                f"{len(self.low)} and {len(self.high)}"
            )
        if len(set(self.values)) != len(self.values):
            raise ValueError("values must all have different names")
        for name, low, high in zip(self.values, self.low, self.high, strict=True):
            if low >= high:
                raise ValueError(f"low of {name} ({low}) must be less than its high ({high})")
        return self


_DIFF_DRIVE = EmbodimentSettings(
    name="diff_drive",
    values=("linear_velocity", "angular_velocity"),
    low=(-1.0, -2.0),
    high=(1.0, 2.0),
)


class ActionSettings(Section):
    """What a robot gets for an observation."""

    chunk_steps: int = Field(10, ge=1, le=1000, description="Steps of an action chunk.")
    step_period_s: float = Field(
        0.1, gt=0, le=60, description="Time between two steps of a chunk, in seconds."
    )
    adapter: str = Field(
        "", description="Name of the adapter that chooses actions; empty is the model itself."
    )
    embodiments: tuple[EmbodimentSettings, ...] = Field(
        (_DIFF_DRIVE,), strict=False, min_length=1, description="Kinds of robots that are served."
    )

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        _require_unique("embodiments", [embodiment.name for embodiment in self.embodiments])
        return self


class TelemetrySettings(Section):
    """What the process says of itself."""

    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="Lines on standard error; auto is console on a terminal, else json."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severity that is written."
    )
    otlp_endpoint: str = Field(
        "",
        pattern=r"^(https?://[^\s/:]+:\d+|https?://\[[^\s/]+\]:\d+|)$",
        description="OpenTelemetry collector that gets a span a request (OTLP over gRPC), as "
        "http://HOST:PORT, or https for TLS; empty: none. Needs the extra otel.",
        json_schema_extra={"expected": '"http://127.0.0.1:4317" or the like'},
    )


class Settings(Section):
    """Everything that can be set."""

    server: ServerSettings = Field(default_factory=ServerSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    scheduler: SchedulerSettings = Field(default_factory=SchedulerSettings)
    actions: ActionSettings = Field(default_factory=ActionSettings)
    telemetry: TelemetrySettings = Field(default_factory=TelemetrySettings)
    tenants: tuple[TenantSettings, ...] = Field(
        (TenantSettings(name="default"),),
        strict=False,
        min_length=1,
        description="Who may use the server.",
    )

    @model_validator(mode="after")
    def _tenants_differ(self) -> Self:
        _require_unique("tenants", [tenant.name for tenant in self.tenants])
        return self

    @model_validator(mode="after")
    def _adapters_are_loaded(self) -> Self:
        loaded = {name for name, _ in self.engine.adapter_folders}
        wanted = {self.actions.adapter: "actions.adapter"} if self.actions.adapter else {}
        for tenant in self.tenants:
            wanted |= dict.fromkeys(tenant.adapters, f"adapters of tenant '{tenant.name}'")
        for name, where in wanted.items():
            if name != "*" and name not in loaded:
                known = ", ".join(sorted(loaded)) or "none"
                raise ValueError(
                    f"{where} has '{name}', which engine.adapters does not load; it has {known}"
                )
        return self


def _require_unique(what: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} must have different names; '{twice[0]}' stands there twice")
