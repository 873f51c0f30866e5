"""The connector that vLLM loads: `kv_connector` `HypicConnector`, `kv_connector_module_path` `hypic_vllm.connector`.

Scheduler side: which requests begin from a composed state, and in which blocks. Worker side: `loading`. Nothing is saved, and
composed blocks leave vLLM's prefix cache with their request.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger

from hypic_vllm.claims import Claim, OfferError, RequestFacts, claim, read_offer
from hypic_vllm.facts import read_facts, read_memory
from hypic_vllm.gate import UnsupportedEngineError, check_engine
from hypic_vllm.loading import Load, Loader
from hypic_vllm.options import ConnectorOptions
from services.blob.revision import checkpoint_revision

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["HypicConnector"]

logger = init_logger("vllm.hypic")


@dataclass
class _Loads(KVConnectorMetadata):
    loads: list[Load]


class HypicConnector(KVConnectorBase_V1, SupportsHMA):
    """See `KVConnectorBase_V1`. Loads states between steps; saves none.

    Raises:
        UnsupportedEngineError, OptionError: at the start, for an engine or options that are not known to work.
    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(read_facts(vllm_config, kv_cache_config))
        self._options = ConnectorOptions.read(self._kv_transfer_config.kv_connector_extra_config)
        # Of the scheduler's side: claimed requests that are not finished, whose handles are spent; loads of the next step.
        self._claimed: dict[str, Claim] = {}
        self._tried: set[str] = set()
        self._loads: list[Load] = []
        # Of the worker's.
        self._loader: Loader | None = None

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """A claimed state is asked for once: what comes back here afterwards is computed by vLLM."""
        if request.request_id in self._tried:
            return 0, False
        try:
            offer = read_offer(request.kv_transfer_params)
            if offer is None:
                return 0, False
            is_plain = not (request.lora_request or request.mm_features or request.prompt_embeds is not None)
            facts = RequestFacts(request.num_prompt_tokens, num_computed_tokens, request.cache_salt or "", is_plain)
            claimed = claim(offer, facts, self._options.workers)
        except OfferError as error:
            self._tried.add(request.request_id)
            logger.warning("request %s is computed by vLLM: %s", request.request_id, error)
            return 0, False
        self._claimed[request.request_id] = claimed
        return claimed.num_tokens, True

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Every group: a state is written whole, and zeroing its blocks would race with that."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The blocks are there: load in the next step."""
        if num_external_tokens == 0:
            return
        claimed = self._claimed[request.request_id]
        self._tried.add(request.request_id)
        self._loads.append(
            Load(
                request.request_id,
                claimed.offer.address,
                claimed.offer.handle,
                tuple(request.prompt_token_ids[: claimed.num_tokens]),
                tuple(tuple(ids) for ids in blocks.get_block_ids()),
            )
        )

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """What the worker's side begins with this step."""
        loads, self._loads = self._loads, []
        return _Loads(loads)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Composed blocks leave the prefix cache, in which only this request's salt could have found them."""
        self._tried.discard(request.request_id)
        if self._claimed.pop(request.request_id, None) is not None and self._kv_cache_manager is not None:
            self._kv_cache_manager.evict_blocks({block for ids in block_ids for block in ids if block})
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        """The engine's memory is there."""
        memory = read_memory(self._vllm_config, self._kv_cache_config)
        options = self._options
        self._loader = Loader(memory, self._revision(), options.limit_bytes, options.seconds)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:  # noqa: ANN401
        """Begin the loads of this step."""
        metadata = self._get_connector_metadata()
        if self._loader is not None and isinstance(metadata, _Loads):
            for load in metadata.loads:
                self._loader.start(load)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Write what has come; requests that ended meanwhile give up theirs."""
        if self._loader is None:
            return KVConnectorTransferResults()
        self._loader.give_up(finished_req_ids)
        outcomes = self._loader.collect()
        for request_id, reason in outcomes.failed.items():
            logger.warning("request %s is computed by vLLM: %s", request_id, reason)
        return KVConnectorTransferResults(finished_recving=outcomes.ended, failed_recving=set(outcomes.failed))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request runs when all of its state has been written."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def shutdown(self) -> None:
        """End what is on its way."""
        if self._loader is not None:
            self._loader.close()

    def _revision(self) -> str:
        if self._options.model_revision:
            return self._options.model_revision
        model = Path(self._vllm_config.model_config.model)
        try:
            return checkpoint_revision(model)
        except OSError as error:
            raise UnsupportedEngineError(
                f"the model's revision cannot be worked out from {model} ({error}); set"
                " kv_connector_extra_config.model_revision to what the workers describe"
            ) from error
