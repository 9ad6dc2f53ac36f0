"""Tones, one a letter, with the text that they spell; and what the speech recognition scripts share."""

import json
import os
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset, DatasetDict

RATE = 1600
LETTERS = "abcde"


@dataclass
class SoundArguments:
    train_samples: int = field(default=14, metadata={"help": "How many sounds to make for training."})
    max_length_seconds: float = field(default=0.4, metadata={"help": "Sounds are cut to this, at random."})
    max_duration_in_seconds: float = field(default=20.0, metadata={"help": "Longer sounds are left out."})
    min_duration_in_seconds: float = field(default=0.0, metadata={"help": "Shorter sounds are left out."})
    word_delimiter_token: str = field(default="|", metadata={"help": "Stands for a space."})
    target_language: str | None = field(default=None, metadata={"help": "Which adapter to train."})
    eval_metrics: list[str] = field(default_factory=lambda: ["wer"], metadata={"help": "wer, cer or both."})


def make_sound(number):
    random = np.random.RandomState(number)
    letters = [LETTERS[(number * (place + 1) + place) % len(LETTERS)] for place in range(2 + number % 3)]
    tones = [np.sin(np.arange(400) * 0.1 * (1 + LETTERS.index(letter))) for letter in letters]
    return np.concatenate(tones) + 0.01 * random.randn(400 * len(letters)), " ".join(letters)


def make_sounds(count, evaluation=7):
    def rows(numbers):
        made = [make_sound(number) for number in numbers]
        columns = {"audio": [{"array": sound.tolist(), "sampling_rate": RATE} for sound, _ in made]}
        columns |= {"text": [text.upper() + "." for _, text in made], "label": [number % 3 for number in numbers]}
        return Dataset.from_dict(columns)

    return DatasetDict(train=rows(range(count)), eval=rows(range(100, 100 + evaluation)))


def write_vocabulary(data, folder, delimiter, language=None):
    """Write vocab.json with every letter of the texts, as the CTC examples do."""
    texts = [text for split in data.values() for text in split["target_text"]]
    letters = {letter: number for number, letter in enumerate(sorted(set("".join(texts))))}
    letters[delimiter] = letters.pop(" ")
    letters |= {"[UNK]": len(letters), "[PAD]": len(letters) + 1}
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "vocab.json"), "w") as file:
        json.dump(letters if language is None else {language: letters}, file)


def errors(found, right):
    """Word and letter errors by Levenshtein's distance."""

    def rate(pairs):
        return sum(distance(a, b) for a, b in pairs) / max(sum(len(b) for _, b in pairs), 1)

    pairs = list(zip(found, right, strict=True))
    return {"wer": rate([(a.split(), b.split()) for a, b in pairs]), "cer": rate(pairs)}


def distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def speech_sizes(**more):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    layers = {"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 4]}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    return sizes | layers | positions | {"feat_extract_norm": "group", "mask_time_length": 2} | more
