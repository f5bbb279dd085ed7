"""Every setting of `headrace serve`, checked once at load.

Sources, the first that speaks wins: flags `--section.name`, environment `HEADRACE_SECTION__NAME`,
the file `headrace.toml` (`--config`), the defaults below. Units are in the names; sizes take
integers or "64MiB". A name that is not here is an error. Settings that contradict each other raise
SettingsError with both names.
"""

from __future__ import annotations

import os
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from headrace.schemas.errors import SettingsError
from headrace.service.plan.pack import longest_datum

__all__ = ["NAME_PATTERN", "TOKENS_VARIABLE", "Settings", "load_settings", "settings_table"]

NAME_PATTERN = r"^[a-z0-9][a-z0-9_.-]{0,62}$"
TOKENS_VARIABLE = "HEADRACE_TOKENS"  # secrets: no setting, so that nothing shows it
DEFAULT_TOKENS = 32768  # slots a microbatch
BYTES_PER_TOKEN = 64  # of a laid-out microbatch, an upper bound for the usual keys


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _octal(mode: Any) -> Any:
    return int(mode, 8) if isinstance(mode, str) else mode


def _default_queue_dir() -> Path:
    return Path(f"/dev/shm/headrace-{os.getuid()}")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Server(Section):
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="beyond loopback it takes tokens, or server.insecure",
    )
    port: int = Field(default=8421, ge=0, le=65535, description="0 picks a free one")
    insecure: bool = Field(default=False, description="listen beyond loopback without tokens")
    tls_cert: Path | None = Field(default=None, description="PEM chain; with tls_key it is https")
    tls_key: Path | None = Field(default=None, description="PEM key of the certificate")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM; clients then need a certificate that it signed"
    )
    keep_alive_s: int = Field(default=75, ge=1, description="an idle connection is kept so long")
    head_timeout_s: float = Field(
        default=10, gt=0, description="a request's head must be whole within it, else 408"
    )
    body_timeout_s: float = Field(
        default=60, gt=0, description="a request's body must be whole within it, else 408"
    )
    min_body_rate_bytes_s: int = Field(
        default=65536, ge=0, description="slower bodies get 408, after 5 s of grace"
    )
    max_head_bytes: ByteSize = Field(
        default=ByteSize(32768), ge=1024, description="larger heads get 431"
    )
    max_connections: int = Field(default=4096, ge=1, description="beyond it 503")
    drain_timeout_s: int = Field(
        default=20, ge=1, description="open posts may finish within it after SIGTERM"
    )
    switch_interval_s: float = Field(default=0.0005, gt=0, description="sys.setswitchinterval")
    fast_protocol: bool = Field(
        default=True, description="bodies are read straight into their buffer"
    )
    malloc_tuning: bool = Field(
        default=True, description="glibc keeps freed memory for the next bodies"
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="names in the Host header beside loopback ones; others get 421"
    )


class Auth(Section):
    tokens_file: Path | None = Field(
        default=None,
        description="lines `name role secret [expires]`, re-read on SIGHUP; also `HEADRACE_TOKENS`",
    )
    per_token_share: float = Field(
        default=1.0, gt=0, le=1, description="of the backlog budget, for one token's datums"
    )


class Limits(Section):
    max_body_bytes: ByteSize = Field(
        default=ByteSize(64 << 20), ge=1024, description="larger bodies get 413"
    )
    inflight_body_bytes: ByteSize = Field(
        default=ByteSize(256 << 20), ge=1024, description="bodies being read; over it 429"
    )
    max_datums_per_post: int = Field(default=1024, ge=1, le=1024, description="per-datum form")
    max_datums_columnar: int = Field(default=16384, ge=1, le=16384, description="columnar form")
    max_sequence_tokens: int | None = Field(
        default=None, ge=1, description="longer datums get 422; none: planner.microbatch_tokens"
    )
    max_json_bytes: ByteSize = Field(
        default=ByteSize(1 << 20), ge=1024, description="JSON bodies, for posts typed by hand"
    )
    max_inflate_ratio: int = Field(
        default=200, ge=1, description="an encoded body that grows more gets 413"
    )
    vocab_size: int | None = Field(
        default=None, ge=1, description="ids from it on get 422; none: any that fits int32"
    )
    logprob_max: float = Field(
        default=1e-3, ge=0, description="a larger logprob gets 422 where the weight is not 0"
    )
    max_errors: int = Field(default=100, ge=1, description="findings listed in a 422")


class Idempotency(Section):
    window_s: int = Field(default=3600, ge=300, description="a key is remembered at least so long")


class Stream(Section):
    """A key with values of its own dtype and several dimensions, such as routed experts."""

    dtype: Literal[
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "bool",
    ]  # fmt: skip
    shape: tuple[int, ...] = ()  # of one token
    rows: Literal["T", "T-1"] = "T"  # T-1: one row of zeros is put in front


class Schema(Section):
    keys: tuple[str, ...] | None = Field(
        default=None,
        description="loss_fn_inputs keys of the run; none: those of the first accepted post",
    )
    streams: dict[str, Stream] = Field(
        default={},
        description="keys that keep their dtype: name to dtype, shape of a token, rows T or T-1",
    )
    require_targets: bool = Field(
        default=True, description="a datum without target_tokens gets 422"
    )


class Queue(Section):
    dir: Path = Field(default_factory=_default_queue_dir, description="a folder on tmpfs")
    bytes: ByteSize = Field(
        default=ByteSize(256 << 20), ge=1 << 16, description="data region a dp rank"
    )
    records: int = Field(default=1024, ge=2, description="descriptors a dp rank")
    mode: Annotated[int, BeforeValidator(_octal)] = Field(
        default=0o600, ge=0, le=0o777, description="of the ring files, octal"
    )
    replicas: int = Field(default=1, ge=1, description="readers of each ring: tp, pp and cp peers")
    prefault: bool = Field(default=True, description="touch every page at start")


class Spool(Section):
    durability: Literal["memory"] = Field(
        default="memory", description="segments and database on the queue's tmpfs"
    )
    segment_bytes: ByteSize = Field(
        default=ByteSize(64 << 20), ge=1 << 16, description="size of one segment file"
    )
    pool_segments: int = Field(default=2, ge=1, description="recycled segments kept for reuse")
    backlog_bytes: ByteSize | None = Field(
        default=None,
        description="accepted, not yet delivered; over it 429; none: 25 % of the free tmpfs",
    )
    retain_bytes: ByteSize | None = Field(
        default=None, description="delivered, not yet committed; over it planning stops; none: 50 %"
    )


class Planner(Section):
    layout: Literal["padded", "thd", "neat"] = Field(
        default="thd", description="of the microbatches"
    )
    dp_size: int = Field(default=1, ge=1, le=4096, description="data-parallel ranks")
    batch_size: int | None = Field(
        default=None, ge=1, description="datums a step, at least; 64 if neither is set"
    )
    batch_groups: int | None = Field(default=None, ge=1, description="groups a step, exactly")
    microbatch_tokens: int | None = Field(
        default=None, ge=1, description="slots a microbatch, a strict cap; 32768 if neither is set"
    )
    microbatch_size: int | None = Field(
        default=None, ge=1, description="rows a microbatch, of the padded layout"
    )
    microbatch_multiple: int = Field(
        default=1, ge=1, description="microbatches a rank are a multiple of it"
    )
    sequence_multiple: int = Field(
        default=1, ge=1, description="a sequence's slot is a multiple of it: 2 x cp x tp, FP8"
    )
    pack_multiple: int = Field(default=1, ge=1, description="a packed row is a multiple of it")
    fixed_pack: bool = Field(
        default=False, description="every packed row has microbatch_tokens slots"
    )
    quadratic_crossover: int = Field(
        default=24576, ge=1, description="a slot of n costs n + n^2 / quadratic_crossover"
    )
    batch_exact: bool = Field(
        default=False, description="exactly batch_size datums, a multiple of dp_size"
    )
    partial_step_timeout_s: float | None = Field(
        default=None, gt=0, description="a step is formed of what is complete after it; none: never"
    )
    advantage: Literal["group_mean", "group_mean_std", "rloo"] | None = Field(
        default=None, description="computed from rewards; datums then bring no advantages"
    )
    source_shares: dict[str, float] = Field(
        default={}, description="the part of each step that a source has, by name"
    )
    plan_ahead: int = Field(
        default=1, ge=0, description="steps planned beyond the one being consumed"
    )


class Eligibility(Section):
    max_policy_lag: int | None = Field(
        default=None, ge=0, description="versions; what is older is not trained; none: any"
    )
    on_stale: Literal["drop", "refuse"] = Field(
        default="drop", description="refuse: 409 where nothing of a post is fresh"
    )
    drop_zero_advantage_groups: bool = Field(
        default=False, description="a group whose advantages are all 0 teaches nothing"
    )


class Admission(Section):
    lease_s: float = Field(
        default=1800, gt=0, description="a reservation of groups is held so long"
    )


class Groups(Section):
    timeout_s: float = Field(
        default=600, gt=0, description="from a group's first member to its last"
    )
    on_timeout: Literal["drop", "ship", "wait"] = Field(
        default="drop", description="ship: train the members that are there"
    )
    max_open: int = Field(
        default=100_000, ge=1, description="groups that collect members; beyond it 429"
    )
    shared: bool = Field(
        default=False, description="any token may add to a group, not only the one that opened it"
    )
    memory_s: int = Field(
        default=3600, ge=0, description="the id of a finished group is remembered so long"
    )


class TrainerSide(Section):
    release: Literal["step", "microbatch"] = Field(
        default="step", description="what one lease covers"
    )


class Run(Section):
    name: str = Field(default="default", pattern=NAME_PATTERN, description="names the ring files")


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the least that is logged"
    )
    format: Literal["auto", "human", "json"] = Field(
        default="auto", description="auto: human on a terminal"
    )


class Settings(BaseSettings):
    """The settings of one service, frozen."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        cli_avoid_json=True,
        cli_prog_name="headrace serve",
    )

    server: Server = Server()
    auth: Auth = Auth()
    limits: Limits = Limits()
    idempotency: Idempotency = Idempotency()
    # `schema` is a method of pydantic's models: the attribute has another name, the setting has
    # not.
    run_schema: Schema = Field(default=Schema(), validation_alias="schema")
    queue: Queue = Queue()
    spool: Spool = Spool()
    planner: Planner = Planner()
    eligibility: Eligibility = Eligibility()
    groups: Groups = Groups()
    admission: Admission = Admission()
    trainer: TrainerSide = TrainerSide()
    run: Run = Run()
    log: Log = Log()

    @property
    def microbatch_tokens(self) -> int | None:
        """Slots a microbatch; None where `planner.microbatch_size` counts rows instead."""
        planner = self.planner
        return planner.microbatch_tokens or (None if planner.microbatch_size else DEFAULT_TOKENS)

    @property
    def longest_datum(self) -> int:
        """Tokens of the longest datum that a microbatch can hold, multiples included."""
        cap, planner = self.microbatch_tokens, self.planner
        if cap is None:
            return self.limits.max_sequence_tokens or DEFAULT_TOKENS
        return longest_datum(
            layout=planner.layout,
            microbatch_tokens=cap,
            sequence_multiple=planner.sequence_multiple,
            pack_multiple=planner.pack_multiple,
        )

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens a datum may have: the setting, else what one microbatch can hold."""
        return self.limits.max_sequence_tokens or self.longest_datum

    @property
    def batch_size(self) -> int | None:
        """Datums a step, at least; None where `batch_groups` counts instead."""
        planner = self.planner
        return planner.batch_size or (None if planner.batch_groups else 64)

    @property
    def takes_tokens(self) -> bool:
        """Requests need a bearer token: `auth.tokens_file` or HEADRACE_TOKENS is set."""
        return self.auth.tokens_file is not None or TOKENS_VARIABLE in os.environ

    def _agree_on_microbatches(self) -> None:
        planner, cap = self.planner, self.microbatch_tokens
        if planner.microbatch_tokens is not None and planner.microbatch_size is not None:
            raise ValueError(
                f"planner.microbatch_tokens = {planner.microbatch_tokens} and "
                f"planner.microbatch_size = {planner.microbatch_size} are both set: a microbatch "
                f"is measured by one; drop the other"
            )
        if planner.microbatch_size is not None and planner.layout != "padded":
            raise ValueError(
                f"planner.microbatch_size = {planner.microbatch_size} counts rows and "
                f"planner.layout = {planner.layout} has one: set planner.microbatch_tokens"
            )
        for name in ("sequence_multiple", "pack_multiple"):
            multiple = getattr(planner, name)
            if planner.fixed_pack and cap is not None and cap % multiple:
                raise ValueError(
                    f"planner.fixed_pack is set and planner.microbatch_tokens = {cap} is no "
                    f"multiple of planner.{name} = {multiple}: change one of them"
                )
        if self.max_sequence_tokens > self.longest_datum or self.longest_datum < 1:
            raise ValueError(
                f"limits.max_sequence_tokens = {self.max_sequence_tokens} exceeds the "
                f"{self.longest_datum} tokens that planner.microbatch_tokens = {cap} can hold in "
                f"whole multiples: such a datum would fit no microbatch; lower the first or raise "
                f"the other"
            )
        need = 2 * BYTES_PER_TOKEN * (cap or self.max_sequence_tokens)
        if self.queue.bytes < need:
            raise ValueError(
                f"queue.bytes = {self.queue.bytes} is less than two microbatches of "
                f"planner.microbatch_tokens = {cap or self.max_sequence_tokens} slots need ({need} "
                f"bytes): raise the first or lower the other"
            )

    @model_validator(mode="after")
    def _agree(self) -> Settings:
        """Refuse pairs that cannot both hold; each message names both settings."""
        server = self.server
        if not (server.insecure or self.takes_tokens or _is_loopback(server.host)):
            raise ValueError(
                f"server.host = {server.host!r} is not a loopback address and auth.tokens_file is "
                "not set: anyone who reaches it could post; give it tokens (auth.tokens_file or "
                f"{TOKENS_VARIABLE}), or say server.insecure = true"
            )
        if (server.tls_cert is None) != (server.tls_key is None):
            raise ValueError(
                f"server.tls_cert = {server.tls_cert} and server.tls_key = {server.tls_key}: TLS "
                "takes both; set the other one too"
            )
        if server.tls_client_ca is not None and server.tls_cert is None:
            raise ValueError(
                f"server.tls_client_ca = {server.tls_client_ca} is set and server.tls_cert is not: "
                "client certificates are part of TLS; set server.tls_cert and server.tls_key"
            )
        if self.planner.batch_size is not None and self.planner.batch_groups is not None:
            raise ValueError(
                f"planner.batch_size = {self.planner.batch_size} and planner.batch_groups = "
                f"{self.planner.batch_groups} are both set: a step is measured by one; drop the "
                "other"
            )
        planner = self.planner
        if planner.batch_exact and (planner.batch_size or 1) % planner.dp_size:
            raise ValueError(
                f"planner.batch_exact is set and planner.batch_size = {planner.batch_size} is no "
                f"multiple of planner.dp_size = {planner.dp_size}: change one of them"
            )
        if planner.batch_exact and planner.batch_size is None:
            raise ValueError("planner.batch_exact needs planner.batch_size: it counts datums")
        if sum(planner.source_shares.values()) > 1 + 1e-9 or any(
            share <= 0 for share in planner.source_shares.values()
        ):
            raise ValueError(
                f"planner.source_shares = {planner.source_shares}: each is above 0, and together "
                f"they are at most 1"
            )
        if self.spool.segment_bytes < self.limits.max_body_bytes:
            raise ValueError(
                f"spool.segment_bytes = {self.spool.segment_bytes} is smaller than "
                "limits.max_body_bytes = "
                f"{self.limits.max_body_bytes}: a post must fit one segment; raise the first or "
                "lower the other"
            )
        if self.limits.inflight_body_bytes < self.limits.max_body_bytes:
            raise ValueError(
                f"limits.inflight_body_bytes = {self.limits.inflight_body_bytes} is smaller than "
                f"limits.max_body_bytes = {self.limits.max_body_bytes}: the largest body would "
                "never be read; raise the first or lower the other"
            )
        self._agree_on_microbatches()
        return self


def load_settings(flags: list[str], config: Path | None = None) -> Settings:
    """Settings from `flags`, the environment, the file `config` (none: `headrace.toml` if it is
    there), defaults.

    Raises SettingsError with one line a finding. An unknown flag ends the process with exit status
    2, as argparse does.
    """
    path = config or Path("headrace.toml")
    if config is not None and not config.is_file():
        raise SettingsError(f"--config {config}: no such file")

    class FromFile(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (
                init_settings,
                env_settings,
                TomlConfigSettingsSource(settings_cls, toml_file=path),
            )

    try:
        return FromFile(_cli_parse_args=flags)  # pyright: ignore[reportCallIssue]
    except ValidationError as error:
        raise SettingsError("\n".join(_finding(item) for item in error.errors())) from error


def _finding(item: Any) -> str:
    name = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if not name:
        return str(message)
    if item["type"] == "extra_forbidden":
        return f"{name}: no such setting; see docs/settings.md"
    return f"{name}: got {item['input']!r}: {message}"


def settings_table() -> str:
    """Every setting as a Markdown table: name, default, meaning."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for field_name, section in Settings.model_fields.items():
        name = section.validation_alias or field_name
        for key, field in section.default.__class__.model_fields.items():
            default = field.get_default(call_default_factory=True, validated_data={})
            rows.append(
                f"| `{name}.{key}` | {_default(key, default)} | {field.description or ''} |"
            )
    return "\n".join(rows)


def _default(key: str, value: Any) -> str:
    if isinstance(value, Path):
        return "`/dev/shm/headrace-{uid}`"
    if value is None or value == ():
        return "none"
    if key == "mode":
        return f"`{value:04o}`"
    if isinstance(value, ByteSize):
        return value.human_readable(separator="").replace(".0", "")
    return str(value).lower() if isinstance(value, bool) else str(value)
