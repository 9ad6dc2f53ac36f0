"""What every package uses: messages, notes on errors, signatures, configuration files, safe loading, and `Part`."""
