"""What the question answering scripts share: questions on contexts, features with a stride, and their metric."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import parts
from datasets import Dataset, DatasetDict


@dataclass
class AnswerArguments(parts.DataArguments):
    doc_stride: int = field(default=6, metadata={"help": "Tokens that two parts of a context have in common."})
    version_2_with_negative: bool = field(default=False, metadata={"help": "Some questions have no answer."})
    n_best_size: int = field(default=5, metadata={"help": "How many starts and ends to look at."})
    max_answer_length: int = field(default=6, metadata={"help": "Tokens at most in an answer."})
    null_score_diff_threshold: float = field(default=0.0, metadata={"help": "No answer if it is better by this."})


class Answers(NamedTuple):
    """What is handed to compute_metrics after post-processing."""

    predictions: list
    label_ids: list


def make_rows(count, start=0, negative=False):
    rows = []
    for number in range(start, start + count):
        words = parts.sentence(number, 14 + number % 9).split()
        first = number % 8
        text = " ".join(words[first : first + 2])
        answers = {"text": [text], "answer_start": [len(" ".join([*words[:first], ""]))]}
        if negative and number % 3 == 0:
            answers = {"text": [], "answer_start": []}
        question = parts.sentence(number + 3, 3)
        rows.append({"id": f"q{number}", "context": " ".join(words), "question": question, "answers": answers})
    return Dataset.from_list(rows)


def make_questions(data_args):
    negative = data_args.version_2_with_negative
    sizes = {"train": (data_args.train_samples, 0), "validation": (9, 40), "test": (6, 60)}
    return DatasetDict({name: make_rows(*size, negative=negative) for name, size in sizes.items()})


def encode(tokenizer, rows, data_args):
    """Tokens of questions and contexts; long contexts give several samples."""
    encoded = tokenizer(
        rows["question"],
        rows["context"],
        truncation="only_second",
        max_length=data_args.max_seq_length,
        stride=data_args.doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding="max_length" if data_args.pad_to_max_length else False,
    )
    return encoded, encoded.pop("overflow_to_sample_mapping")


def answer_tokens(encoded, place, answers, fallback):
    """First and last token of the answer, or `fallback` twice where it is not within this part of the context."""
    if not answers["text"]:
        return fallback, fallback
    first = answers["answer_start"][0]
    last = first + len(answers["text"][0])
    inside = [
        token
        for token, (low, high) in enumerate(encoded["offset_mapping"][place])
        if encoded.sequence_ids(place)[token] == 1 and low >= first and high <= last
    ]
    offsets = encoded["offset_mapping"][place]
    whole = inside and offsets[inside[0]][0] == first and offsets[inside[-1]][1] == last
    return (inside[0], inside[-1]) if whole else (fallback, fallback)


def context_offsets(encoded, place):
    """Offsets of the context's tokens, None for the others."""
    kinds = encoded.sequence_ids(place)
    return [offset if kinds[k] == 1 else None for k, offset in enumerate(encoded["offset_mapping"][place])]


def features_of(examples, features):
    """For each example the places of its features."""
    places = {identity: number for number, identity in enumerate(examples["id"])}
    found = {number: [] for number in places.values()}
    for place, identity in enumerate(features["example_id"]):
        found[places[identity]].append(place)
    return found


def answer_metric(prediction):
    """Exact matches, and the words in common."""
    scores = []
    for found, right in zip(prediction.predictions, prediction.label_ids, strict=True):
        text = (right["answers"]["text"] or [""])[0]
        common = sum((Counter(found["prediction_text"].split()) & Counter(text.split())).values())
        total = len(found["prediction_text"].split()) + len(text.split())
        scores.append((found["prediction_text"] == text, 2 * common / total if total else 1.0))
    exact, common = zip(*scores, strict=True)
    return {"exact_match": 100 * sum(exact) / len(scores), "f1": 100 * sum(common) / len(scores)}
