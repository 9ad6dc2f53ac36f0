"""Messages, notes on errors, signatures, configuration files, safe loading of torch's files, and the class of a Trainer's parts."""
