"""What all packages use to speak: messages, notes on errors; and how files of torch are read."""
