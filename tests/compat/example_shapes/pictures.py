"""Small generated pictures: a bright square in one of four corners, with its class, box and masks."""

from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import Dataset, DatasetDict

SIZE = 16


@dataclass
class PictureArguments:
    train_samples: int = field(default=18, metadata={"help": "How many pictures to make for training."})
    train_val_split: float | None = field(default=0.4, metadata={"help": "Share of the pictures to evaluate on."})
    mask_ratio: float = field(default=0.75, metadata={"help": "Share of the patches to mask."})
    mask_patch_size: int = field(default=8, metadata={"help": "Pixels on a side of a masked square."})


def make_picture(number):
    random = np.random.RandomState(number)
    picture = random.rand(SIZE, SIZE, 3)
    corner = number % 4
    row, column = corner // 2 * 8 + number % 3, corner % 2 * 8 + number % 2
    picture[row : row + 5, column : column + 5] += 1.0
    return picture, corner, (row, column)


def make_pictures(count, split):
    """Rows with the picture as nested lists, its class, and where the square is."""
    made = [make_picture(number) for number in range(count)]
    rows = Dataset.from_dict(
        {
            "image": [picture.tolist() for picture, _, _ in made],
            "label": [corner for _, corner, _ in made],
            "place": [list(place) for _, _, place in made],
        }
    )
    halves = rows.train_test_split(split, seed=7)
    return DatasetDict(train=halves["train"], validation=halves["test"])


def pixels(image):
    """`(3, SIZE, SIZE)`, centred."""
    return torch.tensor(np.array(image), dtype=torch.float32).permute(2, 0, 1).sub(0.5).div(0.5)


def flipped_at_random(image):
    values = pixels(image)
    return values.flip(-1) if torch.rand(1).item() < 0.5 else values


def mask_of(place):
    """1 where the square is, `(SIZE, SIZE)`."""
    mask = torch.zeros(SIZE, SIZE, dtype=torch.long)
    mask[place[0] : place[0] + 5, place[1] : place[1] + 5] = 1
    return mask


def vision_sizes(**more):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return sizes | {"image_size": SIZE, "patch_size": 4} | more
