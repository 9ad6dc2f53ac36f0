"""The shape of run_translation.py: BART, whose first token is forced; length and beams are given to each call."""

import parts
from generation import PairArguments, make_trainer, predict, prepare_pairs
from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainingArguments


def main():
    model_args, data_args, training_args, checkpoint = parts.begin(
        parts.ModelArguments, PairArguments, Seq2SeqTrainingArguments
    )
    tokenizer = parts.word_tokenizer("en", "de")
    width = model_args.hidden_size
    stacks = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    ends = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 2, "eos_token_id": tokenizer.sep_token_id}
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=width,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
        decoder_start_token_id=tokenizer.sep_token_id,
        forced_eos_token_id=None,
        **stacks,
        **ends,
    )
    model = BartForConditionalGeneration(config)
    model.generation_config.forced_bos_token_id = tokenizer.convert_tokens_to_ids(data_args.target_lang)

    def read(rows):
        pairs = [{"en": source, "de": target} for source, target in zip(rows["source"], rows["target"], strict=True)]
        return [pair[data_args.source_lang] for pair in pairs], [pair[data_args.target_lang] for pair in pairs]

    data = prepare_pairs(tokenizer, data_args, training_args, read)
    trainer = make_trainer(model, tokenizer, data_args, training_args, data, "bleu")
    parts.train(trainer, checkpoint)
    settings = {"max_length": data_args.val_max_target_length, "num_beams": data_args.num_beams}
    parts.evaluate(trainer, **settings)
    if training_args.do_predict:
        predict(trainer, tokenizer, data["test"], **settings)
    languages = [name for name in (data_args.source_lang, data_args.target_lang) if name is not None]
    parts.describe(trainer, "translation", language=languages)


if __name__ == "__main__":
    main()
