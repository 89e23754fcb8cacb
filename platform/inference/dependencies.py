"""The dependencies that the gateway's routes receive, and the configuration that bounds their work."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from uuid import UUID

from loraplex.adapters.uploads.service import Uploads
from loraplex.engine.client import EngineClient
from loraplex.grammar import constraints
from loraplex.platform.auth.client_address import ClientAddresses
from loraplex.platform.auth.identity_provider import IdentityProvider
from loraplex.platform.auth.mailed_links import MailedLinks
from loraplex.platform.engines.event_buffer import READER_STALL_S
from loraplex.platform.engines.poison_memory import PoisonMemory
from loraplex.platform.evaluations.recording import RecordingQueue
from loraplex.platform.evaluations.suite_check import SuiteChecks
from loraplex.platform.inference.background_tasks import BackgroundTasks
from loraplex.platform.inference.prompting.chat_template import PromptRenderer
from loraplex.platform.inference.prompting.token_text import TokenText
from loraplex.platform.inference.structured_output.compile_checks import CompileChecks
from loraplex.platform.inference.structured_output.output_planner import OutputPlanner
from loraplex.platform.inference.structured_output.request_analysis import RequestAnalysis
from loraplex.platform.inference.structured_output.value_validation import ValueValidation
from loraplex.platform.observability.health import Health
from loraplex.platform.observability.request_stats import RequestRecorder
from loraplex.platform.parameters.json_object import BodyLimits
from loraplex.tenants.admission.controller import QuotaAdmissionController
from loraplex.tenants.api_keys.last_used import LastUsedTracker
from loraplex.tenants.database import Database
from loraplex.tenants.ledger.serving_cost import AcceleratorPrice
from loraplex.tenants.unit_of_work import PolicyPublisher
from loraplex.tenants.webhooks.encrypted_secrets import WebhookSecrets
from loraplex.tenants.webhooks.use_cases import WebhookRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Bounds of one gateway; times in seconds. `max_tokenizing` calls of `/v1/tokenize` run at once,
    `max_tokenizing_per_tenant` of one tenant. `max_in_flight` counts sequences: prompts times `n`.

    `max_completion_tokens` bounds prompts x n x max_tokens. `max_logprobs` bounds that times (1 + top_logprobs): a whole
    response is kept in memory, about 0.5 KB for each log-probability. `engine_restart_s`: how long a request that lost its engine
    waits for one. `max_buffered_body_bytes` is shared by the bodies of all
    tenants, see `web/transport/body_budget.py`. `allowed_origins`: the pages that may call `/v1`, see `web/transport/cross_origin.py`.
    """

    body: BodyLimits = field(default_factory=BodyLimits)
    max_buffered_body_bytes: int = 256 << 20
    grammar: constraints.SchemaLimits = field(default_factory=constraints.SchemaLimits)
    fast_forward: bool = True
    max_in_flight: int = 2048
    max_tokenizing: int = 16
    max_tokenizing_per_tenant: int = 4
    max_prompt_characters: int = 2_000_000
    max_completion_tokens: int = 131_072
    max_logprobs: int = 524_288
    queue_timeout_s: float | None = 120.0
    first_token_timeout_s: float | None = 600.0
    total_timeout_s: float | None = 1800.0
    engine_restart_s: float = 30.0
    reader_stall_s: float = READER_STALL_S
    allowed_origins: tuple[str, ...] = ()
    key_cache_s: float = 1.0
    known_caller_s: float = 300.0
    webhook_allow_private: bool = False
    audit_retention_days: int = 365
    accelerator_price: AcceleratorPrice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayDependencies:
    """What the routes of one gateway use. Join `background_tasks` before the stores are closed.

    `namespace_of`: tenant -> its 32-byte cache namespace.

    `derive_key`: byte strings, the first of which names the purpose -> 32 bytes keyed by the server secret.

    `currency_of`: the currency that a tenant is charged in now. `adapter_path`: (tenant, digest) -> folder of the blob, which is
    first fetched to this machine where needed; raises `StorageError` of adapters. `health` None: nothing probes this gateway, as in
    a test.
    """

    served_model_name: str
    database: Database
    engine: EngineClient
    prompts: PromptRenderer
    token_text: TokenText
    recorder: RequestRecorder
    request_analysis: RequestAnalysis
    compile_checks: CompileChecks
    value_validation: ValueValidation
    suite_checks: SuiteChecks
    admission_controller: QuotaAdmissionController
    namespace_of: Callable[[UUID], bytes]
    derive_key: Callable[..., bytes]
    uploads: Uploads
    adapter_path: Callable[[UUID, str], Awaitable[str]]
    config: ServingConfig = field(default_factory=ServingConfig)
    currency_of: Callable[[UUID], str] = lambda _: "USD"
    policy_publisher: PolicyPublisher | None = None
    addresses: ClientAddresses = field(default_factory=ClientAddresses)
    poison_memory: PoisonMemory = field(default_factory=PoisonMemory)
    key_use: LastUsedTracker = field(default_factory=LastUsedTracker)
    identity_provider: IdentityProvider | None = None
    mailed_links: MailedLinks | None = None
    background_tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    health: Health | None = None
    recordings: RecordingQueue = field(default_factory=RecordingQueue)

    def output_planner(self) -> OutputPlanner:
        """Build a planner of constrained output, with a cache of its own."""
        return OutputPlanner(
            self.config.grammar,
            self.prompts.special_tokens,
            self.request_analysis,
            self.compile_checks,
            self.value_validation,
        )

    @property
    def webhook_rules(self) -> WebhookRules:
        """What applies to the webhooks of every tenant."""
        return WebhookRules(WebhookSecrets(self.derive_key), self.config.webhook_allow_private)
