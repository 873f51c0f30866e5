"""A checkpoint directory as something to serve: revision, tokenizer, template, special ids, profile."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from tokenizers import Tokenizer

from services.blob.revision import checkpoint_revision
from services.worker.calibration import CalibrationCard, CalibrationError, load_card, mismatch
from services.worker.models.checkpoint import read_json
from services.worker.models.errors import CheckpointError
from services.worker.models.registry import read_checkpoint_spec
from services.worker.models.spec import ModelSpec
from services.worker.profile import Profile, ProfileError, load_profile
from services.worker.settings import WorkerSettings

__all__ = ["CARD_FILE", "Calibration", "ServedModel", "read_served_model"]

CARD_FILE = "calibration.json"

_LARGEST_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """The card that speaks of what is served, or why none does."""

    card: CalibrationCard | None = None
    refusal: str = "no calibration card"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What `Describe` answers, and what the engine needs beside the weights. dtype_bytes: of a number of a key or value."""

    name: str
    revision: str
    spec: ModelSpec
    profile: Profile
    profile_digest: str
    prime_ids: tuple[int, ...]
    tokenizer_json: bytes
    chat_template: str
    context_length: int
    stop_token_ids: tuple[int, ...]
    bos_token: str
    eos_token: str
    dtype_bytes: int
    calibration: Calibration

    @property
    def state_bytes(self) -> int:
        """What a segment state weighs beside its body's tokens."""
        return sum(state.plane_bytes(self.dtype_bytes) for state in self.spec.states)

    @property
    def token_bytes(self) -> int:
        """What a token of a body weighs."""
        return self.spec.token_bytes(self.dtype_bytes)


def read_served_model(settings: WorkerSettings, revision: str | None = None) -> ServedModel:
    """Read everything but the weights; `revision` where another rank has read them for it already.

    Raises:
        CheckpointError: a file is missing or malformed.
        ProfileError: the profile is malformed.
    """
    directory = settings.checkpoint
    spec = read_checkpoint_spec(directory)
    tokenizer_json = _read(directory / "tokenizer.json")
    tokenizer = _read_tokenizer(directory / "tokenizer.json", tokenizer_json, spec)
    tokenizer_config = read_json(directory / "tokenizer_config.json")
    profile_path = settings.profile or directory / "profile.toml"
    profile = load_profile(profile_path) if settings.profile or profile_path.exists() else Profile()
    revision = revision or _revision(directory, settings.random_seed)
    eos_token = _token_text(tokenizer_config.get("eos_token"))
    context_length = min(settings.context_length or spec.context_length, spec.context_length)
    prime_ids = tuple(tokenizer.encode(profile.prime, add_special_tokens=False).ids)
    if len(prime_ids) >= context_length:
        raise ProfileError(
            f"{profile_path}: prime has {len(prime_ids)} tokens of a context of {context_length}; shorten it"
        )
    return ServedModel(
        name=settings.model_name or directory.resolve().name,
        revision=revision,
        spec=spec,
        profile=profile,
        profile_digest=profile.digest(revision, settings.dtype),
        prime_ids=prime_ids,
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(directory, tokenizer_config),
        context_length=context_length,
        stop_token_ids=_stop_ids(directory, tokenizer, eos_token),
        bos_token=_token_text(tokenizer_config.get("bos_token")),
        eos_token=eos_token,
        dtype_bytes=4 if settings.dtype == "float32" else 2,
        calibration=_read_calibration(settings, revision, profile),
    )


def _read_calibration(settings: WorkerSettings, revision: str, profile: Profile) -> Calibration:
    """A card that cannot be used stops nothing: what is served is the same, only nobody knows what it loses."""
    path = settings.calibration or settings.checkpoint / CARD_FILE
    if not settings.calibration and not path.exists():
        return Calibration()
    try:
        card = load_card(path)
    except CalibrationError as error:
        return Calibration(refusal=f"{path.name}: {error}")
    refusal = mismatch(card, revision, settings.dtype, profile)
    return Calibration(refusal=f"{path.name}: {refusal}") if refusal else Calibration(card, "")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; the checkpoint needs it") from error


def _read_text(path: Path) -> str:
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: no UTF-8 text ({error}); download the file again") from error


def _read_tokenizer(path: Path, content: bytes, spec: ModelSpec) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing more precise
        fault = " ".join(str(error).split())
        raise CheckpointError(f"{path}: not readable as a tokenizer ({fault}); download the file again") from error
    largest_id = max(tokenizer.get_vocab().values(), default=0)
    if largest_id >= spec.vocab_size:
        raise CheckpointError(
            f"{path}: token id {largest_id} is outside the vocab_size of config.json, {spec.vocab_size}; "
            "download tokenizer and weights of one revision"
        )
    return tokenizer


def _revision(directory: Path, random_seed: int | None) -> str:
    """Drawn weights have a revision of their own, whatever lies in the checkpoint."""
    try:
        found = checkpoint_revision(directory)
        return found if random_seed is None else blake3(f"{found} random:{random_seed}".encode()).hexdigest()
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: not readable ({error}); download the file again, or delete it"
        ) from error


def _token_text(token: Any) -> str:  # noqa: ANN401 # a string, or an object with the string inside
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    template = _read_text(path) if path.exists() else tokenizer_config.get("chat_template")
    if not isinstance(template, str) or not template:
        raise CheckpointError(
            f"{directory}: no chat template; add chat_template.jinja or chat_template in tokenizer_config.json"
        )
    return template


def _stop_ids(directory: Path, tokenizer: Tokenizer, eos_token: str) -> tuple[int, ...]:
    """End tokens of the generation config, the model config and the tokenizer."""
    found: set[int] = set()
    for path in (directory / "generation_config.json", directory / "config.json"):
        if path.exists():
            found.update(_end_ids(path))
    eos_id = tokenizer.token_to_id(eos_token) if eos_token else None
    return tuple(sorted(found if eos_id is None else found | {eos_id}))


def _end_ids(path: Path) -> list[int]:
    value = read_json(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and 0 <= each <= _LARGEST_ID for each in ids):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, not {value!r}; correct it")
    return ids
