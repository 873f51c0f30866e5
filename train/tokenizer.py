"""Trains the byte-level BPE of the demo model on generated text.

python -m train.tokenizer --out models/demo
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from train.data.factbook import load_sections
from train.data.generator import questions
from train.data.prompts import CHAT_TEMPLATE, END_OF_TEXT, MESSAGE_END, SPECIAL_TOKENS, document_text
from train.data.types import Split

VOCABULARY_SIZE = 6144
_SEED = 7
_SCENES = 3000
_FACTBOOK_CHARACTERS = 350
# Capitalised words and digits never merge with the blank before them, so that a name has the
# same ids at the start of a reply as inside a document.
_PATTERN = r"[A-Z][a-z]+|[A-Z]+| ?[a-z]+|\d{1,2}| ?[^\sA-Za-z\d]+|\s"


def _texts() -> Iterator[str]:
    for question in questions(_SEED, _SCENES, Split.TRAIN):
        yield question.system
        yield from map(document_text, question.documents)
        yield question.question
        yield question.answer
    for section in load_sections(Split.TRAIN):
        yield section.title
        yield section.text[:_FACTBOOK_CHARACTERS]


def train_tokenizer() -> Tokenizer:
    """A tokenizer whose text carries no special tokens of its own."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": MESSAGE_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the tokenizer files")
    write_tokenizer(parser.parse_args().out)


if __name__ == "__main__":
    main()
