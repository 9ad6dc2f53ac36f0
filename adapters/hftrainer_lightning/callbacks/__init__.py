"""What Lightning's callbacks need beyond hooks."""
