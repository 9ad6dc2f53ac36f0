"""The shape of run_speech_recognition_ctc.py: a vocabulary made from the texts, and letters by CTC."""

import json
import os
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path

import numpy as np
import parts
import transformers

RATE = 1600
LETTERS = "abcde"


def text_of(i):
    return " ".join(LETTERS[(i * (place + 1) + place) % len(LETTERS)] for place in range(2 + i % 3))


def sound_of(i):
    return np.concatenate([np.sin(np.arange(400) * 0.1 * (1 + LETTERS.index(one))) for one in text_of(i).split()])


def collate(processor, features):
    """Pads sounds and letters, each to its own length; letters that are padding have no loss."""
    sounds = [{"input_values": feature["input_values"]} for feature in features]
    batch = processor.feature_extractor.pad(sounds, return_tensors="pt")
    labels = processor.tokenizer.pad([{"input_ids": feature["labels"]} for feature in features], return_tensors="pt")
    batch["labels"] = labels["input_ids"].masked_fill(labels.attention_mask.ne(1), -100)
    return batch


def make_processor(folder, texts):
    letters = sorted({letter for text in texts for letter in text})
    vocabulary = {letter: number for number, letter in enumerate(["|", *letters[1:], "[UNK]", "[PAD]"])}
    os.makedirs(folder, exist_ok=True)
    Path(folder, "vocab.json").write_text(json.dumps(vocabulary))
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "word_delimiter_token": "|"}
    tokenizer = transformers.Wav2Vec2CTCTokenizer.from_pretrained(folder, **names)
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=True)
    processor = transformers.Wav2Vec2Processor(feature_extractor=extractor, tokenizer=tokenizer)
    processor.save_pretrained(folder)
    return processor


def main():
    model_args, data_args, training_args, checkpoint = parts.begin()
    raw = parts.make_data(data_args, sound=lambda i: sound_of(i).tolist(), text=text_of)
    processor = make_processor(training_args.output_dir, raw["train"]["text"])
    tokenizer = processor.tokenizer
    config = transformers.Wav2Vec2Config(
        **parts.encoder_sizes(model_args.hidden_size),
        **{"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 4], "feat_extract_norm": "group"},
        **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.1},
        **{"mask_time_prob": 0.1, "mask_time_length": 2, "mask_feature_prob": 0.1, "mask_feature_length": 4},
        ctc_zero_infinity=True,
        pad_token_id=tokenizer.pad_token_id,
        vocab_size=len(tokenizer),
    )
    model = transformers.Wav2Vec2ForCTC(config)
    model.freeze_feature_encoder()

    def encode(rows):
        sounds = [processor.feature_extractor(one, sampling_rate=RATE).input_values[0] for one in rows["sound"]]
        return {"input_values": sounds, "labels": tokenizer(rows["text"]).input_ids}

    def best_letters(logits, labels):
        return logits.argmax(dim=-1), labels

    def compute_metrics(prediction):
        prediction.predictions = prediction.predictions[0]
        for ids in (prediction.predictions, prediction.label_ids):
            ids[ids == -100] = tokenizer.pad_token_id
        found = tokenizer.batch_decode(prediction.predictions)
        right = tokenizer.batch_decode(prediction.label_ids, group_tokens=False)
        pairs = zip(found, right, strict=True)
        return {"similar": float(np.mean([SequenceMatcher(None, *pair).ratio() for pair in pairs]))}

    trainer = transformers.Trainer(
        model=model,
        data_collator=partial(collate, processor),
        args=training_args,
        compute_metrics=compute_metrics,
        **parts.splits(parts.prepare(training_args, raw, encode)),
        processing_class=processor,
        preprocess_logits_for_metrics=best_letters,
    )
    parts.finish(trainer, checkpoint, "automatic-speech-recognition", tags=["automatic-speech-recognition"])
