"""Small generated pictures: a bright square in one of four corners."""

import numpy as np
import parts
import torch

SIZE = 16
SQUARE = 5


def make_pictures(data_args, **settings):
    """Pictures as nested lists, the number of the corner, and row and column of the square."""

    def place(i):
        return [i % 4 // 2 * 8 + i % 3, i % 2 * 8 + i % 2]

    def image(i):
        picture, (row, column) = np.random.RandomState(i).rand(SIZE, SIZE, 3), place(i)
        picture[row : row + SQUARE, column : column + SQUARE] += 1.0
        return picture.tolist()

    return parts.make_data(data_args, image=image, place=place, label=lambda i: i % 4, **settings)


def pixels(image):
    return torch.tensor(np.array(image), dtype=torch.float32).permute(2, 0, 1).sub(0.5).div(0.5)


def flipped_at_random(image):
    return pixels(image).flip(-1) if torch.rand(1).item() < 0.5 else pixels(image)


def vision_sizes():
    return {**parts.encoder_sizes(), "image_size": SIZE, "patch_size": 4}
