"""Messages, notes on errors, and safe loading of torch's files, used by all packages."""
