"""The shape of run_speech_recognition_seq2seq.py: Whisper, whose targets lose their first token in the collator."""

from dataclasses import dataclass
from typing import Any

import parts
from generation import decode
from sounds import LETTERS, SoundArguments, errors, make_sounds
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)


@dataclass
class SpeechCollator:
    """Pads sounds and texts; the token that starts the decoder is cut off, since the model puts it there again."""

    extractor: Any
    tokenizer: Any
    decoder_start_token_id: int

    def __call__(self, features):
        sounds = [{"input_features": feature["input_features"]} for feature in features]
        batch = self.extractor.pad(sounds, return_tensors="pt")
        padded = self.tokenizer.pad([{"input_ids": feature["labels"]} for feature in features], return_tensors="pt")
        labels = padded["input_ids"].masked_fill(padded.attention_mask.ne(1), -100)
        batch["labels"] = labels[:, 1:] if (labels[:, 0] == self.decoder_start_token_id).all() else labels
        return batch


def make_model(tokenizer, extractor):
    start, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    stacks = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=extractor.feature_size,
        max_source_positions=extractor.nb_max_frames // 2,
        max_target_positions=32,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=start,
        decoder_start_token_id=start,
        eos_token_id=end,
        begin_suppress_tokens=None,
        suppress_tokens=None,
        **stacks,
    )
    return WhisperForConditionalGeneration(config)


def main():
    _, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, SoundArguments, Seq2SeqTrainingArguments
    )
    tokenizer = parts.word_tokenizer(*LETTERS)
    extractor = WhisperFeatureExtractor(feature_size=8, sampling_rate=1600, hop_length=40, chunk_length=1, n_fft=80)
    model = make_model(tokenizer, extractor)
    model.model.encoder._freeze_parameters()

    def encode(row):
        sound = row["audio"]
        features = extractor(sound["array"], sampling_rate=sound["sampling_rate"]).input_features[0]
        labels = tokenizer(row["text"].lower().replace(".", "")).input_ids
        return {"input_features": features, "input_length": len(sound["array"]), "labels": labels}

    data = make_sounds(data_args.train_samples)
    with training_args.main_process_first(desc="dataset map pre-processing"):
        data = data.map(encode, remove_columns=data["train"].column_names)

    def compute_metrics(prediction):
        return {
            "wer": errors(decode(tokenizer, prediction.predictions), decode(tokenizer, prediction.label_ids))["wer"]
        }

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        **parts.splits(data),
        processing_class=extractor,
        data_collator=SpeechCollator(extractor, tokenizer, model.config.decoder_start_token_id),
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )
    parts.train(trainer, checkpoint)
    parts.evaluate(
        trainer, max_length=training_args.generation_max_length, num_beams=training_args.generation_num_beams
    )
    parts.describe(trainer, "automatic-speech-recognition")


if __name__ == "__main__":
    main()
