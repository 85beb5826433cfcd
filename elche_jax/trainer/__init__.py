"""The loop owned: `Trainer`, and what one tells it and hears of it."""
