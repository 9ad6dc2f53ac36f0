"""What the two CTC scripts share: sounds and letters, padded apart from each other."""

import re
from dataclasses import dataclass

import numpy as np
from sounds import RATE, errors, make_sounds, write_vocabulary
from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor


@dataclass
class LetterCollator:
    """Pads sounds and letters, each to its own length; letters that are padding have no loss."""

    processor: Wav2Vec2Processor
    padding: bool | str = "longest"

    def __call__(self, features):
        sounds = [{"input_values": feature["input_values"]} for feature in features]
        batch = self.processor.feature_extractor.pad(sounds, padding=self.padding, return_tensors="pt")
        texts = [{"input_ids": feature["labels"]} for feature in features]
        labels = self.processor.tokenizer.pad(texts, padding=self.padding, return_tensors="pt")
        batch["labels"] = labels["input_ids"].masked_fill(labels.attention_mask.ne(1), -100)
        return batch


def prepare(data_args, training_args):
    """The processor, saved in the output folder, and the data as it encodes them."""
    data = make_sounds(data_args.train_samples)
    with training_args.main_process_first(desc="dataset map special characters removal"):
        data = data.map(lambda row: {"target_text": re.sub("[.]", "", row["text"]).lower() + " "})
    write_vocabulary(data, training_args.output_dir, data_args.word_delimiter_token, data_args.target_language)
    tokenizer = Wav2Vec2CTCTokenizer.from_pretrained(
        training_args.output_dir,
        unk_token="[UNK]",
        pad_token="[PAD]",
        word_delimiter_token=data_args.word_delimiter_token,
        target_lang=data_args.target_language,
    )
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=True)
    extractor.save_pretrained(training_args.output_dir)
    tokenizer.save_pretrained(training_args.output_dir)
    processor = Wav2Vec2Processor(feature_extractor=extractor, tokenizer=tokenizer)

    def encode(row):
        sound = extractor(row["audio"]["array"], sampling_rate=row["audio"]["sampling_rate"]).input_values[0]
        labels = tokenizer(row["target_text"]).input_ids
        return {"input_values": sound, "input_length": len(sound), "labels": labels}

    low, high = (RATE * s for s in (data_args.min_duration_in_seconds, data_args.max_duration_in_seconds))
    with training_args.main_process_first(desc="dataset map preprocessing"):
        data = data.map(encode, remove_columns=data["train"].column_names)
        return processor, data.filter(lambda length: low < length < high, input_columns=["input_length"])


def make_metric(processor, names):
    def compute_metrics(prediction):
        ids = prediction.predictions
        ids = np.argmax(ids, axis=-1) if ids.ndim == 3 else ids
        prediction.label_ids[prediction.label_ids == -100] = processor.tokenizer.pad_token_id
        found = processor.tokenizer.batch_decode(np.where(ids == -100, processor.tokenizer.pad_token_id, ids))
        right = processor.tokenizer.batch_decode(prediction.label_ids, group_tokens=False)
        return {name: value for name, value in errors(found, right).items() if name in names}

    return compute_metrics
