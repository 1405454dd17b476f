"""What moves bytes."""
