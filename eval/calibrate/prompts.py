"""A file of prompts as a checkpoint's ids, and the primes that its segments are captured behind."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3
from tokenizers import Tokenizer

from eval.calibrate.candidates import PrimeText
from eval.chat_prompts import ChatReader
from eval.checks import EvaluationError
from eval.live.questions import LiveQuestion, read_live_questions
from eval.pack import NumberedPrompt
from eval.settings import Prime
from services.cli.one_prompt import describe_model
from services.router.domain.request import Document, PromptError
from services.worker.adapters.served_model import ServedModel
from services.worker.settings import WorkerSettings

__all__ = ["PromptFile", "chat_reader", "read_primes", "read_prompt_file", "to_prompts"]

# Says nothing of any task.
_NEUTRAL_SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True, slots=True)
class PromptFile:
    """questions: in the order in which they are asked, each with its number in the file from 0.

    digest: of the file's bytes; system: of the deployment, empty where none is known; system_digest: of the text of the
    file that was given for it, None without one.
    """

    name: str
    digest: str
    questions: tuple[tuple[int, LiveQuestion], ...]
    system: str
    system_digest: str | None


def read_prompt_file(path: Path, system_path: Path | None) -> PromptFile:
    """The prompts in an order drawn by a fixed seed, so that those of a run cut short are a sample of the whole file.

    A prompt without `system` has the deployment's; the deployment's is the one given, else what every prompt names.

    Raises:
        LiveEvaluationError: the file of prompts cannot be used; the message names the line.
        EvaluationError: the system prompt cannot be read.
    """
    questions = read_live_questions(path)
    system = _read_system(system_path)
    named = {question.system for question in questions}
    if system is None and len(named) == 1:
        system = named.pop()
    numbered = [(n, replace(own, system=own.system or system or "")) for n, own in enumerate(questions)]
    random.Random(0).shuffle(numbered)
    return PromptFile(
        name=path.name,
        digest=blake3(path.read_bytes()).hexdigest(),
        questions=tuple(numbered),
        system=system or "",
        system_digest=None if system_path is None else blake3((system or "").encode()).hexdigest(),
    )


def _read_system(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"--system {path}: not readable as text ({error}); name another file") from error
    if not text:
        raise EvaluationError(f"--system {path}: is empty; leave the option out")
    return text


def chat_reader(settings: WorkerSettings, served: ServedModel, tokens: int) -> ChatReader:
    """Assembles as the router does; whatever is long enough for some window is a document.

    Raises:
        CheckpointError: nothing says where replies end.
        ModelRefusedError: the template or tokenizer fails the start-up check.
    """
    profile = replace(served.profile, seam_window=0, seam_share=0.0)
    model = describe_model(settings, replace(served, profile=profile))
    return ChatReader(settings.checkpoint, model, tokens)


def read_primes(reader: ChatReader, served: ServedModel, system: str) -> dict[Prime, PrimeText]:
    """The capture variants: none, the opening of a user message, behind a neutral system prompt, behind the deployment's,
    and what the profile names. Of equal ones the first.

    Raises:
        EvaluationError: the system prompt names a control token, which a profile would turn into one.
    """
    tokenizer = Tokenizer.from_str(served.tokenizer_json.decode())
    wanted = {Prime.NONE: (), Prime.START: reader.start(), Prime.NEUTRAL: reader.opening(_NEUTRAL_SYSTEM)}
    if system:
        wanted[Prime.SYSTEM] = reader.opening(system)
    found: dict[Prime, PrimeText] = {}
    for kind, token_ids in wanted.items():
        own = _as_profile_names_it(tokenizer, token_ids)
        if own.text not in (other.text for other in found.values()):
            found[kind] = own
    if served.profile.prime not in (own.text for own in found.values()):
        found[Prime.PROFILE] = PrimeText(served.profile.prime, served.prime_ids)
    return found


def _as_profile_names_it(tokenizer: Tokenizer, token_ids: Sequence[int]) -> PrimeText:
    """The ids that a worker makes of the text; they may part words elsewhere than the prompt's, never control tokens."""
    text = tokenizer.decode(list(token_ids), skip_special_tokens=False)
    again = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    before, after = ([each for each in ids if each in special] for ids in (token_ids, again))
    if before != after:
        raise EvaluationError(
            "--system: the text names a control token, and a profile's prime would hold the token itself; take it out"
        )
    return PrimeText(text, again)


def to_prompts(reader: ChatReader, file: PromptFile) -> tuple[list[NumberedPrompt], list[str]]:
    """The prompts as ids, and what was left out and why.

    Raises:
        EvaluationError: nothing is left.
    """
    prompts: list[NumberedPrompt] = []
    left_out: list[str] = []
    for number, question in file.questions:
        documents = [Document(own["text"], own.get("title", "")) for own in question.documents]
        try:
            prompt = reader.assemble(question.system, question.question, documents)
        except PromptError as error:
            left_out.append(f"prompt {number}: {error}")
            continue
        if prompt is None:
            left_out.append(f"prompt {number}: no document is long enough for a segment")
        else:
            prompts.append(NumberedPrompt(number, prompt))
    if not prompts:
        raise EvaluationError(f"--prompts {file.name}: no prompt can be asked; the first: {left_out[0]}")
    return prompts, left_out
