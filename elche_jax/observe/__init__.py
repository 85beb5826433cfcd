"""What a run looked like: records, the report made of them, pictures of it."""
