"""What a refit of a full-size model would take: models, systems and published figures, and the time model's answer."""
