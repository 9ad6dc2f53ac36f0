"""The work behind `TFTrainer`: tf.data's batches, Keras' optimizers, TensorFlow's models and files, all for torch."""
