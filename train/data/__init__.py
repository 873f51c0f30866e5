"""Generated multi-document question answering, from fictional things and real countries."""

from train.data.generator import questions
from train.data.prompts import PromptEncoder
from train.data.types import Document, Evidence, Question, QuestionType, Source, Split

__all__ = [
    "Document",
    "Evidence",
    "PromptEncoder",
    "Question",
    "QuestionType",
    "Source",
    "Split",
    "questions",
]
