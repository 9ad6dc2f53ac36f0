"""colpali-engine's Trainer: models that find pages by a question, trained with evaluations, saved, and resumed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from colpali_engine.collators import VisualRetrieverCollator
from colpali_engine.data.dataset import ColPaliEngineDataset
from colpali_engine.loss import ColbertLoss
from colpali_engine.models import ColModernVBert
from colpali_engine.trainer.contrastive_trainer import ContrastiveTrainer
from colpali_engine.utils.processing_utils import BaseVisualRetrieverProcessor
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import BatchFeature, ModernVBertConfig, TrainingArguments

from tests.adapters.downstream import full_run
from tests.adapters.downstream.tiny_bert import MARKS, tokenizer
from tests.adapters.downstream.tiny_language import WORDS, sentence

IMAGE = len(MARKS) + len(WORDS)


class Processor(BaseVisualRetrieverProcessor):
    """Pictures of 8 x 8 points, each read as four tokens."""

    query_augmentation_token = " [MASK]"

    def process_images(self, images: list[Image.Image]) -> BatchFeature:
        pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 for image in images]
        tokens = torch.full((len(images), 4), IMAGE)
        found = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        return BatchFeature({**found, "pixel_values": torch.stack(pixels)[:, None]})

    def process_texts(self, texts: list[str]) -> BatchFeature:
        found = tokenizer()(texts, padding="max_length", max_length=20, truncation=True, return_tensors="pt")
        return BatchFeature({name: found[name] for name in ("input_ids", "attention_mask")})

    def score(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.score_multi_vector(*args, **kwargs)

    def get_n_patches(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return 2, 2


def model() -> ColModernVBert:
    torch.manual_seed(1)
    marks = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return ColModernVBert(
        ModernVBertConfig(
            text_config={**sizes, "vocab_size": IMAGE + 1, "num_hidden_layers": 2, **marks},
            vision_config={**sizes, "num_hidden_layers": 1, "image_size": 8, "patch_size": 2},
            pixel_shuffle_factor=2,
            image_token_id=IMAGE,
        )
    )


def picture(index: int) -> Image.Image:
    return Image.fromarray(np.full((8, 8, 3), index * 5 + 1, np.uint8))


def pages(first: int, end: int, pictured: bool) -> ColPaliEngineDataset:
    page = picture if pictured else partial(sentence, length=5)
    rows = [{"query": sentence(index), "pos_target": page(index)} for index in range(first, end)]
    return ColPaliEngineDataset(rows if pictured else Dataset.from_list(rows))


def live(
    folder: Path, pictured: bool = False, lora: bool = False, two_sets: bool = False, **settings: Any
) -> dict[str, Any]:
    def build(name: str) -> ContrastiveTrainer:
        plain = model()
        adapter = LoraConfig(r=2, target_modules=["Wqkv"], modules_to_save=["custom_text_proj"])
        train = pages(0, 20, pictured), pages(20, 40, pictured)
        return ContrastiveTrainer(
            model=get_peft_model(plain, adapter) if lora else plain,
            args=TrainingArguments(
                str(folder / name),
                **{**full_run.SETTINGS, "prediction_loss_only": True, "remove_unused_columns": False, **settings},
            ),
            train_dataset=list(train) if two_sets else pages(0, 40, pictured),
            eval_dataset=pages(40, 48, pictured),
            data_collator=VisualRetrieverCollator(Processor(), max_length=20),
            loss_func=ColbertLoss(),
            is_vision_model=True,
        )

    # What it saves of a whole model has other names, by which transformers does not find the weights again.
    return full_run.record(build, folder, alike=lora)


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "texts": live,
    "pictures_best_at_end": partial(live, pictured=True, load_best_model_at_end=True),
    "two_sets": partial(live, two_sets=True),
    "lora": partial(live, lora=True),
}
