"""What a script asks for: the arguments by subject, their checks, and what they mean once parsed."""
