"""Internals of `TFTrainer`: converts tf.data batches, Keras optimizers and TensorFlow weights to torch."""
