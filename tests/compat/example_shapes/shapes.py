"""Which script has the shape of which official example (huggingface/transformers, examples/pytorch), and its flags."""

from typing import NamedTuple

COMMON = """
    --output_dir out --do_train --do_eval --per_device_train_batch_size 4 --per_device_eval_batch_size 4
    --learning_rate 0.005 --num_train_epochs 2 --logging_steps 1 --save_steps 3 --report_to none --use_cpu
    --optim adamw_torch --seed 7
"""
BEST = "--eval_strategy steps --eval_steps 3 --load_best_model_at_end True"


class Shape(NamedTuple):
    """One script.

    Attributes:
        official: the example that it stands for.
        flags: what its command line has besides COMMON.
        again: flags of a second run in the same folder, which goes on from the last checkpoint there.
        as_json: the arguments are in a JSON file.
        needs: modules without which the model of transformers does not train.
    """

    official: str
    flags: str = ""
    again: str | None = None
    as_json: bool = False
    needs: tuple[str, ...] = ()


SHAPES = {
    "text_classification": Shape(
        "text-classification/run_glue.py",
        f"--do_predict {BEST} --metric_for_best_model combined_score --save_total_limit 2 --warmup_steps 2",
    ),
    "label_classification": Shape(
        "text-classification/run_classification.py",
        f"--do_predict {BEST} --metric_for_best_model f1 --shuffle_train_dataset --max_eval_samples 11",
    ),
    "cross_lingual": Shape(
        "text-classification/run_xnli.py",
        "--do_predict --language de --train_language en --pad_to_max_length False --eval_strategy epoch "
        "--save_strategy epoch --weight_decay 0.1 --train_samples 22",
    ),
    "causal_language_model": Shape(
        "language-modeling/run_clm.py",
        "--gradient_accumulation_steps 2 --eval_strategy epoch --lr_scheduler_type cosine "
        "--config_overrides attention_dropout=0.1",
        again="--num_train_epochs 3",
    ),
    "masked_language_model": Shape(
        "language-modeling/run_mlm.py",
        "--eval_strategy steps --eval_steps 4 --line_by_line --pad_to_max_length False --mlm_probability 0.3",
    ),
    "permuted_language_model": Shape("language-modeling/run_plm.py", "--max_seq_length 16 --max_grad_norm 0.5"),
    "fill_in_the_middle": Shape(
        "language-modeling/run_fim.py", "--gradient_accumulation_steps 3 --include_num_input_tokens_seen True"
    ),
    "multiple_choice": Shape(
        "multiple-choice/run_swag.py", "--pad_to_max_length False --eval_strategy epoch --train_samples 14"
    ),
    "question_answering": Shape(
        "question-answering/run_qa.py",
        f"--do_predict --version_2_with_negative {BEST} --metric_for_best_model f1 --pad_to_max_length False",
        again="--num_train_epochs 3 --do_predict",
    ),
    "question_answering_beams": Shape(
        "question-answering/run_qa_beam_search.py", "--do_predict --version_2_with_negative True"
    ),
    "question_answering_generated": Shape(
        "question-answering/run_seq2seq_qa.py",
        "--do_predict --predict_with_generate --generation_max_length 8 --eval_strategy epoch --num_beams 2",
    ),
    "summarization": Shape(
        "summarization/run_summarization.py",
        "--do_predict --predict_with_generate --source_prefix summarize --label_smoothing_factor 0.1 "
        "--eval_strategy steps --eval_steps 4 --pad_to_max_length False --gradient_accumulation_steps 2",
    ),
    "translation": Shape(
        "translation/run_translation.py",
        "--do_predict --predict_with_generate --source_lang en --target_lang de --num_beams 3 --eval_strategy epoch",
        as_json=True,
    ),
    "token_classification": Shape(
        "token-classification/run_ner.py",
        "--do_predict --return_entity_level_metrics --eval_strategy epoch --eval_accumulation_steps 2",
    ),
    "image_classification": Shape(
        "image-classification/run_image_classification.py",
        # Not the best model at the end: transformers 5 does not find a ViT's weights again, as the ledger says.
        "--remove_unused_columns False --eval_strategy steps --eval_steps 3 --dataloader_drop_last True",
    ),
    "masked_autoencoder": Shape(
        "image-pretraining/run_mae.py",
        "--remove_unused_columns False --label_names pixel_values --base_learning_rate 0.1 --eval_strategy epoch "
        "--lr_scheduler_type cosine --warmup_steps 1 --weight_decay 0.05",
    ),
    "masked_image_model": Shape(
        "image-pretraining/run_mim.py",
        "--remove_unused_columns False --label_names bool_masked_pos --eval_strategy epoch",
        as_json=True,
    ),
    "object_detection": Shape(
        "object-detection/run_object_detection.py",
        "--remove_unused_columns False --eval_do_concat_batches False --eval_strategy epoch --max_grad_norm 0.01 "
        "--save_total_limit 1",
        needs=("scipy", "PIL"),
    ),
    "instance_segmentation": Shape(
        "instance-segmentation/run_instance_segmentation.py",
        "--eval_strategy steps --eval_steps 4",
        needs=("scipy", "PIL"),
    ),
    "semantic_segmentation": Shape(
        "semantic-segmentation/run_semantic_segmentation.py",
        "--remove_unused_columns False --eval_strategy steps --eval_steps 4 --lr_scheduler_type polynomial",
    ),
    "audio_classification": Shape(
        "audio-classification/run_audio_classification.py",
        f"--remove_unused_columns False {BEST} --metric_for_best_model accuracy --gradient_accumulation_steps 2",
    ),
    "speech_letters": Shape(
        "speech-recognition/run_speech_recognition_ctc.py",
        "--eval_strategy steps --eval_steps 4 --eval_metrics wer cer --gradient_checkpointing --save_total_limit 2",
    ),
    "speech_adapter": Shape(
        "speech-recognition/run_speech_recognition_ctc_adapter.py",
        "--target_language tur --eval_strategy steps --eval_steps 3",
    ),
    "speech_generated": Shape(
        "speech-recognition/run_speech_recognition_seq2seq.py",
        "--predict_with_generate --generation_max_length 8 --eval_strategy epoch --remove_unused_columns False",
    ),
    "contrastive": Shape(
        "contrastive-image-text/run_clip.py", "--remove_unused_columns False --freeze_text_model --warmup_steps 2"
    ),
}
